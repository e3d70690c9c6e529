"""Which role a head has, and whether it has it in every alternative with the same outputs.

A role is a pattern c of numbers over queries and keys: the weight on the previous token, on the token after an earlier
copy of this one, and so on. A head's score is the mean of $\\sum_j c_{ij} a_{ij}$ over the rows that have a target.
Rows move independently of each other while the output stays, so the ends of a mean are the means of the ends: exact.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from identikit.attention.captured import Captured
from identikit.attention.effective import captured_attention, recaptured
from identikit.attention.intervals import EXACTLY, Bounding, bounds_of
from identikit.attention.layer import Layer
from identikit.attention.proofs import Asked, ProofDraft, Provable, entries
from identikit.attention.reading_result import HeadScores
from identikit.attention.result import EffectiveAttention
from identikit.checks import function, known_names, random_seed, shortened, whole_number
from identikit.errors import InputError
from identikit.maths.measures import mean_over_texts
from identikit.maths.polytope.bounds import Question
from identikit.models.isolation import standard_torch_state
from identikit.models.model import Model, checked_model
from identikit.models.text_run import TextRun, run_texts
from identikit.progress import Watched, reporting
from identikit.results.axis import Axis, Index, selected_indices
from identikit.results.result import Result
from identikit.results.source import StoredArrays
from identikit.shapes import Bool, Float, Int, Tensor
from identikit.texts.text import is_text_list, key_batch

SINK = 0.3  # of a head's attention on the first token, from which on it counts as a sink (Gu et al., 2024)
_LONGEST = 2**24  # of the tokens that are repeated: more than anybody reads
_MADE = ("raw", "effective", "lower", "upper", "gap")


class ScoredText(NamedTuple):
    """What patterns are made from: the ids of queries and of keys, and which keys the tokenizer added.

    In cross-attention keys are tokens of another text (`crosses`), so places of the two say nothing of each other.
    """

    ids: Int[Tensor, "query"]
    keys: Int[Tensor, "key"]
    special: Bool[Tensor, "key"]
    crosses: bool

    @property
    def offset(self) -> Int[Tensor, "query key"]:
        """How many places each query stands after each key."""
        return torch.arange(len(self.ids))[:, None] - torch.arange(len(self.keys))

    @property
    def copies(self) -> Bool[Tensor, "query key"]:
        """Whether a key holds a copy of the query's token, in the text itself an earlier one."""
        same = self.ids[:, None] == self.keys
        return same if self.crosses else same & (self.offset > 0)


class HeadRole(NamedTuple):
    """A role: its name, what it means, and the pattern that a head with this role attends by.

    - `noun`: what a head is that has it; None: the score is not a share of attention
    - `across`: whether it means something in cross-attention, too
    - `above`: the score is the share of texts in which that of the pattern is above this; None: it is the pattern's own
    """

    name: str
    meaning: str
    pattern: Callable[[ScoredText], Tensor]
    noun: str | None = None
    across: bool = False
    above: float | None = None


ROLES: dict[str, HeadRole] = {}


def role(
    name: str, noun: str | None = None, *, across: bool = False, above: float | None = None
) -> Callable[[Callable[[ScoredText], Tensor]], HeadRole]:
    """Declare a role by the function that makes its pattern; the docstring says what the score is."""

    def declare(pattern: Callable[[ScoredText], Tensor]) -> HeadRole:
        ROLES[name] = HeadRole(name, " ".join((pattern.__doc__ or "").split()), pattern, noun, across, above)
        return ROLES[name]

    return declare


@role("self", "a self-attending head")
def own_token(text: ScoredText) -> Tensor:
    """Weight on the token itself."""
    return text.offset == 0


@role("previous", "a previous-token head")
def previous_token(text: ScoredText) -> Tensor:
    """Weight on the token before."""
    return text.offset == 1


@role("first", "a first-token head", across=True)
def first_token(text: ScoredText) -> Tensor:
    """Weight on the first token of the text, over the rows of all others."""
    first = (torch.arange(len(text.keys)) == 0).expand(len(text.ids), -1)
    return first if text.crosses else first & (text.offset != 0)


