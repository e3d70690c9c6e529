"""What the views show, as one safetensors file: named arrays, and JSON about them in the file's metadata.

A head's maps go as factors, n × d numbers, and the browser builds rows of n × n from them: queries and keys for raw
attention; for effective attention, an orthonormal basis of the values and each row's coefficients in it. Where a model
adds a bias to its scores, or a Result holds only numbers, the maps go as they are. `static/head.js` and
`static/rows.js` read what is written here.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save

from identikit.attention.effective import Layer
from identikit.attention.intervals import Bounding, bounds_of
from identikit.attention.result import AttentionIntervals, EffectiveAttention
from identikit.attribution.result import TokenAttribution
from identikit.errors import InputError, Unavailable
from identikit.maths.effective import lengths_through
from identikit.maths.intervals import witnesses
from identikit.progress import Progress, silent
from identikit.result import Result, plain
from identikit.shapes import Bool, Float, Tensor
from identikit.text import shown
from identikit.tokens.result import IdentityMap, TokenInversion
from identikit.verdict.certainty import Sample
from identikit.verdict.numbers import NEAR, Explanation
from identikit.verdict.words import sections
from identikit.version import __version__

FORMAT = "identikit-view-1"
LARGEST = 96 << 20  # bytes of a file above which it is refused
EPSILONS = (0.001, 0.003, 0.01, 0.03, 0.1)  # by which shares of its norm a head's output may move
LISTED = 96  # of how many rows a file of a short text holds vertices and the grid of epsilons, at most
VERTICES = 12  # of how many edges per row a file holds vertices, the widest first
ALL_VERTICES = 64  # the same for a row that was asked for
SOURCES = 32  # sources that a file holds of each hidden vector of a long text; of a short one it holds all
SHORT = 128  # tokens up to which a text is short: simplex maps and all sources are held
GRID_SECONDS = 5.0  # about how long to bound rows for the grid of epsilons
NARROW = 1e-6  # an interval that is narrower does not move
ROW_SECONDS = 20.0  # the same for a row that was asked for
CLOSE = 2e-6  # how far float32 factors may be from effective attention; beyond, they are sent in float64

Place = tuple[int, int, int]


@dataclass
class _File:
    """The arrays and the JSON that are gathered for a file."""

    arrays: dict[str, Tensor] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def bytes(self) -> bytes:
        """Return the safetensors file, or refuse one that no browser would like."""
        whole = torch.contiguous_format
        arrays = {name: array.detach().cpu().clone(memory_format=whole) for name, array in self.arrays.items()}
        size = sum(array.nbytes for array in arrays.values())
        if size > LARGEST:
            raise InputError(
                f"A page of this result would take {size / 2**20:,.0f} MiB, and browsers get slow above "
                f"{LARGEST / 2**20:,.0f}. Show fewer layers: effective_attention(model, text, layers=…).save_html(…)."
            )
        return save(arrays, {"identikit": json.dumps(plain(self.about), ensure_ascii=False, allow_nan=False)})


def packed(result: Result, *, progress: Progress = silent) -> bytes:
    """Return everything that the views show of a result."""
    for kind, pack in _PACKERS.items():
        if isinstance(result, kind):
            file = _File(about=_header(result))
            pack(file, result, progress)
            return file.bytes()
    raise InputError(
        f"{result._a_kind().capitalize()} has no page of its own: use plot(), or the page of explain(model, text)."
    )


def _header(result: Result) -> dict[str, Any]:
    tokens = [shown(token) for token in result.tokens]
    reading = getattr(result.source, "reading", None)
    recipe = None if reading is None else reading.model.recipe
    return {
        "format": FORMAT,
        "version": __version__,
        "kind": result.kind,
        "model": result.model_name,
        "source": _named(recipe and recipe.source),
        "text": None if reading is None else _plain_text(reading.text),
        "tokens": tokens,
        "special": result.about.get("special") or [False] * len(tokens),
        "words": result.about.get("words") or [],
        "provenance": plain(asdict(result.provenance)),
        "unavailable": {},
    }


def _named(source: str | None) -> str | None:
    """Return where a model was loaded from, as a page may say it: of a folder only its own name."""
    return f"path/to/{Path(source).name}" if source is not None and Path(source).is_absolute() else source


def _plain_text(text: Any) -> Any:
    """Return a text as JSON holds it: a string, two, or token ids; None for what is not text."""
    if isinstance(text, str):
        return text
    if isinstance(text, tuple | list) and all(isinstance(one, str | int) for one in text):
        return list(text)
    return None


# The parts of a file


def _explanation(file: _File, result: Explanation, progress: Progress) -> None:
    own = sections(result)
    file.about["verdict"] = {"headline": own[0]["paragraphs"][0] if own[0]["paragraphs"] else "", "sections": own}
    for name in ("attention", "identity", "attribution"):
        part = getattr(result, name)
        if isinstance(part, Unavailable):
            file.about["unavailable"][name] = part.reason
    if isinstance(result.attention, EffectiveAttention):
        file.about |= {name: _header(result.attention)[name] for name in ("source", "text")}
        _attention(file, result.attention, progress)
        _bounded(file, result, progress)
    if isinstance(result.identity, IdentityMap):
        _identity(file, result.identity, progress)
    if isinstance(result.attribution, TokenAttribution):
        _attribution(file, result.attribution, progress)
        file.about["attribution"] |= {"near": result.about.get("near"), "near_within": NEAR}


def _attention(file: _File, result: EffectiveAttention, progress: Progress) -> None:
    """Add the heads: their maps, what they are found by, and the masks."""
    n = len(result.tokens)
    if any(result._axis(name).tokens != result.tokens for name in ("query", "key")):
        raise InputError("A page shows whole maps: select layers and heads, but not queries or keys.")
    layers, heads = result._axis("layer"), result._axis("head")
    special = [place for place, is_special in enumerate(file.about["special"]) if is_special]
    live: Any = result.source if _is_live(result) else None
    about: list[dict[str, Any]] = []
    masks: list[Tensor] = []
    for place, layer in enumerate(layers.places):
        progress("page, layers", place, len(layers))
        where: dict[str, Sequence[int]] = {"layer": [layer], "head": heads.places, "query": range(n), "key": range(n)}
        if live is None or live.parts[layer].call.bias is not None:
            arrays = {name: result.source.read(name, where)[0].float() for name in ("raw", "effective")}
            about.append({"form": "dense"})
        else:
            arrays, facts = _factors(live.parts[layer], heads.places)
            about.append({"form": "factors", **facts})
        if live is not None and n <= SHORT:
            whole = replace(
                result, axes=(replace(layers, values=(layers.values[place],), places=(layer,)), *result.axes[1:])
            )
            arrays["simplex"] = whole.simplex.reshape(len(heads), n, n).float()
        if "visible" in result.source.dims:
            seen = result.source.read("visible", where)[0].cpu()
            about[-1]["mask"] = next((at for at, mask in enumerate(masks) if torch.equal(mask, seen)), len(masks))
            masks += [seen] * (about[-1]["mask"] == len(masks))
        file.arrays |= {f"layer{place}.{name}": array for name, array in arrays.items()}
    progress("page, layers", len(layers), len(layers))
    if masks:
        file.arrays["visible"] = torch.stack([_bits(mask) for mask in masks])
    file.about["attention"] = {
        "layer_numbers": list(layers.values),
        "head_numbers": list(heads.values),
        "layers": about,
        "special_group": "special tokens" if special else "first token",
        "sinks": special or [0],
        "dtype": result.provenance.dtype,
        "causal": bool(result.about.get("causal")),
        "d_value": result.about.get("d_value"),
        "live": live is not None,
    }
    file.arrays |= {f"heads.{name}": array.float() for name, array in _readings(result, special or [0]).items()}


def _is_live(result: EffectiveAttention) -> bool:
    return hasattr(result.source, "reading")


def _bits(mask: Bool[Tensor, "query key"]) -> Tensor:
    """Return a mask as bits, eight keys to a byte, the first key the highest bit."""
    padded = F.pad(mask, (0, -mask.shape[1] % 8)).unflatten(1, (-1, 8)).long()
    return (padded << torch.arange(7, -1, -1)).sum(-1).to(torch.uint8)


def _factors(part: Layer, heads: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a layer's heads as factors, and which of them use which keys and which basis."""
    call, chosen = part.call, part.heads[list(heads)]
    key_heads = (chosen // call.groups).unique()
    groups = sorted({place // part.factors.group for place in heads})
    values, passed = part.factors.values.double(), part.passed.values.double()
    bases = {group: _basis(values[group], passed[group]) for group in groups}
    coefficients, through = [], []
    for place in heads:
        group = place // part.factors.group
        basis = bases[group]
        coefficients.append(part.factors.coefficients[place].double() @ values[group].mT @ basis)
        lengths = passed[group]
        if part.gate is None:  # a gate differs from query to query: there, the output before it is what is measured
            lengths = lengths @ lengths_through(part.passed, part.projection, place).to(lengths)
        through.append(basis.mT @ lengths)
    width = max(basis.shape[1] for basis in bases.values())
    basis = torch.stack([F.pad(one, (0, width - one.shape[1])) for one in bases.values()])
    solved = torch.stack([F.pad(one, (0, width - one.shape[1])) for one in coefficients])
    basis_head = [groups.index(place // part.factors.group) for place in heads]
    wide = torch.float32 if _close(solved, basis[basis_head]) else torch.float64
    arrays = {
        "query": _narrow(call.query[0, chosen]),
        "key": _narrow(call.key[0, key_heads]),
        "coefficients": solved.to(wide),
        "basis": basis.to(wide),
        "through": torch.stack([F.pad(one, (0, 0, 0, width - len(one))) for one in through]).float(),
        "identifiable": part.factors.identifiable[list(heads)].to(torch.uint8),
    }
    facts = {
        "key_head": [key_heads.tolist().index(int(head) // call.groups) for head in chosen],
        "basis_head": basis_head,
        "scaling": float(call.scaling),
        "softcap": call.softcap,
        "sink": None if call.sink is None else call.sink[chosen].double().tolist(),
    }
    return arrays, facts


def _narrow(numbers: Tensor) -> Tensor:
    return numbers.float() if numbers.dtype == torch.float64 else numbers


def _basis(values: Float[Tensor, "key d_v"], passed: Float[Tensor, "key d"]) -> Float[Tensor, "key rank"]:
    """Return an orthonormal basis of what effective attention was solved from, and of the values that are passed on."""
    basis = torch.linalg.qr(values).Q
    outside = passed - basis @ (basis.mT @ passed)
    return basis if outside.norm() <= 1e-6 * passed.norm() else torch.linalg.qr(torch.cat([values, passed], 1)).Q


def _close(coefficients: Float[Tensor, "head query rank"], basis: Float[Tensor, "head key rank"]) -> bool:
    """Return whether float32 factors give the same effective attention, to the digits that are shown."""
    for rows in coefficients.split(256, dim=1):
        exact, rounded = rows @ basis.mT, rows.float().double() @ basis.float().double().mT
        if float((exact - rounded).abs().max()) > CLOSE:
            return False
    return True


def _readings(result: EffectiveAttention, sinks: list[int]) -> dict[str, Tensor]:
    """Return what heads are found by, (layer, head); what a result by words or a difference lacks is left out."""
    axes = {axis.name: axis.places for axis in result.axes}
    raw = result.source.read("raw", {**axes, "key": sinks})
    found = {"sink_mass": raw.double().sum(-1).mean(-1)}
    found |= {name: result.source.read(name, axes) for name in ("pearson", "residual") if name in result.source.dims}
    if "null_dim" in result.source.dims:
        found["null_dim"] = result.source.read("null_dim", axes).double().mean(-1)
    return found


def _identity(file: _File, result: Result, progress: Progress) -> None:
    """Add whether each token is still itself, layer by layer."""
    facts = ("map", "distance", "fitted_to", "repeated", "candidates", "vocabulary", "prefix")
    known = {name: result.about[name] for name in facts if name in result.about}
    file.about["identity"] = {"layers": list(result._axis("layer").values), **known}
    file.arrays |= {
        "identity.recovered": result._read("recovered").to(torch.uint8),
        "identity.margin": result._read("margin").float(),
        "identity.winner": result._read("winner").int(),
    }


def _attribution(file: _File, result: TokenAttribution, progress: Progress) -> None:
    """Add the largest sources of every hidden vector: all of them in a short text."""
    shares = result.whole().mT
    kept = len(result.tokens) if len(result.tokens) <= SHORT else SOURCES
    top = shares.topk(kept, dim=-1)
    file.arrays |= {"attribution.input": top.indices.int(), "attribution.share": top.values.float()}
    if "stderr" in result.source.dims:
        file.arrays["attribution.stderr"] = result._read("stderr").mT.gather(-1, top.indices).float()
    facts = {name: result.about.get(name) for name in ("probes", "norm")}
    file.about["attribution"] = {"layers": list(result.layers), "kept": kept, "near": None, **facts}


# Rows and their intervals


def _intervals(file: _File, result: AttentionIntervals, progress: Progress) -> None:
    """Add the rows of intervals that were asked for by themselves."""
    if result.axes[-1].name != "key" or result.axes[-1].tokens != result.tokens:
        raise InputError("A page shows intervals over all keys: leave out key= and groups=, or use plot().")
    layers, heads, queries = result.axes[:3]
    places = [(i, h, q) for i in range(len(layers)) for h in range(len(heads)) for q in queries.values]
    file.about["attention"] = {
        "layer_numbers": list(layers.values),
        "head_numbers": list(heads.values),
        "layers": [{"form": "none"}] * len(layers),
        "live": False,
    }
    order = result._read("certain_order").flatten()
    strongest = torch.where(order < 0, torch.nan, (order > 0).double())
    flat = {name: result._read(name).flatten(0, 2) for name in ("lower", "upper", "raw")}
    _rows(file, places, flat["lower"], flat["upper"], strongest)
    file.arrays["rows.raw"] = flat["raw"].float()


def _rows(
    file: _File,
    places: Sequence[Place],
    lower: Float[Tensor, "row key"],
    upper: Tensor,
    strongest: Float[Tensor, "row"],
) -> None:
    file.arrays |= {
        "rows.place": torch.tensor(places, dtype=torch.int32).reshape(-1, 3),
        "rows.lower": lower.float(),
        "rows.upper": upper.float(),
        "rows.strongest": strongest.float(),
    }
    file.about["rows"] = {"epsilons": []}


def _bounded(file: _File, result: Explanation, progress: Progress) -> None:
    """Add the rows that an explanation bounded, and of some the vertices and the grid of epsilons."""
    attention, sample = result.attention, result.bounded
    if sample is None or not isinstance(attention, EffectiveAttention):
        return
    places = [(layer, head, query) for layer, head, query in sample.places.tolist()]
    _rows(file, places, sample.lower, sample.upper, sample.strongest)
    free = attention.null_dim.cpu() > 0
    certain = torch.where(free, torch.nan, 1 - attention.sink.double().cpu())
    fixed = torch.where(free, 0.0, certain)
    certain[tuple(sample.places.mT)] = sample.lower.sum(-1).clamp(max=1.0)
    drawn = torch.where(free, certain, torch.nan).nanmean(-1)  # free rows were drawn at random
    share = free.double().mean(-1)
    mass = torch.where(share > 0, share * drawn.nan_to_num() + fixed.mean(-1), fixed.mean(-1))
    file.arrays["certain"] = certain.float()
    file.arrays["heads.certain_mass"] = mass.masked_fill((share > 0) & drawn.isnan(), torch.nan).float()
    chosen = _listed(result, sample)
    if chosen:
        listed = [places[row] for row in chosen]
        named = [place for place in _named_rows(result) if place in listed] or listed
        first = next((place for place in named if file.about["tokens"][place[2]].strip().isalpha()), named[0])
        file.about["first"] = dict(zip(("layer", "head", "query"), first, strict=True))
    if _is_live(attention):
        _vertices(file, attention, places, chosen, VERTICES, progress)
        _grid(file, attention, [places[row] for row in chosen], chosen, progress)


def _listed(result: Explanation, sample: Sample) -> list[int]:
    """Choose rows: those that the verdict names, then the widest of each head, then the widest; ordered by place."""
    width = (sample.upper - sample.lower).amax(-1)
    where = {tuple(place): row for row, place in enumerate(sample.places.tolist())}
    wanted = [where[place] for place in _named_rows(result) if place in where]
    order = width.argsort(descending=True).tolist()
    heads = {tuple(sample.places[row, :2].tolist()): row for row in reversed(order)}
    ranked = dict.fromkeys([*wanted, *sorted(heads.values(), key=lambda row: -float(width[row])), *order])
    most = LISTED * SHORT // max(SHORT, sample.lower.shape[1])  # the grid of a row grows with the text
    chosen = [row for row in ranked if float(width[row]) > NARROW][:most]
    return sorted(chosen, key=lambda row: sample.places[row].tolist())


def _named_rows(result: Explanation) -> list[Place]:
    """Return the rows of the edges that the verdict names, as places."""
    numbers = result._axis("layer").values
    edges = (*result.about["least_certain"], *result.about["outside"])
    return [(numbers.index(edge["layer"]), edge["head"], edge["query"]) for edge in edges]


def _vertices(
    file: _File,
    attention: EffectiveAttention,
    places: Sequence[Place],
    chosen: list[int],
    most: int,
    progress: Progress,
) -> None:
    """Add, for the widest edges of the chosen rows, the rows with the same output at both ends of their intervals."""
    source: Any = attention.source
    layers, heads = attention._axis("layer").places, attention._axis("head").places
    found: list[tuple[int, int, int, Tensor]] = []
    for done, row in enumerate(chosen):
        progress("page, rows that can be moved", done, len(chosen))
        layer, head, query = places[row]
        one = source.row(layers[layer], heads[head], query)
        width = file.arrays["rows.upper"][row] - file.arrays["rows.lower"][row]
        for key in width.topk(min(most, len(width))).indices.tolist():
            if float(width[key]) > NARROW:
                at = (one.keys == key).nonzero()[0].tolist()
                for end, weights in enumerate(witnesses(one.attention, one.values, at)):
                    found.append((row, key, end, one.over_all_keys(weights).cpu()))
    progress("page, rows that can be moved", len(chosen), len(chosen))
    kept = [weights.nonzero()[:, 0] for *_, weights in found]
    starts = torch.tensor([0, *(len(keys) for keys in kept)]).cumsum(0)
    numbers = {name: torch.tensor([one[at] for one in found]) for at, name in enumerate(("row", "key", "end"))}
    file.arrays |= {f"vertex.{name}": values.int().reshape(-1) for name, values in numbers.items()}
    nothing = torch.zeros(0, dtype=torch.long)
    file.arrays["vertex.start"] = starts.int()
    file.arrays["vertex.keys"] = torch.cat([nothing, *kept]).int()
    weights = [one[-1][keys] for one, keys in zip(found, kept, strict=True)]
    file.arrays["vertex.weights"] = torch.cat([nothing.double(), *weights]).float()


def _grid(
    file: _File,
    attention: EffectiveAttention,
    places: Sequence[Place],
    rows: list[int],
    progress: Progress,
    epsilons: Sequence[float] = EPSILONS,
    seconds: float | None = None,
) -> None:
    """Add the ends of rows when the head's output may move; NaN for what the time did not allow."""
    layers, heads = attention._axis("layer").places, attention._axis("head").places
    own = [(layers[layer], heads[head], query) for layer, head, query in places]
    lower, upper = [], []
    for done, epsilon in enumerate(epsilons):
        progress("page, grid of epsilons", done, len(epsilons))
        bounding = Bounding("certified", epsilon, (seconds or GRID_SECONDS) / len(epsilons))
        ends = bounds_of(attention, own, bounding=bounding)[1] if own else None
        if ends is not None:
            unknown = ends.gap.isnan()
            lower.append(ends.lower.masked_fill(unknown, torch.nan))
            upper.append(ends.upper.masked_fill(unknown, torch.nan))
    progress("page, grid of epsilons", len(epsilons), len(epsilons))
    if lower:
        file.arrays["grid.row"] = torch.tensor(rows, dtype=torch.int32)
        file.arrays |= {"grid.lower": torch.stack(lower, 1).float(), "grid.upper": torch.stack(upper, 1).float()}
        file.about["rows"]["epsilons"] = list(epsilons)


def packed_rows(attention: EffectiveAttention, rows: Sequence[Place], *, epsilon: float = 0.0) -> bytes:
    """Return the intervals of some rows (the numbers of layer, head and query) with all of their vertices.

    With `epsilon`, return their ends when the output may move by this share of its norm instead.
    """
    layers, heads, queries = (attention._axis(name) for name in ("layer", "head", "query"))
    places = sorted({(layers.sel(layer).places[0], heads.sel(head).places[0], queries.sel(query).places[0])
                     for layer, head, query in rows})  # fmt: skip
    _, ends = bounds_of(attention, places, bounding=Bounding("exact"))
    inside = [(layers.places.index(layer), heads.places.index(head), query) for layer, head, query in places]
    file = _File(about={"format": FORMAT, "kind": "rows"})
    _rows(
        file,
        inside,
        ends.lower.cpu(),
        ends.upper.cpu(),
        torch.where(ends.order < 0, torch.nan, (ends.order > 0).double()),
    )
    everyone = list(range(len(inside)))
    if epsilon:
        _grid(file, attention, inside, everyone, silent, (epsilon,), ROW_SECONDS)
    else:
        _vertices(file, attention, inside, everyone, ALL_VERTICES, silent)
    return file.bytes()


def packed_simplex(attention: EffectiveAttention, layer: int, head: int) -> bytes:
    """Return the simplex map of one head, by its numbers."""
    file = _File(about={"format": FORMAT, "kind": "simplex"})
    file.arrays["simplex"] = attention.sel(layer=layer, head=head).simplex.float()
    return file.bytes()


_PACKERS: dict[type[Result], Callable[[_File, Any, Progress], None]] = {
    Explanation: _explanation,
    EffectiveAttention: _attention,
    AttentionIntervals: _intervals,
    IdentityMap: _identity,
    TokenInversion: _identity,
    TokenAttribution: _attribution,
}
