"""Which role a head has, and whether it has it in every alternative with the same outputs.

A role is a pattern c of numbers over queries and keys: the weight on the previous token, on the token after an earlier
copy of this one, and so on. A head's score is the mean of $\\sum_j c_{ij} a_{ij}$ over the rows that have a target.
Rows move independently of each other while the output stays, so the ends of a mean are the means of the ends: exact.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from identikit.attention.captured import Captured, capture
from identikit.attention.effective import selected_capture
from identikit.attention.intervals import EXACTLY, Bounding, bounds_of
from identikit.attention.layer import Layer
from identikit.attention.measure_result import HeadScores
from identikit.attention.proofs import ProofDraft, Provable, RowStep, nonzero_entries, selected_entries
from identikit.attention.result import EffectiveAttention
from identikit.checks import function, known_names, random_seed, shortened, whole_number
from identikit.errors import InputError
from identikit.maths.measures import mean_over_texts
from identikit.maths.polytope.bounds import Question
from identikit.models.isolation import standard_torch_state
from identikit.models.model import Model, checked_model
from identikit.models.text_run import run_texts
from identikit.progress import Watched, reporting
from identikit.results.axis import Axis, Index, selected_indices
from identikit.results.result import Result
from identikit.results.source import StoredArrays
from identikit.shapes import Bool, Float, Int, Tensor
from identikit.texts.text import is_text_list, key_batch

SINK = 0.3  # a head counts as a sink where the first token receives more than this weight (Gu et al., 2024)
_MOST_REPEATED = 2**24  # tokens: more than any model reads
_SCORE_ARRAYS = ("raw", "effective", "lower", "upper", "gap")


class ScoredText(NamedTuple):
    """What patterns are made from: the ids of queries and of keys, and which keys the tokenizer added.

    In cross-attention keys are tokens of another text (`crosses`), so positions in the two are unrelated.
    """

    ids: Int[Tensor, "query"]
    keys: Int[Tensor, "key"]
    special: Bool[Tensor, "key"]
    crosses: bool

    @property
    def offset(self) -> Int[Tensor, "query key"]:
        """How many positions each query stands after each key."""
        return torch.arange(len(self.ids))[:, None] - torch.arange(len(self.keys))

    @property
    def copies(self) -> Bool[Tensor, "query key"]:
        """Whether a key holds a copy of the query's token, in the text itself an earlier one."""
        same = self.ids[:, None] == self.keys
        return same if self.crosses else same & (self.offset > 0)


