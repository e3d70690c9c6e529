"""Try every property on the models at hand and write docs/validated.md: `make validate`, or `make validate MODELS=...`.

A cell is what was measured, and whether it is within what is allowed; what was not tried is empty.
"""

import argparse
import datetime
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import identikit as ik
from identikit import proof
from identikit.results.provenance import package_versions
from tests.reference.attribution import contributions, jacobians
from tests.reference.intervals import intervals as intervals_by_linprog

ROOT = Path(__file__).parents[1]
TEXT = (
    "The dog saw the cat near the old house by the sea, and the cat saw the dog, so the dog ran to the cat and the cat "
    "ran to the house, where the old dog could not go."
)
SHORT = "The dog saw the cat."

Cell = tuple[float, float] | None
"""What was measured and the most that is allowed; None where it cannot be tried."""


def rebuilds(model: Any) -> Cell:
    """The largest residual: how far effective attention misses the head output. Allowed: 1e-4."""
    residual = ik.effective_attention(model, TEXT).residual
    return float(residual.max()), 1e-4


def verify(model: Any) -> Cell:
    """How far effective attention in every row moves the logits and hidden vectors. Allowed: 1e-3, in bfloat16 0.2."""
    change = ik.effective_attention(model, TEXT).verify()
    allowed = 1e-3 if model.dtype == torch.float32 else 0.2
    return max(change.hidden, change.logits or 0.0), allowed


def linprog(model: Any) -> Cell:
    """How far ends of the last row of four heads are from those of scipy's linprog. Allowed: 1e-6."""
    attention = ik.effective_attention(model, TEXT)
    worst = 0.0
    for layer in (0, model.n_layers - 1):
        for head in (0, model.n_heads - 1):
            found = attention.intervals(layer=layer, head=head, query=-1)
            call = attention.captured().layers[layer].call
            values = call.value[0, head // call.groups].double().numpy()
            row = found.raw.double().numpy().reshape(-1)
            ends = intervals_by_linprog(row, values)
            for ours, theirs in zip((found.lower, found.upper), ends, strict=True):
                worst = max(worst, float(np.abs(ours.double().numpy().reshape(-1) - theirs).max()))
    return worst, 1e-6


def autograd(model: Any) -> Cell:
    """How far the contributions to the last token are from those of one backward pass per number. Allowed: 1e-4."""
    if model.dtype != torch.float32:
        return None
    found = ik.token_attribution(model, SHORT, layers=[-1], targets=[-1], source="after").contribution.reshape(-1)
    batch = next(model.batches(model.encode([SHORT])))
    kept: dict[str, Any] = {}

    def start(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        kept["input"] = given[0][0].detach().requires_grad_()
        return kept["input"][None], *given[1:]

    def end(module: Any, given: Any, made: Any) -> None:
        kept["output"] = made[0] if isinstance(made, tuple) else made

    hooks = [model.blocks[0].register_forward_pre_hook(start), model.blocks[-1].register_forward_hook(end)]
    try:
        model.hf(input_ids=batch.ids, attention_mask=batch.keep.long())
    finally:
        for hook in hooks:
            hook.remove()
    blocks = jacobians(kept["output"][0, -1:], kept["input"])
    literal = contributions(blocks, "frobenius").reshape(-1)
    return float((found.double() - literal).abs().max()), 1e-4


def inversion(model: Any) -> Cell:
    """The share of two tokens that are not recovered from layer 0, among the whole vocabulary. Allowed: 0."""
    if not model.causal or model.dtype != torch.float32:  # in half precision a CPU takes minutes
        return None
    found = ik.invert(model, SHORT, layer=0, positions=[2, 4])
    return 1 - float(torch.as_tensor(found.recovered).double().mean()), 0.0


def proofs(model: Any) -> Cell:
    """By how much proven ends of sixteen edges are wider than computed ones; all checked. Allowed: 1e-9."""
    found = ik.attention_intervals(model, TEXT, layer=[0, model.n_layers - 1], head=0, query=-1, key=list(range(8)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "proof.json"
        saved = found.save_proof(file)
        assert all(slack >= 0 for *_, slack in proof.check(file.read_text()))
    return max(saved.loss, 0.0), 1e-9


COLUMNS: dict[str, Callable[[Any], Cell]] = {
    "rebuilds outputs": rebuilds,
    "verify": verify,
    "intervals against linprog": linprog,
    "attribution against autograd": autograd,
    "inversion": inversion,
    "proofs": proofs,
}


def tried(check: Callable[[Any], Cell], model: Any) -> str:
    """Return a cell in words."""
    try:
        cell = check(model)
    except Exception as error:  # a model that cannot be tried is a finding
        return f"**failed**: {type(error).__name__} {str(error)[:80]}"
    if cell is None:
        return ""
    measured, allowed = cell
    return f"{measured:.1g}" if measured <= allowed else f"**{measured:.1g}, allowed {allowed:.1g}**"


def page(rows: dict[str, list[str]], sources: list[str]) -> str:
    """Return the page."""
    meanings = "\n".join(f"- **{name}**: {' '.join((check.__doc__ or '').split())}" for name, check in COLUMNS.items())
    lines = [f"| model | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    named = " ".join(Path(source).name for source in sources)
    command = f"make validate MODELS={named!r}" if named else "make validate"
    return f"""# What was validated

Written by `{command}` on {datetime.datetime.now(datetime.UTC):%Y-%m-%d}, on the CPU, with
{versions}. Each cell is what was measured, and is bold where that is more than is allowed. An empty cell was not tried.

{chr(10).join(lines)}

{meanings}
"""


def main() -> None:
    """Try all models, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="folders or hub ids, beside the packaged model")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "validated.md")
    given = parser.parse_args()
    sources: list[str | None] = [None, *given.models]
    rows: dict[str, list[str]] = {}
    for source in sources:
        for dtype in ("float32", "bfloat16"):
            model = ik.load(source, dtype=dtype)
            rows[f"{model.name}, {dtype}"] = [tried(check, model) for check in COLUMNS.values()]
            print(model.name, dtype, rows[f"{model.name}, {dtype}"], flush=True)
    given.page.write_text(page(rows, given.models))


if __name__ == "__main__":
    main()
