r"""How every bound is proven: the question to rows, what solvers propose, and what holds in a row's whole set.

**Theorem.** Let $P_\varepsilon(a)$ be the set of a row (see `rows`), $u_m$ the rows of its basis $U$, and $c$ any
numbers on the keys. For any vector $y$ and every $a'$ of the set,

$$c \cdot a' \le y \cdot U^\top a + \varepsilon \|o\|\,\|\Sigma^{-1} y\| + \max_m (c_m - y \cdot u_m)$$

where $m$ runs over the visible keys.

**Proof.** $c \cdot a' = y \cdot U^\top a' + \sum_m a'_m (c_m - y \cdot u_m)$. The last sum is at most the largest of
its terms in brackets, since $a'$ is a distribution over the visible keys. And $U^\top a' = U^\top a + \delta$ with
$\|\Sigma\delta\| \le \varepsilon\|o\|$, so that $y \cdot \delta \le \varepsilon\|o\|\,\|\Sigma^{-1} y\|$. ∎

The bound is sharp at the best $y$, and valid at every other, whatever computed it. So solvers only propose vectors $y$
(`Proposals`), and `proven_maximum` decides. A lower bound of $c \cdot a'$ is minus an upper bound of $-c \cdot a'$.
"""

import math
from typing import NamedTuple

import torch

from identikit.maths.linalg import BYTES
from identikit.maths.measures import certain_order
from identikit.maths.polytope.rows import Rows
from identikit.shapes import Bool, Float, Int, Tensor

_IN_CACHE = 2**20  # bytes that stay in the cache of a core: three times as fast on a CPU

# The question, and the answer


class Question(NamedTuple):
    """What to bound in every row: the weights of keys, other quantities $c \\cdot a'$, and the order of strong edges.

    - `keys`: the keys whose weights are bounded; None: none
    - `objectives`: real numbers $c$, shared by all rows or of each row; None: none
    - `top`: how many of the strongest of these keys are put in order
    - `until`: a time on the monotonic clock; plain programs and `certified` start nothing new after it, while compiled
      solvers finish the rows that they were given
    """

    keys: Bool[Tensor, "key"] | None = None
    objectives: Float[Tensor, "*row quantity key"] | None = None
    top: int = 0
    until: float = math.inf

    def all_objectives(self, rows: Rows) -> Float[Tensor, "_ quantity key"]:
        """Return every $c$: the unit vectors of all keys, if there are `keys`, then the objectives."""
        n = rows.attention.shape[1]
        objectives = rows.attention.new_zeros(0, n) if self.objectives is None else self.objectives
        objectives = objectives.to(rows.attention)
        objectives = objectives if objectives.ndim == 3 else objectives[None]
        if self.keys is None:
            return objectives
        unit = torch.eye(n).to(rows.attention).expand(len(objectives), n, n)
        return torch.cat([unit, objectives], dim=1)

    def keys_of(self, rows: Rows) -> Bool[Tensor, "row key"]:
        """Return which of the `keys` each row sees; without `keys`, all that it sees."""
        return rows.visible if self.keys is None else rows.visible & self.keys.to(rows.visible.device)

    def normalised(self) -> tuple["Question", Float[Tensor, "_ quantity"] | None]:
        """Scale objectives so that the largest number of each is 1, as tolerances are fixed; return the scales too.

        None where there are no objectives.
        """
        if self.objectives is None:
            return self, None
        objectives = self.objectives if self.objectives.ndim == 3 else self.objectives[None]
        scale = objectives.abs().amax(-1)
        scale = torch.where(scale > 0, scale, 1.0)
        return self._replace(objectives=objectives / scale[..., None]), scale

    def select(self, indices: Tensor) -> "Question":
        """Return the question to some of the rows."""
        if self.objectives is None or self.objectives.ndim == 2 or len(self.objectives) == 1:
            return self
        return self._replace(objectives=self.objectives[indices.to(self.objectives.device)])


class Bounds(NamedTuple):
    """Proven ends of each quantity in each row's set, and how far the sharp ends can be from them.

    Quantities are the weights of all keys, if the question has `keys`, then the objectives.

    - `lower`, `upper`: no attention of the row's set has less or more
    - `gap`: at most how far an end is from what some attention attains; NaN where none is known
    - `order`: how many of the strongest edges have the same order in all attention, as far as is known; -1 where not
      even that of the strongest is decided
    """

    lower: Float[Tensor, "row quantity"]
    upper: Float[Tensor, "row quantity"]
    gap: Float[Tensor, "row quantity"]
    order: Int[Tensor, "row"]

    def rescaled(self, scale: Float[Tensor, "_ objective"]) -> "Bounds":
        """Return the bounds of objectives times a scale; they come after the weights of keys."""
        scale = torch.cat([scale.new_ones(len(scale), self.lower.shape[1] - scale.shape[1]), scale], dim=1)
        scale = scale.to(self.lower)
        return Bounds(self.lower * scale, self.upper * scale, self.gap * scale, self.order)


