"""Compare with other people's code that measures the same, and write docs/peers.md: `make peers [MODELS=...]`.

It needs transformer-lens and aopc beside identikit, which `make peers` installs in an environment of their own.
"""

import argparse
import copy
import datetime
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import identikit as ik

ROOT = Path(__file__).parents[1]
REPEATED = "The old dog chased the cat over the wall, and the cat ran to the house by the sea, where it slept. "
PATTERNS = {"previous": "previous_token_head", "same token": "duplicate_token_head", "induction": "induction_head"}
SENTENCES = (
    "The film was a joy from start to end.",
    "I would not see it again.",
    "The dog chased the cat.",
    "She left her keys at home today.",
    "Nobody in the room liked the film.",
    "It was the best day of her life.",
)
MASKS = 8
MEASURED = ("deletion", "insertion")
LEFT_OUT = ("exclude_bos", "exclude_current_token")


def tiny_gpt2() -> tuple[Any, Any]:
    """Return a small GPT-2 with random weights, sharp enough for heads to differ, and a tokenizer for it."""
    torch.manual_seed(0)
    tokenizer = copy.deepcopy(ik.load().tokenizer)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.ndim == 2 else 1)
    return model, tokenizer


def causal_models(folders: list[str]) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield names, what TransformerLens takes for them, and causal models with their tokenizers."""
    yield "a small GPT-2 with random weights", "gpt2", *tiny_gpt2()
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        yield Path(folder).name, folder, model, transformers.AutoTokenizer.from_pretrained(folder)


def pattern_of(ids: torch.Tensor, score: str) -> torch.Tensor:
    """Return which (query, key) a score is about, in the words of `head_scores`."""
    distance = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
    copies = (ids[:, None] == ids) & (distance > 0)
    if score == "induction":
        return torch.cat([torch.zeros(len(ids), 1, dtype=torch.bool), copies[:, :-1]], dim=1)
    return distance == 1 if score == "previous" else copies


def left_out(raw: torch.Tensor, pattern: torch.Tensor, what: str) -> torch.Tensor:
    """Return "mul" of (layer, head, query, key) without the first token, or without each token itself."""
    size = pattern.shape[0]
    kept = torch.ones(size, size) - torch.eye(size)
    if what == "exclude_bos":
        kept = (torch.arange(size) > 0).float().expand(size, -1)
    weights = raw * kept
    return (weights * pattern).sum((-2, -1)) / weights.sum((-2, -1))


def heads_of(name: str, known_as: str, hf: Any, tokenizer: Any) -> Iterator[str]:
    """Yield a row for each pattern: how far detect_head's scores are from what ours say they are."""
    from transformer_lens.head_detector import detect_head  # pyright: ignore[reportMissingImports]
    from transformer_lens.model_bridge import TransformerBridge  # pyright: ignore[reportMissingImports]

    model = ik.load(copy.deepcopy(hf), tokenizer)
    bridge = TransformerBridge.boot_transformers(known_as, hf_model=hf, tokenizer=tokenizer, device="cpu")
    text = REPEATED * 2
    ids = bridge.to_tokens(text)[0].cpu()
    found = ik.head_scores(model, ids.tolist(), scores=list(PATTERNS))
    raw = ik.effective_attention(model, ids.tolist()).raw.double()
    for place, (score, pattern_name) in enumerate(PATTERNS.items()):
        detect = partial(detect_head, bridge, text, pattern_name)
        pattern = pattern_of(ids, score)
        with_target = int(pattern.any(1).sum())
        share = with_target / len(ids)
        ours = found.raw[place] * share
        theirs = detect().double()
        apart = (theirs - ours).abs().max()
        absolute = (detect(error_measure="abs").double() - (2 * ours - pattern.sum() / len(ids))).abs().max()
        without = [
            float((detect(**{what: True}).double() - left_out(raw, pattern, what)).abs().max()) for what in LEFT_OUT
        ]
        layer, head = divmod(int(theirs.argmax()), model.n_heads)
        ends = [float(part[place, layer, head]) * share for part in (found.lower, found.upper)]
        best = f"L{layer}H{head}: {float(theirs.max()):.4f}, in [{ends[0]:.4f}, {ends[1]:.4f}]"
        cells = [f"{float(apart):.0e}", f"{float(absolute):.0e}", f"{max(without):.0e}", best]
        yield f"| {name}, {len(ids)} tokens | {pattern_name} | {with_target} | {' | '.join(cells)} |"
        print(score, *cells, flush=True)


