r"""Which attention rows on the simplex give the same head output as a given one (section 3.3 of the paper).

One head and one query at a time. Throughout, $a$ is the row of attention over the keys that the query sees (argument
`attention`), $V$ their values (argument `values`), and the row's polytope is

$$P(a) = \{a' : a'[V, 1] = a[V, 1], \; a' \ge 0\},$$

all distributions over the visible keys with the output $aV$. The caller leaves invisible keys out of both arguments,
and gives the values in the precision in which they were computed: it decides their rank.

Departures from the paper: $V$ replaces $T = VH$. Where the head's slice $H$ of the output projection has full row rank,
$LN(V) = LN(T)$ and $P(a)$ is the same set; where it does not, give $V R^\top$ with $H^\top = QR$. And $a$ is first
renormalised in float64, because a sum that is off by float32 rounding leaves the simplex. Results are float64.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from identikit.errors import IdentikitError, InputError
from identikit.maths.polytope.rows import Bounds, Rows, range_basis, unbounded
from identikit.shapes import Float, Tensor

if TYPE_CHECKING:
    from highspy import Highs

_FEASIBILITY = 1e-10  # the smallest that HiGHS accepts
_DEPENDENT = 1e-10  # of the largest singular value of an orthonormal basis at the visible keys
_TIE = 1e-9  # a weight that exceeds another by less is as large
_CONTRADICTION = 1e-8  # an optimum may fall short of an attained weight by this much
_NO_COMPONENT = 1e-10  # of a direction's length
_ROUND_OFF = 1e-13  # a null direction's component this small is 0: against a weight of 0 it would stop every step
_SAME_OUTPUT = 1e-12  # in the orthonormal coordinates Uᵀa, which are at most 1
_PENALTY, _ROUNDS = 1e7, 20  # M of `minimum_norm`; scipy below 1.15 squares its condition and loses the norm


class Alternative(NamedTuple):
    """Another row with the same output: `attention` = $a$ + `step`·`direction`; the direction has length 1."""

    attention: Float[Tensor, " key"]
    step: float
    direction: Float[Tensor, " key"]


class Intervals(NamedTuple):
    """The least and the greatest weight of each asked key over all attention rows with the same output."""

    lower: Float[Tensor, " asked"]
    upper: Float[Tensor, " asked"]

    @property
    def certain_mass(self) -> float:
        """The sum of the lower bounds: the weight that no such row can take from the asked keys."""
        return float(self.lower.sum())


def alternative(
    attention: Float[Tensor, " key"],
    values: Float[Tensor, "key d_v"],
    *,
    direction: Float[Tensor, " key"] | None = None,
    seed: int = 0,
) -> Alternative:
    r"""Move a row along a null direction until the first weight reaches zero: same output, still a distribution.

    $$a' = a + \lambda_{max}\,\tilde a, \qquad \lambda_{max} = \min_{i : \tilde a_i < 0} -a_i / \tilde a_i
    \qquad \text{(section 3.3)}$$

    $\tilde a$ is `direction` projected onto $LN([V, 1])$ and scaled to length 1. Without one it is drawn uniformly from
    the unit sphere of $LN([V, 1])$ with `seed`. The step is 0 where the row has a zero weight that $\tilde a$ would
    lower, as in almost every direction from a one-hot row.
    """
    weights, basis = _row(attention, values)
    n, rank = basis.shape
    if rank == n:
        raise InputError(
            f"Looking for an alternative attention in a row that is identifiable: its {n} visible keys have values of "
            f"rank {rank} (with the sum of the weights), so no other attention gives its output. Choose a query that "
            f"sees more keys than that."
        )
    if direction is None:
        wanted = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    else:
        wanted = direction.detach().to("cpu", torch.float64)
    null = _null_direction(wanted, basis)
    steps = torch.where(null < 0, -weights / null, math.inf)
    blocking = int(steps.argmin())
    step = float(steps[blocking])
    moved = (weights + step * null).clamp(min=0.0)
    moved[blocking] = 0.0
    return Alternative((moved / moved.sum()).to(attention.device), step, null.to(attention.device))


def intervals(
    attention: Float[Tensor, " key"], values: Float[Tensor, "key d_v"], *, keys: Sequence[int] | None = None
) -> Intervals:
    r"""Compute the sharp range of each weight over all attention rows on the simplex with the same output.

    $$\mathrm{lower}_j = \min a'_j, \quad \mathrm{upper}_j = \max a'_j \quad \text{subject to} \quad
    U^\top a' = U^\top a, \; a' \ge 0$$

    $U$ is an orthonormal basis of $[V, 1]$ (this goes beyond the paper). `keys` are the j that are asked for, by
    default all. One simplex model serves the row and continues from end to end. Every vertex it visits is an attention
    row with the same output: if one has weight 0 on a key, that key's lower bound is 0 and needs no program. An
    identifiable row needs none at all.
    """
    weights, basis = _row(attention, values)
    given = attention.detach().to("cpu", torch.float64)
    n, rank = basis.shape
    asked = list(range(n)) if keys is None else _checked_keys(keys, n)
    if rank == n:
        exact = given[asked].to(attention.device)
        return Intervals(exact, exact.clone())
    lower, upper = map(torch.from_numpy, _Row(weights, basis).bound(asked))
    lower, upper = torch.minimum(lower, given), torch.maximum(upper, given)  # given may be off by its own rounding
    return Intervals(lower[asked].to(attention.device), upper[asked].to(attention.device))


def witnesses(
    attention: Float[Tensor, " key"], values: Float[Tensor, "key d_v"], keys: Sequence[int]
) -> tuple[Float[Tensor, " key"], Float[Tensor, " key"]]:
    """Find two rows with the same output that give these keys together the least and the greatest weight."""
    weights, basis = _row(attention, values)
    n, rank = basis.shape
    keys = _checked_keys(keys, n)
    if rank == n:
        return weights.to(attention.device), weights.to(attention.device)
    row, objective = _Row(weights, basis), np.zeros(n)
    objective[keys] = 1.0
    least, greatest = (torch.from_numpy(row.vertex(sense * objective)[0]) for sense in (-1, 1))
    return (least / least.sum()).to(attention.device), (greatest / greatest.sum()).to(attention.device)


def row_bounds(
    rows: Rows,
    objectives: Float[Tensor, "quantity key"] | None,
    *,
    keys: Sequence[int] | None = None,
    top: int = 0,
) -> Bounds:
    """Bound weights of all `keys`, or other quantities of these rows, one row after another; see `Bounds`.

    With `top`, the certain order of that many of the strongest edges among the asked keys is found as well.
    """
    found = unbounded(rows, objectives)
    for index in rows.free.nonzero()[:, 0].tolist():
        seen = rows.visible[index].nonzero()[:, 0].cpu()
        weights, basis = rows.attention[index, seen].cpu(), rows.basis[rows.group[index], seen].cpu()
        left, singular, _ = torch.linalg.svd(basis, full_matrices=False)
        row = _Row(weights / weights.sum(), left[:, singular > _DEPENDENT * singular[0]])
        if objectives is None:
            asked = range(len(seen)) if keys is None else torch.isin(seen, torch.tensor(keys)).nonzero()[:, 0].tolist()
            lower, upper = row.bound(asked)
            at, gap = seen[asked], np.maximum(row.least - lower, upper - row.greatest)[asked]
            ends = lower[asked], upper[asked], np.abs(gap)
            if top:
                found.order[index] = row.certain_order(asked, top)
        else:
            at = torch.arange(len(objectives))
            ends = row.extremes(objectives[:, seen].cpu().numpy())
        for part, end in zip(found, ends, strict=False):
            part[index, at] = torch.from_numpy(end).to(part)
    return found


def minimum_norm(attention: Float[Tensor, " key"], values: Float[Tensor, "key d_v"]) -> Float[Tensor, " key"]:
    r"""Find the attention row of least Euclidean norm on the simplex with the same output (end of section 3.4).

    $$\min \|a'\|^2 \quad \text{subject to} \quad U^\top a' = U^\top a, \; a' \ge 0$$

    By the method of multipliers: $a' = \arg\min_{a' \ge 0} \|a'\|^2 + M^2 \|U^\top a' - t\|^2$ is a non-negative
    least-squares problem, which an active-set method solves exactly; then $t \leftarrow t + (U^\top a - U^\top a')$,
    from $t = U^\top a$. Each round shrinks the gap by about $1/M^2$; one or two reach rounding. It needs no interior
    point of $P(a)$, which a one-hot row may not have.
    """
    from scipy.optimize import nnls

    weights, basis = _row(attention, values)
    n, rank = basis.shape
    if rank == n:
        return weights.to(attention.device)
    U = basis.numpy()
    right = U.T @ weights.numpy()
    system, target, gap = np.concatenate([_PENALTY * U.T, np.eye(n)]), right.copy(), np.zeros(rank)
    for _ in range(_ROUNDS):
        target += gap
        least, _ = nnls(system, np.concatenate([_PENALTY * target, np.zeros(n)]), maxiter=50 * n)
        gap = right - U.T @ least
        if np.abs(gap).max() <= _SAME_OUTPUT:
            return torch.from_numpy(least / least.sum()).to(attention.device)
    raise IdentikitError(
        f"Finding the attention of least norm over {n} keys: after {_ROUNDS} rounds its output is off by "
        f"{np.abs(gap).max():.3g}; expected at most {_SAME_OUTPUT:g}. Please report this row."
    )


def _row(
    attention: Float[Tensor, " key"], values: Float[Tensor, "key d_v"]
) -> tuple[Float[Tensor, " key"], Float[Tensor, "key rank"]]:
    """Return the row's weights, summing to 1 in float64, and an orthonormal basis of $[V, 1]$, both on the CPU."""
    weights = attention.detach().to("cpu", torch.float64)
    total = float(weights.sum())
    if not (math.isfinite(total) and total > 0 and bool((weights >= 0).all())):
        raise InputError(
            f"Reading an attention row of {weights.numel()} visible keys whose weights sum to {total:.6g}: expected "
            f"finite weights of at least 0 with a positive sum. Check the model's output for this text."
        )
    return weights / total, range_basis(values.detach().cpu())[0]


def _null_direction(wanted: Float[Tensor, " key"], basis: Float[Tensor, "key rank"]) -> Float[Tensor, " key"]:
    """Return the part of a direction orthogonal to the basis, of length 1; round-off components are exactly 0."""
    n, rank = basis.shape
    null = wanted - basis @ (basis.T @ wanted)
    null = null - basis @ (basis.T @ null)
    if not float(null.norm()) > _NO_COMPONENT * float(wanted.norm()):
        raise InputError(
            f"Looking for an alternative attention along a direction of length {float(wanted.norm()):.3g}: it has no "
            f"component in the row's null space ({n - rank} dimensions), so the output cannot stay the same. Give "
            f"another direction, or none."
        )
    null = null / null.norm()
    return torch.where(null.abs() <= _ROUND_OFF, 0.0, null)


def _complement(basis: Float[Tensor, "key rank"]) -> Float[Tensor, "key null"]:
    return torch.linalg.qr(basis, mode="complete").Q[:, basis.shape[1] :].contiguous()


def _checked_keys(keys: Sequence[int], n: int) -> list[int]:
    wrong = [key for key in keys if not 0 <= key < n]
    if wrong:
        raise InputError(
            f"Asking for the interval of key {wrong[0]} in a row of {n} visible keys: expected 0 to {n - 1}. "
            f"Choose keys in that range."
        )
    return list(keys)


class _Row:
    """One row's programs, solved from vertex to vertex, and what the vertices say about every weight."""

    def __init__(self, weights: Float[Tensor, " key"], basis: Float[Tensor, "key rank"]):
        n, rank = basis.shape
        self.program = _Primal(weights, basis) if rank < n - rank else _Dual(weights, basis)
        self.weights = self.last = weights.numpy()
        self.basis, self.right = basis.numpy(), basis.numpy().T @ self.weights
        self.least, self.greatest = self.weights.copy(), self.weights.copy()

    def vertex(self, objective: np.ndarray) -> tuple[np.ndarray, float]:
        r"""Find the vertex with the greatest $c \cdot a'$ (`objective` is c), and a proof: a bound that holds for all.

        The bound is `polytope.proven_maximum` at the dual vector, so it does not rest on the solver's word.
        """
        status, vertex, dual = self.program.solve(objective)
        vertex = np.maximum(vertex, 0.0)
        proven = float(dual @ self.right + (objective - self.basis @ dual).max())
        found, attained = float(objective @ vertex), float(objective @ self.weights)
        if status != "Optimal" or found < attained - _CONTRADICTION:
            raise IdentikitError(
                f"Bounding a weight: HiGHS ended with status '{status}' at {found:.9g}, but {attained:.9g} is "
                "attained. Please report this row."
            )
        self.last = vertex
        np.minimum(self.least, vertex, out=self.least)
        np.maximum(self.greatest, vertex, out=self.greatest)
        return vertex, proven

    def bound(self, asked: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Prove the least and the greatest weight of the asked keys; the vertices attain them."""
        unit, pending = np.eye(len(self.weights)), np.isin(np.arange(len(self.weights)), asked)
        lower, upper = np.zeros(len(unit)), np.ones(len(unit))
        while pending.any():
            key = int(
                np.where(pending, self.last, -1.0).argmax()
            )  # nearest: fewer pivots than in the order of the text
            pending[key] = False
            upper[key] = self.vertex(unit[key])[1]
        for key in asked:
            if self.least[key] > 0:
                lower[key] = -self.vertex(-unit[key])[1]
        return lower.clip(0, self.weights), upper.clip(self.weights, 1)

    def extremes(self, objectives: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the least and the greatest of each quantity, proven, and the distance of what is attained."""
        ends = np.zeros((3, len(objectives)))
        for at, objective in enumerate(objectives):
            own = float(objective @ self.weights)
            (least, below), (greatest, above) = self.vertex(-objective), self.vertex(objective)
            ends[:2, at] = min(-below, own), max(above, own)
            ends[2, at] = max(abs(objective @ least + below), abs(above - objective @ greatest))
        return ends[0].clip(0, 1), ends[1].clip(0, 1), ends[2]

    def certain_order(self, asked: Sequence[int], top: int) -> int:
        r"""Count the strongest asked edges, up to `top`, whose order is the same everywhere; they are bounded already.

        Edge k is certainly above m if $\max a'_m - a'_k \le 0$.
        """
        order = np.asarray(asked)[np.argsort(-self.weights[asked], kind="stable")]
        for place in range(min(top, len(order))):
            key = order[place]
            for other in order[place + 1 :]:
                if self.greatest[other] <= self.least[key]:
                    continue
                objective = np.zeros(len(self.weights))
                objective[other], objective[key] = 1.0, -1.0
                if objective @ self.last > _TIE or objective @ self.vertex(objective)[0] > _TIE:
                    return place
        return min(top, len(order))


class _Primal:
    r"""The program as it stands: $\min -c \cdot a'$ over $P(a)$.

    It has one row per dimension of $[V, 1]$, and only the cost changes. The last vertex stays feasible, so primal
    simplex continues from it.
    """

    def __init__(self, weights: Float[Tensor, " key"], basis: Float[Tensor, "key rank"]):
        right = basis.T @ weights
        self.model = _model(basis, torch.zeros_like(weights), right, simplex_strategy=4)

    def solve(self, objective: np.ndarray) -> tuple[str, np.ndarray, np.ndarray]:
        keys = np.arange(len(objective), dtype=np.int32)
        self.model.changeColsCost(len(keys), keys, -objective)
        status, solution = _run(self.model), self.model.getSolution()
        return status, np.array(solution.col_value), -np.array(solution.row_dual)


class _Dual:
    r"""The dual of the same program: $\min a \cdot s$ subject to $N^\top s = -N^\top c$, $s \ge 0$.

    It has one row per dimension of $LN([V, 1])$, and its reduced costs are $a'$. Only the right-hand side changes, so
    dual simplex continues from the last vertex. The matrix to factor has n − rank rows: far fewer than in the primal
    program when n is little more than d_v.
    """

    def __init__(self, weights: Float[Tensor, " key"], basis: Float[Tensor, "key rank"]):
        null = _complement(basis)
        self.null, self.basis = null.numpy(), basis.numpy()
        self.model = _model(null, weights, torch.zeros(null.shape[1], dtype=torch.float64), simplex_strategy=1)

    def solve(self, objective: np.ndarray) -> tuple[str, np.ndarray, np.ndarray]:
        for row, bound in enumerate(-objective @ self.null):
            self.model.changeRowBounds(row, bound, bound)
        status, solution = _run(self.model), self.model.getSolution()
        return status, np.array(solution.col_dual), self.basis.T @ (objective + np.array(solution.col_value))


def _run(model: "Highs") -> str:
    """Solve from the last basis, or from scratch where that gets lost (sharp rows with weights far below 1e-10)."""
    model.run()
    if model.modelStatusToString(model.getModelStatus()) != "Optimal":
        model.clearSolver()
        model.run()
    return model.modelStatusToString(model.getModelStatus())


def _model(
    columns: Float[Tensor, "key row"],
    cost: Float[Tensor, " key"],
    right: Float[Tensor, " row"],
    *,
    simplex_strategy: int,
) -> "Highs":
    r"""Build $\min c \cdot x$ subject to $C^\top x = r$, $x \ge 0$ as a HiGHS model.

    It keeps its basis between solves. $c$ is `cost`, $C$ `columns` and $r$ `right`.
    """
    import highspy

    n, rows = columns.shape
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = n, rows
    program.col_cost_, program.col_lower_ = cost.numpy(), np.zeros(n)
    program.col_upper_ = np.full(n, highspy.kHighsInf)
    program.row_lower_ = program.row_upper_ = right.numpy()
    program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    program.a_matrix_.start_ = np.arange(n + 1) * rows
    program.a_matrix_.index_ = np.tile(np.arange(rows), n)
    program.a_matrix_.value_ = columns.numpy().ravel()
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("solver", "simplex")
    model.setOptionValue("presolve", "off")
    model.setOptionValue("simplex_strategy", simplex_strategy)
    model.setOptionValue("simplex_scale_strategy", 0)
    model.setOptionValue("primal_feasibility_tolerance", _FEASIBILITY)
    model.setOptionValue("dual_feasibility_tolerance", _FEASIBILITY)
    model.passModel(program)
    return model
