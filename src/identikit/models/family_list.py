"""The table of families as people read it: what each is called, checkpoints they know, and what works with it."""

from typing import TypedDict

from identikit.models.table import FAMILIES

_READS = ("text", "text and image", "image", "sound")
_COLUMNS = {
    "model": "name",
    "`model_type`": "family",
    "checkpoints": "checkpoints",
    "attention and intervals": "attention",
    "decoder": "decoder",
    "attribution": "attribution",
    "identifiability": "identifiability",
    "inversion": "inversion",
}
_INTRODUCTION = """\
# Models

identikit reads checkpoints of these {count} architectures, by hub id, from a folder or from memory. `model_type` is
what the checkpoint's config.json says; for CLIP and SigLIP it says `clip` or `siglip`, and you choose a tower
([how](images_and_sounds.md#models-of-two-towers)). `identikit models` prints a shorter table. Each row is
checked on small random models against the modules' own outputs, and every model is checked again when it is loaded.

- **Attention and intervals**: effective attention, `verify`, and intervals. "some layers" means that only the layers
  with softmax attention are read; the others are named when they are asked for.
- **Decoder**: of models of two stacks, "self and cross" means that besides the encoder, which is what is read by
  default, the decoder's self-attention and its attention to the source are read, and its vectors and outputs attributed
  to source and target ([how](howto/translation.md)).
- **Attribution**: "exact" takes blocks apart and gets every Jacobian in one sweep. "forward mode" differentiates whole
  blocks, which is as exact but takes longer; so decoders are attributed.
- **Identifiability**: `token_identifiability`, for every model.
- **Models that read text and images** are read by their text decoder. A text may be an image and a question, or a chat
  with images ([how](images_and_sounds.md#images-inside-a-text)); all but inversion works with the images' tokens.
- **Inversion**: `invert`, for causal models that read text and whose tokens act on later ones only through attention.
  Not Llama 4, which scales queries by their place in the batch.
"""


class FamilyEntry(TypedDict):
    """What people want to know of a family."""

    family: str
    name: str
    checkpoints: list[str]
    reads: str
    attention: str
    decoder: str
    attribution: str
    identifiability: bool
    inversion: bool


def list_families() -> list[FamilyEntry]:
    """Return every family, in the order of what it reads and of its name."""
    rows: list[FamilyEntry] = []
    for kind, family in FAMILIES.items():
        reads = "text" if family.images is None else "text and image"
        reads = reads if family.features is None else family.features.modality
        rows.append(
            {
                "family": kind,
                "name": family.name,
                "checkpoints": list(family.checkpoints),
                "reads": reads,
                "attention": "all layers" if family.instead is None else "some layers",
                "decoder": "" if family.decoder is None else "self and cross",
                "attribution": "exact" if family.splits else "forward mode",
                "identifiability": True,
                "inversion": family.features is None and family.causal and family.splits and not family.by_place,
            }
        )
    return sorted(rows, key=lambda row: (_READS.index(row["reads"]), row["name"].lower(), row["family"]))


def summary_row(row: FamilyEntry) -> tuple[str, str, str, str]:
    """Return a listed family as a line: its type and name, a checkpoint, how attribution works, and what else works."""
    works = row["attribution"]
    if row["inversion"]:
        works += ", inversion"
    if row["decoder"]:
        works += ", decoder"
    if row["attention"] == "some layers":
        works += ", attention in some layers"
    return row["family"], row["name"], next(iter(row["checkpoints"]), ""), works


def models_page() -> str:
    """Return the page `docs/models.md`."""
    lines = [_INTRODUCTION.format(count=len(FAMILIES))]
    for reads in _READS:
        lines.append(f"## Models that read {reads if reads == 'text' else reads + 's'}\n")
        lines.append(f"| {' | '.join(_COLUMNS)} |")
        lines.append("|---" * len(_COLUMNS) + "|")
        for row in list_families():
            if row["reads"] == reads:
                lines.append(f"| {' | '.join(_cell(row[field]) for field in _COLUMNS.values())} |")
        lines.append("")
    return "\n".join(lines)


def _cell(value: str | bool | list[str]) -> str:
    if isinstance(value, list):
        return ", ".join(f"`{name}`" for name in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value