@role("special", "a special-token head", across=True)
def special_tokens(text: ScoredText) -> Tensor:
    """Weight on the special tokens, all together."""
    return text.special.expand(len(text.ids), -1)


@role("same token", "a same-token head", across=True)
def same_token(text: ScoredText) -> Tensor:
    """Weight on earlier copies of the token, over the rows that have one."""
    return text.copies


@role("induction", "an induction head")
def induction(text: ScoredText) -> Tensor:
    """Weight on the tokens that follow earlier copies of the token, over the rows that have one."""
    follows = torch.zeros_like(text.copies)
    follows[:, 1:] = text.copies[:, :-1]
    return follows


@role("distance")
def mean_distance(text: ScoredText) -> Tensor:
    """Mean distance of what is attended to, in tokens to either side."""
    return text.offset.abs()


@role("sink rate", across=True, above=SINK)
def sink_rate(text: ScoredText) -> Tensor:
    """Share of texts in which the first token receives more than 0.3 of the weight."""
    return first_token.pattern(text)


@reporting
@standard_torch_state()
def head_scores(
    model: Model | EffectiveAttention,
    texts: object = None,
    *,
    scores: Sequence[str] | str | None = None,
    layers: Index = None,
    heads: Index = None,
    seconds: float | int | None = None,
    truncate: bool = False,
    progress: Watched = None,
) -> HeadScores:
    """Score the role of every head on a text or a list of texts: raw, effective, and over all alternatives.

    A score is the mean over the rows that see a target, in each text, and then over texts: a `HeadScores` with `raw`,
    `effective`, `lower` and `upper` (score, layer, head), and with several texts their standard errors. The ends are
    exact: no alternative (other attention with the same outputs) has a lower or a higher score.

    In the place of a model and texts, it takes the `EffectiveAttention` of one text, of which it scores the selected
    layers and heads. Tokens of `attention_from` are compared by name.

    - `scores`: only these; None is all of "self", "previous", "first", "special", "same token", "induction", "distance"
      and "sink rate". `repeated_tokens` makes texts on which induction shows
    - `layers`, `heads`: only these, counted from 0
    - `seconds`: stop bounding after this time, which the texts share; rows that were not reached count with what holds
      for any attention
    """
    names = tuple(ROLES) if scores is None else known_names("scores", scores, tuple(ROLES))
    bounding = Bounding.checked(math.inf if seconds is None else seconds)
    progress = function("progress", progress)
    if isinstance(model, EffectiveAttention):
        captured = recaptured(model, "head_scores", {"texts": texts, "layers": layers, "heads": heads})
        if captured.reading.model.decoder_attention == "cross":
            names = _across(names, scores)
        parts = [scored(captured, [ROLES[name] for name in names], bounding)]
        result = scores_result(captured.reading, captured.reading.text, parts, names, model.layers, model.heads)
        return _provable(result, lambda: [captured])
    model = checked_model(model)
    if model.modality != "text":
        raise InputError(f"head_scores compares tokens, and {model.name} reads {model.modality}s.")
    wanted = model.select_layers(layers)
    which = selected_indices("head", heads, model.n_heads)
    read = run_texts(model, texts, layers=wanted, truncate=truncate)
    parts = []
    for place, reading in enumerate(read):
        captured = captured_attention(reading, layers=wanted, heads=which).captured()
        limited = bounding.shared(len(read) - place)
        parts.append(scored(captured, [ROLES[name] for name in names], limited))
        progress("head scores, texts", place + 1, len(read))
    text = [reading.text for reading in read] if is_text_list(texts) else read[0].text
    result = scores_result(read[0], text, parts, names, wanted, which)

    def captured_again() -> list[Captured]:
        model.check_unchanged(result.provenance.weights)
        again = run_texts(model, texts, layers=wanted, truncate=truncate)
        return [captured_attention(one, layers=wanted, heads=which).captured() for one in again]

    return _provable(result, captured_again)