def classifier(folder: Path, *, centred: bool) -> ik.Model:
    """Save the packaged model with a random head of two classes in a folder, and return it.

    Where it is `centred`, a text of masks is in either class with the same probability, so most replacements make a
    prediction less probable.
    """
    packaged = ik.load()
    torch.manual_seed(0)
    model = BertForSequenceClassification(packaged.hf.config).eval()
    model.bert.load_state_dict(packaged.hf.state_dict(), strict=False)
    tokenizer = packaged.tokenizer
    masked = [tokenizer.cls_token_id, *[tokenizer.mask_token_id] * MASKS, tokenizer.sep_token_id]
    with torch.no_grad():
        model.classifier.weight.mul_(20)  # random heads are nearly indifferent
        if centred:
            model.classifier.bias.copy_(-model(torch.tensor([masked])).logits[0])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ik.load(model, tokenizer)


class Drawn(NamedTuple):
    """A sentence with attributions that were drawn at random, and what explains its prediction."""

    text: str
    ids: list[int]
    label: int
    attributions: list[float]
    all_replaced: float

    @classmethod
    def of(cls, model: ik.Model, text: str) -> "Drawn":
        """Draw attributions, and find out how far the prediction falls when all tokens are replaced."""
        (encoded,) = model.encode(text)
        instead = [model.tokenizer.mask_token_id] * (len(encoded.ids) - 2)
        both = torch.tensor([encoded.ids, [encoded.ids[0], *instead, encoded.ids[-1]]])
        with torch.no_grad():
            whole, replaced = model.hf(both).logits.softmax(-1)
        label = int(whole.argmax())
        drawn = torch.rand(len(encoded.ids)).tolist()
        return cls(text, list(encoded.ids), label, drawn, float(whole[label] - replaced[label]))

    def areas(self, model: ik.Model, beam: int) -> list[float]:
        """Return what `evaluate` scores the attributions."""
        scores = torch.tensor(self.attributions)

        def drawn(_model: ik.Model, _text: object) -> torch.Tensor:
            return scores.expand(len(scores), -1)

        found = ik.evaluate(
            model, self.text, [drawn], tests="curves", target="prediction", replacement="mask", beam=beam
        )
        return [float(found.sel(measure="drawn", score=score).mean) for score in MEASURED]

    def starts_from_0(self, row: dict[str, float]) -> bool:
        """Whether aopc's greatest area is that of no effect before the last token: where its exact search starts."""
        return abs(row["upper_bound"] - self.all_replaced / (len(self.ids) - 2)) < 1e-6