class HeadRole(NamedTuple):
    """A role: its name, what it means, and the pattern that a head with this role attends by.

    - `noun`: what a head with this role is called; None: the score is not a share of attention
    - `across`: whether it also makes sense in cross-attention
    - `above`: the score is the share of texts in which the pattern scores above this; None: it is the pattern's score
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

    Instead of a model and texts it takes the `EffectiveAttention` of one text, of which it scores the selected
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
        captured = selected_capture(model, "head_scores", {"texts": texts, "layers": layers, "heads": heads})
        if captured.text_run.model.decoder_attention == "cross":
            names = _names_across_texts(names, scores)
        roles = [ROLES[name] for name in names]
        numbers = text_scores(captured, roles, bounding)
        return scores_result(captured, captured.text_run.text, [numbers], roles, lambda: [captured])
    model = checked_model(model)
    if model.modality != "text":
        raise InputError(f"head_scores compares tokens, and {model.name} reads {model.modality}s.")
    roles = [ROLES[name] for name in names]
    layers = model.select_layers(layers)
    capture_heads = partial(capture, layers=layers, heads=selected_indices("head", heads, model.n_heads))
    text_runs = run_texts(model, texts, layers=layers, truncate=truncate)
    numbers = []
    for index, text_run in enumerate(text_runs):
        share = bounding.shared(len(text_runs) - index)
        numbers.append(text_scores(capture_heads(text_run), roles, share))
        progress("head scores, texts", index + 1, len(text_runs))
    text = [text_run.text for text_run in text_runs] if is_text_list(texts) else text_runs[0].text

    def capture_again() -> list[Captured]:
        model.check_unchanged(result.provenance.weights)
        return [capture_heads(text_run) for text_run in run_texts(model, texts, layers=layers, truncate=truncate)]

    result = scores_result(capture_heads(text_runs[0]), text, numbers, roles, capture_again)
    return result


def _names_across_texts(names: Sequence[str], requested: object) -> tuple[str, ...]:
    """Return the scores that have a meaning in cross-attention; refuse any other that the caller requested."""
    across = [name for name, role in ROLES.items() if role.across]
    if requested is not None and not set(names) <= set(across):
        raise InputError(
            f"scores={shortened(requested)}: in cross-attention, queries and keys are of two texts, so only "
            f"{', '.join(across)} mean something. Choose among these."
        )
    return tuple(name for name in names if name in across)


def scores_result(
    captured: Captured,
    text: Any,
    numbers: list[Tensor],
    roles: Sequence[HeadRole],
    capture_again: Callable[[], list[Captured]] | None = None,
) -> HeadScores:
    """Return the `text_scores` of one or several texts as a Result; `captured` is the attention of one of them.

    With `capture_again`, which returns that of all texts, it can be proven.
    """
    names = tuple(role.name for role in roles)
    layers = captured.layer_numbers
    heads = captured.head_numbers
    provenance = captured.text_run.model.provenance(text, scores=names, layers=layers, heads=heads)
    about = {"texts": len(numbers), "meanings": {role.name: role.meaning for role in roles}, "sink": SINK}
    about["nouns"] = {role.name: role.noun for role in roles}
    arrays = over_texts(torch.stack(numbers), roles)
    dims = {name: ("score", "layer", "head")[: array.ndim] for name, array in arrays.items()}
    source = StoredArrays(arrays, dims)
    if capture_again is not None:
        source = Provable(arrays, dims, partial(_claims, capture_again))
    return HeadScores((Axis("score", names), Axis("layer", layers), Axis("head", heads)), source, provenance, about)


def text_scores(
    captured: Captured, roles: Sequence[HeadRole], bounding: Bounding = EXACTLY
) -> Float[Tensor, "number score layer head"]:
    """Return the scores of one text's heads, raw to gap; NaN for a score that no row of the text has a target for."""
    of_layers = []
    for index, (layer, patterns, has_target) in enumerate(_layer_patterns(captured, roles)):
        heads = torch.arange(len(layer.heads), device=layer.heads.device)
        queries = has_target.any(1).nonzero()[:, 0]
        if not len(queries):
            empty = torch.full((len(_SCORE_ARRAYS), len(roles), len(heads)), torch.nan, dtype=torch.float64)
            of_layers.append(empty)
            continue
        row_indices = list(product([index], heads.tolist(), queries.tolist()))
        targeted = (patterns * has_target[..., None])[queries]
        distinct, distinct_index = targeted.unique(dim=1, return_inverse=True)  # equal patterns are bounded once
        objectives = distinct.repeat(len(heads), 1, 1).to(heads.device)
        rows, bounds = bounds_of(captured, row_indices, Question(objectives=objectives), bounding=bounding)
        raw = rows.attention[:, : len(layer.tokens)]
        effective = layer.effective(heads, queries.to(heads.device), slice(None)).double().flatten(0, 1)
        sums = [(objectives @ weights[..., None])[..., 0] for weights in (raw, effective)]
        by_pattern = torch.stack([*sums, bounds.lower, bounds.upper, bounds.gap])
        by_score = by_pattern[..., distinct_index.to(heads.device)].unflatten(1, (len(heads), -1))
        count = has_target[queries].sum(0).to(by_score)
        means = (by_score.sum(2) / count).mT
        of_layers.append(means.masked_fill(count[:, None] == 0, torch.nan).cpu())
    return torch.stack(of_layers, dim=2)


