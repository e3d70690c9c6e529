"""The table of families as people read it: what each is called, checkpoints they know, and what works with it."""

from typing import Any

from identikit.models.table import FAMILIES, Family

_READS = ("text", "image", "sound")
_COLUMNS = {
    "model": "name",
    "`model_type`": "family",
    "checkpoints": "checkpoints",
    "attention and intervals": "attention",
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
- **Attribution**: "exact" takes blocks apart and gets every Jacobian in one sweep. "forward mode" differentiates whole
  blocks, which is as exact but takes longer.
- **Identifiability**: `token_identifiability`, for every model.
- **Inversion**: `invert`, for causal models that read text and whose tokens act on later ones only through attention.
  Not Llama 4, which scales queries by their place in the batch.
"""


def listed() -> list[dict[str, Any]]:
    """Return what people want to know of each family, in the order of what it reads and of its name."""
    rows = [_row(kind, family) for kind, family in FAMILIES.items()]
    return sorted(rows, key=lambda row: (_READS.index(row["reads"]), row["name"].lower(), row["family"]))


def _row(kind: str, family: Family) -> dict[str, Any]:
    reads = "text" if family.features is None else family.features.modality
    return {
        "family": kind,
        "name": family.name,
        "checkpoints": family.checkpoints.split(", ") if family.checkpoints else [],
        "reads": reads,
        "attention": "all layers" if family.instead is None else "some layers",
        "attribution": "exact" if family.splits else "forward mode",
        "identifiability": True,
        "inversion": reads == "text" and family.causal and family.splits and not family.by_place,
    }


def in_short(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return a listed family as a line: its type and name, a checkpoint, how attribution goes, and what else works."""
    more = [", inversion"] if row["inversion"] else []
    more += [", attention in some layers"] if row["attention"] == "some layers" else []
    return row["family"], row["name"], next(iter(row["checkpoints"]), ""), "".join([row["attribution"], *more])


def markdown() -> str:
    """Return the page `docs/models.md`."""
    lines = [_INTRODUCTION.format(count=len(FAMILIES))]
    for reads in _READS:
        lines += [f"## Models that read {reads if reads == 'text' else reads + 's'}\n", f"| {' | '.join(_COLUMNS)} |"]
        lines.append("|---" * len(_COLUMNS) + "|")
        for row in listed():
            if row["reads"] == reads:
                lines.append(f"| {' | '.join(_cell(row[field]) for field in _COLUMNS.values())} |")
        lines.append("")
    return "\n".join(lines)


def _cell(found: Any) -> str:
    if isinstance(found, list):
        return ", ".join(f"`{one}`" for one in found)
    return str(found) if isinstance(found, str) else "yes" if found else "no"