def _across(names: Sequence[str], asked: object) -> tuple[str, ...]:
    """Return the scores that mean something where queries and keys are of two texts, or refuse another one."""
    meant = tuple(name for name in names if ROLES[name].across)
    if asked is not None and len(meant) < len(names):
        raise InputError(
            f"scores={shortened(asked)}: in cross-attention, queries and keys are of two texts, so only "
            f"{', '.join(name for name, each in ROLES.items() if each.across)} mean something. Choose among these."
        )
    return meant


def _provable(result: HeadScores, captured: Callable[[], list[Captured]]) -> HeadScores:
    assert isinstance(result.source, StoredArrays)
    return replace(result, source=Provable(result.source.arrays, result.source.dims, partial(_claims, captured)))


def scores_result(
    read: TextRun, text: Any, parts: list[Tensor], names: Sequence[str], layers: Sequence[int], heads: Sequence[int]
) -> HeadScores:
    """Return what the heads of one or several texts score, each of which was `scored`; `read` is one of them."""
    provenance = read.model.provenance(text, scores=names, layers=layers, heads=heads)
    axes = (Axis("score", tuple(names)), Axis("layer", tuple(layers)), Axis("head", tuple(heads)))
    about = {"texts": len(parts), "meanings": {name: ROLES[name].meaning for name in names}, "sink": SINK}
    about["nouns"] = {name: ROLES[name].noun for name in names}
    arrays = over_texts(torch.stack(parts), [ROLES[name] for name in names])
    dims = {name: ("score", "layer", "head")[: array.ndim] for name, array in arrays.items()}
    return HeadScores(axes, StoredArrays(arrays, dims), provenance, about)


def scored(
    captured: Captured, roles: Sequence[HeadRole], bounding: Bounding = EXACTLY
) -> Float[Tensor, "number score layer head"]:
    """Return what one text's heads score, raw to gap; NaN for a score that no row of the text has a target for."""
    found = []
    for at, (layer, patterns, targets) in enumerate(_patterns(captured, roles)):
        heads = torch.arange(len(layer.heads), device=layer.heads.device)
        keys = torch.arange(len(layer.tokens), device=heads.device)
        queries = targets.any(1).nonzero()[:, 0]
        if not len(queries):
            found.append(torch.full((len(_MADE), len(roles), len(heads)), torch.nan, dtype=torch.float64))
            continue
        places = [(at, head, query) for head in heads.tolist() for query in queries.tolist()]
        asked, place = (patterns * targets[..., None])[queries].unique(dim=1, return_inverse=True)  # some are the same
        objectives = asked.repeat(len(heads), 1, 1).to(heads.device)
        rows, bounds = bounds_of(captured, places, Question(objectives=objectives), bounding=bounding)
        effective = layer.effective(heads, queries.to(heads.device), slice(None)).double().flatten(0, 1)
        own = [(objectives @ weights[..., None])[..., 0] for weights in (rows.attention[:, : len(keys)], effective)]
        numbers = torch.stack([*own, bounds.lower, bounds.upper, bounds.gap])[..., place.to(heads.device)]
        numbers = numbers.unflatten(1, (len(heads), -1))
        count = targets[queries].sum(0).to(numbers)
        found.append((numbers.sum(2) / count).mT.masked_fill(count[:, None] == 0, torch.nan).cpu())
    return torch.stack(found, dim=2)