def strongest_keys(rows: Rows, keys: Bool[Tensor, "row key"]) -> Int[Tensor, "row key"]:
    """Return each row's keys by weight, the strongest of the marked `keys` first."""
    return rows.attention.masked_fill(~keys, -1.0).argsort(dim=-1, descending=True, stable=True)


def rows_at_once(rows: Rows, numbers: int) -> int:
    """Return how many rows, with so many numbers each, to work on at a time; a GPU needs many to be busy."""
    room = BYTES
    if rows.attention.is_cuda:
        room = min(64 * BYTES, torch.cuda.mem_get_info(rows.attention.device)[0] // 4)
    return max(1, room // (8 * max(1, numbers)))


# What solvers propose


class Proposals(NamedTuple):
    """What a solver proposes for each row: dual vectors to prove ends with, and what its vertices attain.

    - `upper`, `lower`: vectors $y$ for the greatest and the least of each quantity
    - `greatest`, `least`: the quantity at the solver's vertices; `distance`: how far these are from the row's set
    - `leads`: by how much a key exceeds each of the strongest keys, where it is greatest itself
    - `vertices`: the attention at which each objective is least and greatest, if requested
    - `failed`: rows that were not solved
    """

    upper: Float[Tensor, "row quantity rank"]
    lower: Float[Tensor, "row quantity rank"]
    greatest: Float[Tensor, "row quantity"]
    least: Float[Tensor, "row quantity"]
    distance: Float[Tensor, "row"]
    leads: Float[Tensor, "row top key"]
    vertices: Float[Tensor, "row quantity_ 2 key_"]
    failed: Bool[Tensor, "row"]

    @classmethod
    def empty(cls, rows: Rows, question: Question, *, vertices: bool = False) -> "Proposals":
        """Return proposals before anything is solved: vectors of 0, and each row's own attention."""
        raw = (rows.attention[:, None] @ question.all_objectives(rows).mT)[:, 0]
        count, n = rows.attention.shape
        zero = raw.new_zeros(*raw.shape, rows.basis.shape[2])
        objectives = raw.shape[1] - (0 if question.keys is None else n)
        leads = raw.new_full((count, question.top, n), -torch.inf)
        ends = raw.new_zeros(count, objectives if vertices else 0, 2, n)
        failed = torch.zeros_like(rows.free)
        return cls(zero, zero.clone(), raw, raw.clone(), raw.new_zeros(count), leads, ends, failed)

    def excess(self, y: Float[Tensor, "row quantity rank"]) -> Float[Tensor, "row quantity"]:
        r"""Return how far what a vertex attains can exceed what the set allows, since the vertex lies outside the set.

        A vertex of the set with right-hand side $b + \delta$ has at most $y \cdot \delta$ more than one of that with b,
        where y is best for b.
        """
        return self.distance[:, None] * y.nan_to_num(0.0, 0.0, 0.0).abs().sum(-1)


# The proof


def proven_maximum(
    rows: Rows,
    objectives: Float[Tensor, "_ quantity key"],
    y: Float[Tensor, "row quantity rank"],
    *,
    epsilon: float = 0.0,
) -> Float[Tensor, "row quantity"]:
    r"""Bound the greatest $c \cdot a'$ of each row from above by the theorem, at given vectors $y$, in float64.

    `objectives` are the $c$, shared by all rows or of each row. What rounding can have taken from the bound is added:
    a product $y \cdot u_m$ of k numbers is off by at most $k\,\mathrm{eps}\,\|y\|\,\|u_m\|$, with $\|u_m\| \le 1$, and
    a weighted mean of n such products by n eps more. A $y$ that is not finite counts as 0.
    """
    keys, rank = rows.basis.shape[1:]
    y = y.double().nan_to_num(0.0, 0.0, 0.0)
    y[..., 0] = 0.0  # it adds a constant to all products, and would only cost digits
    margin = 2 * (keys + rank + 8) * torch.finfo(torch.float64).eps
    hidden = ~rows.visible
    bound = torch.empty(y.shape[:2], dtype=torch.float64, device=y.device)
    step = rows_at_once(rows, 2 * y.shape[1] * keys)
    for group, group_rows in rows.by_group():
        for start in range(group_rows.start, group_rows.stop, step):
            portion = slice(start, min(group_rows.stop, start + step))
            c = objectives if len(objectives) == 1 else objectives[portion]
            scores = y[portion] @ rows.basis[group].mT
            best = (c - scores).masked_fill(hidden[portion, None], -torch.inf).amax(-1)
            level = (scores @ rows.attention[portion, :, None])[..., 0]
            moved = 0.0
            if epsilon:
                moved = epsilon * rows.output[portion, None] * (y[portion] / rows.scale[group]).norm(dim=-1)
            size = y[portion].norm(dim=-1) + moved + c.abs().amax(-1)
            bound[portion] = level + moved + best + margin * size
    return bound


def proven_bounds(rows: Rows, question: Question, proposals: Proposals) -> Bounds:
    """Prove the ends that a solver proposes; rows that it did not solve keep bounds that hold for any attention."""
    trivial = trivial_bounds(rows, question)
    c = question.all_objectives(rows)
    raw = (rows.attention[:, None] @ c.mT)[:, 0]
    upper = proven_maximum(rows, c, proposals.upper).minimum(trivial.upper)
    lower = (-proven_maximum(rows, -c, proposals.lower)).maximum(trivial.lower)
    upper_gap = (upper - proposals.greatest).abs() + proposals.excess(proposals.upper)
    lower_gap = (proposals.least - lower).abs() + proposals.excess(proposals.lower)
    gap = torch.maximum(upper_gap, lower_gap)
    solved = (trivial.gap != 0) & ~proposals.failed[:, None]
    if question.keys is not None:
        n = rows.attention.shape[1]
        solved[:, :n] &= question.keys.to(solved.device)
    return Bounds(
        torch.where(solved, lower.minimum(raw), trivial.lower),
        torch.where(solved, upper.maximum(raw), trivial.upper),
        torch.where(solved, gap, trivial.gap),
        trivial.order,
    )


def trivial_bounds(rows: Rows, question: Question) -> Bounds:
    """Return the bounds that need no solver: the least and the greatest $c$ of a visible key.

    Where the row is the only attention with its output, both ends are its own.
    """
    visible = rows.visible
    objectives = question._replace(keys=None).all_objectives(rows)
    raw = (rows.attention[:, None] @ objectives.mT)[:, 0]
    lower, upper = _range_over_keys(objectives, visible)
    if question.keys is not None:
        raw = torch.cat([rows.attention, raw], dim=1)
        lower = torch.cat([(visible & (visible.sum(-1, keepdim=True) == 1)).to(lower), lower], dim=1)
        upper = torch.cat([visible.to(upper), upper], dim=1)
    fixed = (~rows.free | ~visible.any(-1))[:, None] | (lower == upper)
    order = torch.where(rows.free, -1, visible.sum(-1))
    gap = torch.where(fixed, 0.0, torch.nan).to(raw)
    return Bounds(torch.where(fixed, raw, lower), torch.where(fixed, raw, upper), gap, order)


def _range_over_keys(
    c: Float[Tensor, "_ quantity key"], visible: Bool[Tensor, "row key"]
) -> tuple[Float[Tensor, "row quantity"], Float[Tensor, "row quantity"]]:
    """Return the least and the greatest $c$ of a key that a row sees; rows that see the same keys are one."""
    row = torch.arange(len(visible), device=visible.device)
    if len(c) == 1:
        visible, row = visible.unique(dim=0, return_inverse=True)
    ends = c.new_empty(2, len(visible), c.shape[1])
    step = max(1, (BYTES if c.is_cuda else _IN_CACHE) // (8 * max(1, c.shape[1] * c.shape[2])))
    for portion in torch.arange(len(visible), device=row.device).split(step):
        numbers = c if len(c) == 1 else c[portion]
        hidden = ~visible[portion, None]
        ends[0, portion] = numbers.masked_fill(hidden, torch.inf).amin(-1)
        ends[1, portion] = numbers.masked_fill(hidden, -torch.inf).amax(-1)
    return ends[0, row], ends[1, row]


def with_order(rows: Rows, question: Question, bounds: Bounds) -> Bounds:
    """Add how many of the strongest keys, up to `top`, are certainly in that order, as far as their ends tell."""
    n = rows.attention.shape[1]

    def compare(row: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Where the second key has the weight that is attained, the first has at most the rest of 1."""
        greatest = bounds.upper[row, second]
        attained = greatest - bounds.gap[row, second].nan_to_num(1.0)
        attained_lead = attained - torch.minimum(bounds.upper[row, first], 1 - attained)
        lead = greatest - bounds.lower[row, first]
        return lead, lead - attained_lead

    ends = (bounds.lower[:, :n], bounds.upper[:, :n])
    order = certain_order(rows.attention, ends, question.keys_of(rows), compare, question.top)
    return bounds._replace(order=order.sources)
