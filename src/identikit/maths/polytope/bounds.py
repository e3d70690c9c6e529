r"""What is asked of rows, and what is known about it: ends that hold in a row's whole set, with a proof.

For any vector $y$, and $u_m$ the rows of the basis $U$ of the set (see `rows`),

$$c \cdot a' \le y \cdot U^\top a + \varepsilon \|o\|\,\|\Sigma^{-1} y\| + \max_m (c_m - y \cdot u_m)$$

for every $a'$ of the set, where $m$ runs over the visible keys: it holds because $a'$ is a distribution. It is sharp at
the best $y$, and valid at every other, whatever computed it. So solvers only propose vectors $y$, and `proven_maximum`
decides.
"""

import math
from typing import NamedTuple

import torch

from identikit.maths.linalg import BYTES
from identikit.maths.measures import certain_order
from identikit.maths.polytope.rows import Rows
from identikit.shapes import Bool, Float, Int, Tensor

_IN_CACHE = 2**20  # bytes that a core reads again without going to memory


def rows_at_once(rows: Rows, numbers: int) -> int:
    """Return how many rows are worked on at a time, each with so many numbers; a GPU needs many to be busy."""
    room = BYTES
    if rows.attention.is_cuda:
        room = min(64 * BYTES, torch.cuda.mem_get_info(rows.attention.device)[0] // 4)
    return max(1, room // (8 * max(1, numbers)))


class Question(NamedTuple):
    """What is asked of every row: the weights of keys, other quantities $c \\cdot a'$, and the order of strong edges.

    - `keys`: the keys whose weights are bounded; None: none
    - `objectives`: real numbers $c$, shared by all rows or given for each; None: none
    - `top`: of how many of the strongest asked edges the order is found
    - `until`: when, on the monotonic clock, a row that takes a plain program per end is given up
    """

    keys: Bool[Tensor, "key"] | None = None
    objectives: Float[Tensor, "*row quantity key"] | None = None
    top: int = 0
    until: float = math.inf

    def all_objectives(self, rows: Rows) -> Float[Tensor, "_ quantity key"]:
        """Return every $c$ that is asked of rows: the unit vectors of all keys, if any is asked, then the others."""
        n = rows.attention.shape[1]
        objectives = rows.attention.new_zeros(0, n) if self.objectives is None else self.objectives
        objectives = objectives.to(rows.attention)
        objectives = objectives if objectives.ndim == 3 else objectives[None]
        if self.keys is None:
            return objectives
        unit = torch.eye(n).to(rows.attention).expand(len(objectives), n, n)
        return torch.cat([unit, objectives], dim=1)

    def normalised(self) -> tuple["Question", Float[Tensor, "_ quantity"] | None]:
        """Ask for objectives whose largest number is 1, as solvers compare with fixed tolerances; and return the sizes.

        None where there are no objectives.
        """
        if self.objectives is None:
            return self, None
        objectives = self.objectives if self.objectives.ndim == 3 else self.objectives[None]
        size = objectives.abs().amax(-1)
        size = torch.where(size > 0, size, 1.0)
        return self._replace(objectives=objectives / size[..., None]), size

    def select(self, chosen: Tensor) -> "Question":
        """Return what is asked of some rows."""
        if self.objectives is None or self.objectives.ndim == 2 or len(self.objectives) == 1:
            return self
        return self._replace(objectives=self.objectives[chosen.to(self.objectives.device)])


class Bounds(NamedTuple):
    """Proven ends of what was asked of each row, and how far the sharp ends can be from them.

    Quantities are the weights of all keys, if any was asked, then the objectives.

    - `lower`, `upper`: no attention of the row's set has less or more
    - `gap`: at most how far an end is from what some attention attains; NaN where none is known
    - `order`: how many of the strongest edges have the same order in all attention, as far as is known; -1 where not
      even that of the strongest is decided
    """

    lower: Float[Tensor, "row quantity"]
    upper: Float[Tensor, "row quantity"]
    gap: Float[Tensor, "row quantity"]
    order: Int[Tensor, "row"]

    def rescaled(self, size: Float[Tensor, "_ objective"]) -> "Bounds":
        """Return the bounds of objectives that are so many times as large; they come after the weights of keys."""
        size = torch.cat([size.new_ones(len(size), self.lower.shape[1] - size.shape[1]), size], dim=1)
        size = size.to(self.lower)
        return Bounds(self.lower * size, self.upper * size, self.gap * size, self.order)


def trivial_bounds(rows: Rows, wanted: Question) -> Bounds:
    """Return what is known without solving anything: the least and the greatest $c$ of a visible key.

    Where the row is the only attention with its output, both ends are its own.
    """
    seen = rows.visible
    others = wanted._replace(keys=None).all_objectives(rows)
    own = (rows.attention[:, None] @ others.mT)[:, 0]
    lower, upper = _reach(others, seen)
    if wanted.keys is not None:
        own = torch.cat([rows.attention, own], dim=1)
        lower = torch.cat([(seen & (seen.sum(-1, keepdim=True) == 1)).to(lower), lower], dim=1)
        upper = torch.cat([seen.to(upper), upper], dim=1)
    fixed = (~rows.free | ~seen.any(-1))[:, None] | (lower == upper)
    strongest = torch.where(rows.free, -1, rows.visible.sum(-1))
    gap = torch.where(fixed, 0.0, torch.nan).to(own)
    return Bounds(torch.where(fixed, own, lower), torch.where(fixed, own, upper), gap, strongest)


def _reach(
    c: Float[Tensor, "_ quantity key"], visible: Bool[Tensor, "row key"]
) -> tuple[Float[Tensor, "row quantity"], Float[Tensor, "row quantity"]]:
    """Return the least and the greatest $c$ of a key that a row sees; rows that see the same keys are one."""
    row = torch.arange(len(visible), device=visible.device)
    if len(c) == 1:
        visible, row = visible.unique(dim=0, return_inverse=True)
    ends = c.new_empty(2, len(visible), c.shape[1])
    size = BYTES if c.is_cuda else _IN_CACHE
    step = max(1, size // (8 * max(1, c.shape[1] * c.shape[2])))
    for some in torch.arange(len(visible), device=row.device).split(step):
        each = c if len(c) == 1 else c[some]
        hidden = ~visible[some, None]
        ends[0, some] = each.masked_fill(hidden, torch.inf).amin(-1)
        ends[1, some] = each.masked_fill(hidden, -torch.inf).amax(-1)
    return ends[0, row], ends[1, row]


class Proposals(NamedTuple):
    """What a solver proposes for each row: dual vectors to prove ends with, and what its vertices attain.

    - `upper`, `lower`: vectors $y$ for the greatest and the least of each quantity
    - `greatest`, `least`: the quantity at the vertices that were found; `off`: how far these are from the row's set
    - `ahead`: by how much a key is ahead of each of the strongest keys, where it is greatest itself
    - `vertices`: the least and the greatest attention of each objective, where that was asked for
    - `failed`: rows that were not solved
    """

    upper: Float[Tensor, "row quantity rank"]
    lower: Float[Tensor, "row quantity rank"]
    greatest: Float[Tensor, "row quantity"]
    least: Float[Tensor, "row quantity"]
    off: Float[Tensor, "row"]
    ahead: Float[Tensor, "row top key"]
    vertices: Float[Tensor, "row quantity_ 2 key_"]
    failed: Bool[Tensor, "row"]

    def missed(self, y: Float[Tensor, "row quantity rank"]) -> Float[Tensor, "row quantity"]:
        r"""Return how far what a vertex attains can be from what the set allows, by its own distance from the set.

        A vertex of the set with right-hand side $b + \delta$ has at most $y \cdot \delta$ more than one of that with b,
        where y is best for b.
        """
        return self.off[:, None] * y.nan_to_num(0.0, 0.0, 0.0).abs().sum(-1)

    @classmethod
    def empty(cls, rows: Rows, wanted: Question, *, vertices: bool = False) -> "Proposals":
        """Return what is proposed before anything is solved: vectors of 0, and the row's own attention."""
        own = (rows.attention[:, None] @ wanted.all_objectives(rows).mT)[:, 0]
        count, n = rows.attention.shape
        zero = own.new_zeros(*own.shape, rows.basis.shape[2])
        objectives = own.shape[1] - (0 if wanted.keys is None else n)
        ahead = own.new_full((count, wanted.top, n), -torch.inf)
        shown = own.new_zeros(count, objectives if vertices else 0, 2, n)
        failed = torch.zeros_like(rows.free)
        return cls(zero, zero.clone(), own, own.clone(), own.new_zeros(count), ahead, shown, failed)


def proven_bounds(rows: Rows, wanted: Question, proposed: Proposals) -> Bounds:
    """Prove the ends that a solver proposes; rows it did not solve keep bounds that hold for any attention."""
    known = trivial_bounds(rows, wanted)
    c = wanted.all_objectives(rows)
    own = (rows.attention[:, None] @ c.mT)[:, 0]
    upper = proven_maximum(rows, c, proposed.upper).minimum(known.upper)
    lower = (-proven_maximum(rows, -c, proposed.lower)).maximum(known.lower)
    over = (upper - proposed.greatest).abs() + proposed.missed(proposed.upper)
    under = (proposed.least - lower).abs() + proposed.missed(proposed.lower)
    gap = torch.maximum(over, under)
    solved = (known.gap != 0) & ~proposed.failed[:, None]
    if wanted.keys is not None:
        n = rows.attention.shape[1]
        solved[:, :n] &= wanted.keys.to(solved.device)
    return Bounds(
        torch.where(solved, lower.minimum(own), known.lower),
        torch.where(solved, upper.maximum(own), known.upper),
        torch.where(solved, gap, known.gap),
        known.order,
    )


def proven_maximum(
    rows: Rows,
    objectives: Float[Tensor, "_ quantity key"],
    y: Float[Tensor, "row quantity rank"],
    *,
    epsilon: float = 0.0,
) -> Float[Tensor, "row quantity"]:
    r"""Bound the greatest $c \cdot a'$ of each row from above, at the vectors $y$ that are given, in float64.

    `objectives` are the $c$, shared by all rows or given for each. What rounding can have taken from the bound is
    added: a product $y \cdot u_m$ of k numbers is off by at most $k\,\mathrm{eps}\,\|y\|\,\|u_m\|$, with
    $\|u_m\| \le 1$, and a weighted mean of n such products by n eps more. A $y$ that is not finite counts as 0.
    """
    keys, rank = rows.basis.shape[1:]
    y = y.double().nan_to_num(0.0, 0.0, 0.0)
    y[..., 0] = 0.0  # it adds a constant to all products, and would only cost digits
    margin = 2 * (keys + rank + 8) * torch.finfo(torch.float64).eps
    hidden = ~rows.visible
    bound = torch.empty(y.shape[:2], dtype=torch.float64, device=y.device)
    fits = rows_at_once(rows, 2 * y.shape[1] * keys)
    for group, every in rows.by_group():
        for start in range(every.start, every.stop, fits):
            some = slice(start, min(every.stop, start + fits))
            c = objectives if len(objectives) == 1 else objectives[some]
            scores = y[some] @ rows.basis[group].mT
            best = (c - scores).masked_fill(hidden[some, None], -torch.inf).amax(-1)
            level = (scores @ rows.attention[some, :, None])[..., 0]
            moved = 0.0
            if epsilon:
                moved = epsilon * rows.output[some, None] * (y[some] / rows.scale[group]).norm(dim=-1)
            size = y[some].norm(dim=-1) + moved + c.abs().amax(-1)
            bound[some] = level + moved + best + margin * size
    return bound


def with_order(rows: Rows, wanted: Question, bounds: Bounds) -> Bounds:
    """Read from the ends of asked keys how many of the strongest, up to `top`, are certainly in that order."""
    assert wanted.keys is not None
    n = rows.attention.shape[1]
    asked = rows.visible & wanted.keys.to(rows.visible.device)

    def compare(row: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Some attention gives the second key what is attained, and so the first at most the rest of 1."""
        most = bounds.upper[row, second]
        attained = most - bounds.gap[row, second].nan_to_num(1.0)
        reached = attained - torch.minimum(bounds.upper[row, first], 1 - attained)
        ahead = most - bounds.lower[row, first]
        return ahead, ahead - reached

    order = certain_order(rows.attention, (bounds.lower[:, :n], bounds.upper[:, :n]), asked, compare, wanted.top)
    return bounds._replace(order=order.sources)


def strongest_keys(rows: Rows, asked: Bool[Tensor, "row key"]) -> Int[Tensor, "row key"]:
    """Return the keys of each row, the strongest asked one first."""
    return rows.attention.masked_fill(~asked, -1.0).argsort(dim=-1, descending=True, stable=True)