def areas_of(folder: Path, *, centred: bool) -> Iterator[str]:
    """Yield rows that compare aopc's normalised areas with those of `evaluate`, by its exact ends and by its beam."""
    import datasets
    from aopc import Aopc  # pyright: ignore[reportMissingImports]

    model = classifier(folder, centred=centred)
    theirs = Aopc(str(folder))
    torch.manual_seed(0)
    texts = [Drawn.of(model, sentence) for sentence in SENTENCES]
    asked = [{"input_ids": text.ids, "target_label": text.label, "attributions": text.attributions} for text in texts]
    for method, beam in (("exact", 2 ** max(len(text.ids) for text in texts)), ("approx", 5), ("approx", 1)):
        rows = theirs.evaluate(datasets.Dataset.from_list(asked), normalization=method, beam_size=beam)
        apart: dict[bool, list[float]] = {True: [], False: []}
        for text, row in zip(texts, rows, strict=True):
            both = zip(
                text.areas(model, beam), (row["normalized_desc_aopc"], 1 - row["normalized_asc_aopc"]), strict=True
            )
            wide = method == "exact" and text.starts_from_0(row)
            apart[wide].append(max(abs(one - other) for one, other in both))
        head = "indifferent to masks" if centred else "as drawn"
        named = "exact" if method == "exact" else f"a beam of {beam}"
        for wide, several in apart.items():
            if several:
                search = f"{named}, where aopc stays at its start" if wide else named
                yield f"| {head} | {search} | {len(several)} | {max(several):.0e} |"


def page(heads: list[str], areas: list[str], command: str) -> str:
    """Return the page."""
    names = ("transformer-lens", "aopc", "identikit", "torch", "transformers", "numba")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    lengths = [len(text.ids) for text in ik.load().encode(list(SENTENCES))]
    return f"""# Beside other people's code

Written by `{command}` on {datetime.datetime.now(datetime.UTC):%Y-%m-%d}, on the CPU, with
{versions}. It installs
these in an environment of their own.

## Head scores, and TransformerLens' `detect_head`

Both read a text whose second half repeats its first. Let $s$ be the score of `head_scores`, the mean over the $R$ rows
that have a target, $n$ the number of tokens, and $K$ how many pairs of a query and a key are in the pattern. Then
`detect_head` gives

$$\\text{{"mul"}} = \\frac{{R}}{{n}}\\, s, \\qquad \\text{{"abs"}} = \\frac{{2Rs - K}}{{n}} .$$

Both are linear in the attention, so the exact range of $s$ gives theirs; the last column has it for the head with the
highest "mul". With `exclude_bos` or `exclude_current_token`, "mul" is divided by the weight that is left. This is a
ratio, for which we have no range; it is compared with the same ratio of our raw attention. The other columns say how
far scores are apart at most, over all heads (`detect_head` rounds "abs" to three digits, so 5e-4 is no difference).

| model | pattern | rows with a target | "mul" | "abs" | with exclusions | highest "mul" and its range |
|---|---|---|---|---|---|---|
{chr(10).join(heads)}

## Deletion and insertion, and NAOPC of the package aopc

{len(SENTENCES)} sentences of {min(lengths)} to {max(lengths)} tokens, and the packaged model with a random head of two
classes: as drawn, or with a bias that leaves it indifferent to a text of masks. As in aopc's own example, attributions
are drawn at random. With `evaluate(target="prediction", replacement="mask")`, *deletion* is aopc's normalised
descending area, and *insertion* is 1 minus its ascending one. Where aopc tries all orders, our beam is wide enough to
be exact.

| head | search for the ends | sentences | largest difference of a score |
|---|---|---|---|
{chr(10).join(areas)}

aopc's exact search for the greatest area starts at 0. Where every order makes the prediction more probable, it stays
there, and areas are normalised by an end that no order attains; these sentences have a row of their own. Its beam
search does not start there.

Our beam merges orders that have replaced the same sources, so it can find wider ends than aopc's of the same width:
this is the difference with a beam of 5. aopc explains a class, replaces by the mask, and can group tokens by
`word_map`; `evaluate` also explains hidden vectors and next tokens. On a GPU aopc runs its search in half precision.
"""


def main() -> None:
    """Compare, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="folders of causal models, beside a small random one")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "peers.md")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    heads = [row for model in causal_models(given.models) for row in heads_of(*model)]
    areas = []
    for centred in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            areas += areas_of(Path(folder), centred=centred)
    named = " ".join(Path(source).name for source in given.models)
    given.page.write_text(page(heads, areas, f"make peers MODELS={named!r}" if named else "make peers"))


if __name__ == "__main__":
    sys.exit(main())