def _patterns(
    captured: Captured, roles: Sequence[HeadRole]
) -> Iterator[tuple[Layer, Float[Tensor, "query score key"], Bool[Tensor, "query score"]]]:
    """Yield each layer with the patterns of its visible keys, and which rows have a target for which score."""
    reading = captured.reading
    seen = key_batch(reading.batch, reading.model.decoder_attention)
    ids, key_ids = (None if batch.ids is None else batch.ids[0].cpu() for batch in (reading.batch, seen))
    if ids is None or key_ids is None or reading.batch.images is not None:  # all tokens of images have one id
        numbers = {name: number for number, name in enumerate(dict.fromkeys((*reading.tokens, *reading.keys)))}
        ids, key_ids = (torch.tensor([numbers[name] for name in names]) for names in (reading.tokens, reading.keys))
    text = ScoredText(ids, key_ids, seen.special[0].cpu(), reading.model.decoder_attention == "cross")
    every = torch.stack([role.pattern(text).double() for role in roles], dim=1)
    for layer in captured.layers:
        queries, keys = (torch.arange(len(part), device=layer.heads.device) for part in (ids, key_ids))
        visible = layer.seen.block(queries, keys).cpu()
        patterns = every * visible[:, None]
        yield layer, patterns, (patterns != 0).any(-1) & (visible.sum(-1) > 1)[:, None]


def _claims(captured_again: Callable[[], list[Captured]], draft: ProofDraft, result: Result) -> Iterator[int | None]:
    """Claim the ends of scores: means of what rows are proven to have, over rows and then over texts."""
    roles = [ROLES[name] for name in result.axis("score").values]
    for role in roles:
        if role.above is not None:
            others = [name for name in result.axis("score").values if ROLES[name].above is None]
            raise InputError(
                f"{role.name!r} counts texts, and has no proof of its own. Select other scores before save_proof()"
                f"{f': sel(score={others})' if others else ''}."
            )
    texts = captured_again()
    every = [list(_patterns(captured, roles)) for captured in texts]
    _, layers, heads = result.axes
    for at, (_, layer, head) in entries(result):
        means = []
        for captured, parts in zip(texts, every, strict=True):
            _, patterns, targets = parts[layer]
            asked = []
            for query in targets[:, at[0]].nonzero()[:, 0].tolist():
                c = patterns[query, at[0]].tolist()
                asked.append(Asked((layer, head, query), [(key, number) for key, number in enumerate(c) if number]))
            steps = draft.bound(captured, asked)
            if steps:
                means.append(draft.mean(steps))
        name = f"{roles[at[0]].name} score of L{layers.values[at[1]]}H{heads.values[at[2]]}"
        yield draft.mean(means, name) if means else None


def over_texts(numbers: Float[Tensor, "text number score layer head"], roles: Sequence[HeadRole]) -> dict[str, Tensor]:
    """Return the means over texts with their standard errors, and over how many texts each score is."""
    numbers = numbers.clone()
    for place, role in enumerate(roles):
        if role.above is not None:
            values = numbers[:, :4, place]
            numbers[:, :4, place] = torch.where(values.isnan(), torch.nan, (values > role.above).double())
    means, errors = mean_over_texts(numbers)
    arrays: dict[str, Tensor] = dict(zip(_MADE, means, strict=True))
    arrays["scored_texts"] = (~numbers[:, 0].isnan().flatten(2).all(-1)).sum(0)
    if len(numbers) > 1:
        arrays |= {f"{name}_stderr": error for name, error in zip(_MADE[:4], errors, strict=False)}
    return arrays


def repeated_tokens(model: Model, n: int, *, seed: int = 0) -> list[int]:
    """Make a text on which induction shows: n random tokens, twice, as token ids, with the special tokens around them.

    The same seed gives the same tokens. Special tokens are not drawn.
    """
    model = checked_model(model)
    n = whole_number("n", n, least=1, most=_LONGEST)
    if model.modality != "text":
        raise InputError(f"repeated_tokens makes token ids, and {model.name} reads {model.modality}s.")
    drawn = torch.Generator().manual_seed(random_seed(seed))
    special = set(getattr(model.tokenizer, "all_special_ids", ()))
    usable = torch.tensor([token for token in range(model.vocabulary) if token not in special])
    ids = usable[torch.randint(len(usable), (n,), generator=drawn)].tolist()
    (around,) = model.encode("a")
    inside = [place for place, added in enumerate(around.special) if not added]
    return [*around.ids[: inside[0]], *ids, *ids, *around.ids[inside[-1] + 1 :]]