def _layer_patterns(
    captured: Captured, roles: Sequence[HeadRole]
) -> Iterator[tuple[Layer, Float[Tensor, "query score key"], Bool[Tensor, "query score"]]]:
    """Yield each layer with the patterns of its visible keys, and which rows have a target for which score."""
    text_run = captured.text_run
    source = key_batch(text_run.batch, text_run.model.decoder_attention)
    ids, key_ids = (None if batch.ids is None else batch.ids[0].cpu() for batch in (text_run.batch, source))
    if ids is None or key_ids is None or text_run.batch.images is not None:  # all tokens of images have one id
        numbers = {token: number for number, token in enumerate(dict.fromkeys((*text_run.tokens, *text_run.keys)))}
        ids, key_ids = (
            torch.tensor([numbers[token] for token in tokens]) for tokens in (text_run.tokens, text_run.keys)
        )
    text = ScoredText(ids, key_ids, source.special[0].cpu(), text_run.model.decoder_attention == "cross")
    all_patterns = torch.stack([role.pattern(text).double() for role in roles], dim=1)
    for layer in captured.layers:
        queries, keys = (torch.arange(len(tokens), device=layer.heads.device) for tokens in (ids, key_ids))
        visible = layer.seen.block(queries, keys).cpu()
        patterns = all_patterns * visible[:, None]
        yield layer, patterns, (patterns != 0).any(-1) & (visible.sum(-1) > 1)[:, None]


def _claims(capture_again: Callable[[], list[Captured]], draft: ProofDraft, result: Result) -> Iterator[int | None]:
    """Claim the ends of scores: means of proven ends, over rows and then over texts."""
    roles = [ROLES[name] for name in result.axis("score").values]
    provable = [role.name for role in roles if role.above is None]
    for role in roles:
        if role.above is not None:
            select = f": sel(score={provable})" if provable else ""
            raise InputError(
                f"{role.name!r} counts texts, and has no proof of its own. Select other scores before save_proof()"
                f"{select}."
            )
    texts = [(captured, list(_layer_patterns(captured, roles))) for captured in capture_again()]
    _, layers, heads = result.axes
    for indices, (_, layer, head) in selected_entries(result):
        score = indices[0]
        means = []
        for captured, layer_patterns in texts:
            _, patterns, has_target = layer_patterns[layer]
            steps = []
            for query in has_target[:, score].nonzero()[:, 0].tolist():
                steps.append(RowStep((layer, head, query), nonzero_entries(patterns[query, score])))
            if steps:
                means.append(draft.mean(draft.bound(captured, steps)))
        name = f"{roles[score].name} score of L{layers.values[indices[1]]}H{heads.values[indices[2]]}"
        yield draft.mean(means, name) if means else None


def over_texts(numbers: Float[Tensor, "text number score layer head"], roles: Sequence[HeadRole]) -> dict[str, Tensor]:
    """Return the means over texts with their standard errors, and over how many texts each score is."""
    numbers = numbers.clone()
    for score, role in enumerate(roles):
        if role.above is not None:
            values = numbers[:, :4, score]
            numbers[:, :4, score] = torch.where(values.isnan(), torch.nan, (values > role.above).double())
    means, errors = mean_over_texts(numbers)
    arrays: dict[str, Tensor] = dict(zip(_SCORE_ARRAYS, means, strict=True))
    arrays["scored_texts"] = (~numbers[:, 0].isnan().flatten(2).all(-1)).sum(0)
    if len(numbers) > 1:
        arrays |= {f"{name}_stderr": error for name, error in zip(_SCORE_ARRAYS[:4], errors, strict=False)}
    return arrays


def repeated_tokens(model: Model, n: int, *, seed: int = 0) -> list[int]:
    """Make a text on which induction shows: n random tokens, twice, as token ids, with the special tokens around them.

    The same seed gives the same tokens. Special tokens are not drawn.
    """
    model = checked_model(model)
    n = whole_number("n", n, least=1, most=_MOST_REPEATED)
    if model.modality != "text":
        raise InputError(f"repeated_tokens makes token ids, and {model.name} reads {model.modality}s.")
    special = set(getattr(model.tokenizer, "all_special_ids", ()))
    usable = torch.tensor([token for token in range(model.vocabulary) if token not in special])
    generator = torch.Generator().manual_seed(random_seed(seed))
    ids = usable[torch.randint(len(usable), (n,), generator=generator)].tolist()
    (one_token,) = model.encode("a")
    plain = [position for position, is_special in enumerate(one_token.special) if not is_special]
    return [*one_token.ids[: plain[0]], *ids, *ids, *one_token.ids[plain[-1] + 1 :]]
