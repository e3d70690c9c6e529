r"""Certified bounds of linear quantities over all attention with the same output: many rows at once, always valid.

A quantity of a row is $c \cdot a'$ (one key's weight, the mass of a group of keys, a difference), $a'$ running over
the set $P_\varepsilon(a)$ of `rows`. Any vector $y$ proves a bound (`bounds.proven_maximum`), so the search for a good
one may stop anywhere, round as it likes and fail: only the proof has to be right. The search is the interior-point
method of `interior`, one program per row and objective, all in step. First-order ascent needs hundreds of steps for a
gap of one point; this takes about ten for 1e-6.

It works in the coordinates of the row's analytic centre $x$ (the attention in $P_\varepsilon$ that maximises
$\sum \log a'$): $\xi = a' / x$ starts at 1, $W = \mathrm{diag}(x)\,U T$ has orthonormal columns, and the slack
$\sigma = W z - c x$ (of $y = Tz$) starts near a constant. Both sides start feasible and well-conditioned, however small
some weights are.
"""

import time
from typing import NamedTuple

import torch

from identikit.maths.polytope.bounds import Bounds, Question, proven_maximum, trivial_bounds, with_order
from identikit.maths.polytope.interior import Ball, Space, State, centre, follow
from identikit.maths.polytope.rows import Rows
from identikit.maths.threads import one_thread
from identikit.shapes import Bool, Float, Tensor

STEPS = 20
_ENOUGH = 1e-8  # an end that is known to within this is done
_FEASIBLE = 1e-9  # relative to the centre's weights
_LEAST_ROOM = 1e-12  # for the output; the search needs some
_DEPENDENT = 1e-13  # of a column's length: what is left of one that depends on the others
_BYTES = {"cpu": 2**24, "cuda": 2**33}  # of working memory; on a CPU, what stays near it


@one_thread()
def certified_bounds(rows: Rows, question: Question, *, epsilon: float = 0.0) -> Bounds:
    r"""Bound every quantity of every row over all attention with the same output, to within $\varepsilon$.

    At most `STEPS` steps are taken, and an end stops when it is known to 1e-8. Whatever happened, the ends are valid:
    they are evaluated with a margin for rounding, and contain the row's own quantity. The clock is checked between
    portions of the work; quantities that are not reached `until` then have the ends that hold for any attention, and a
    gap of NaN.
    """
    keys, rank = rows.basis.shape[1:]
    if epsilon:
        rows = rows._replace(free=torch.ones_like(rows.free))
    bounds = trivial_bounds(rows, question)
    columns = torch.ones(bounds.lower.shape[1], dtype=torch.bool)
    if question.keys is not None:
        columns[:keys] = question.keys.cpu()
    columns = columns.nonzero()[:, 0].to(rows.group.device)
    linear = question._replace(keys=None, objectives=question.all_objectives(rows)[:, columns])
    room = _BYTES[rows.group.device.type] // 8  # in float64 numbers
    if rows.group.is_cuda:
        room = min(room, torch.cuda.mem_get_info(rows.group.device)[0] // 24)
    block = max(1, min(len(columns), room // (16 * keys + 2 * rank**2)))
    portion = max(1, room // (keys * rank**2 + block * (16 * keys + 2 * rank**2)))
    for indices in rows.free.nonzero()[:, 0].split(portion):
        portion_bounds = _portion_bounds(rows.select(indices), linear.select(indices), block, epsilon)
        for target, source in zip(bounds[:3], portion_bounds[:3], strict=True):
            target[indices[:, None], columns] = source
    return with_order(rows, question, bounds) if question.keys is not None and question.top else bounds


def _portion_bounds(rows: Rows, question: Question, block: int, epsilon: float) -> Bounds:
    """Bound all quantities of some rows. Upper ends come first: what they attain settles most lower ends."""
    trivial = trivial_bounds(rows, question)
    c = question.all_objectives(rows)
    raw = _evaluate(rows.attention[:, None], c)[:, 0]
    # Of c and of -c: what no attention exceeds, and what some attention attains.
    proven = torch.stack([trivial.upper, -trivial.lower])
    attained = torch.stack([raw, -raw])
    finished = torch.zeros(2, c.shape[1], dtype=torch.bool, device=c.device)
    frame = None
    for side, sign in enumerate((1, -1)):
        for block_columns in torch.arange(c.shape[1], device=c.device).split(block):
            if time.monotonic() > question.until:
                break
            pending = (proven[side] - attained[side])[:, block_columns] > _ENOUGH
            if pending.any():
                frame = frame or _frame(rows, epsilon)
                bound, x = _programs(frame, sign * c[:, block_columns], pending)
                proven[side][:, block_columns] = torch.minimum(proven[side][:, block_columns], bound)
                values = _evaluate(x, c)
                attained = torch.maximum(attained, torch.stack([values.amax(1), -values.amin(1)]))
            finished[side, block_columns] = True
    upper = torch.maximum(proven[0], raw)
    lower = torch.minimum(-proven[1], raw)
    gap = torch.maximum(upper - attained[0], -attained[1] - lower)
    return Bounds(lower, upper, gap.masked_fill(~finished.all(0), torch.nan), trivial.order)


def _evaluate(
    weights: Float[Tensor, "row vertex key"], c: Float[Tensor, "_ objective key"]
) -> Float[Tensor, "row vertex objective"]:
    """Return each $c \\cdot a'$, in one product where rows share objectives."""
    return weights @ (c[0] if len(c) == 1 else c).mT


class _Frame(NamedTuple):
    r"""Rows in the coordinates of their analytic centres.

    `centre` is $x$, `turn` $T$, `start` the centre's own state ($Wz \approx 1$), `anchor` a feasible $\xi$: 1 where the
    centre was reached, elsewhere that of the raw attention. `space` is what the search works with.
    """

    rows: Rows
    epsilon: float
    basis: Float[Tensor, "row key rank"]
    centre: Float[Tensor, "row 1 key"]
    turn: Float[Tensor, "row rank rank"]
    start: State
    anchor: Float[Tensor, "row 1 key"]
    space: Space


def _frame(rows: Rows, epsilon: float) -> _Frame:
    """Find the centre of each row, and coordinates in which it is 1 and the basis orthonormal."""
    basis = rows.basis[rows.group].where(rows.visible[..., None], 0.0)
    attention = rows.attention[:, None]
    visible = rows.visible[:, None].double()
    right = attention @ basis
    ball = None
    if epsilon:
        room = (epsilon * rows.output).clamp(min=_LEAST_ROOM)
        ball = Ball(torch.diag_embed(room[:, None] / rows.scale[rows.group]))
    middle = centre(Space.of(basis, right, visible, ball=ball), attention)
    x = middle.xi + (1 - visible)
    curve = None if ball is None else ball.curve(middle)[:, 0]
    wide, turn = _orthonormal(x.mT * basis, curve)
    z = (x * (middle.z @ basis.mT)) @ wide
    if curve is not None and ball is not None:
        z = z + middle.z @ curve @ turn
        ball = Ball(ball.pull @ turn)
    space = Space.of(wide, right @ turn, visible, ball=ball)
    is_centred = (space.right - visible @ wide).norm(dim=-1, keepdim=True) < _FEASIBLE
    anchor = torch.where(is_centred, visible, attention / x)
    start = State(visible, visible, z, middle.e, middle.multiplier)
    return _Frame(rows, epsilon, basis, x, turn, start, anchor, space)


def _orthonormal(wide: Float[Tensor, "row key rank"], curve: Tensor | None) -> tuple[Tensor, Tensor]:
    r"""Turn columns so that $W^\top W + T^\top H T = 1$, H being `curve`; return $W$ and $T$.

    Gram and Schmidt's method, twice over each column. A column that depends on those before becomes 0.
    """
    rank = wide.shape[2]
    unit = torch.eye(rank).to(wide).repeat(len(wide), 1, 1)
    W = torch.zeros_like(wide)
    T = torch.zeros_like(unit)
    H = torch.zeros_like(unit) if curve is None else curve

    def length(v: Tensor, t: Tensor) -> Tensor:
        return ((v * v).sum(1) + (t * (H @ t)).sum(1)).clamp(min=0).sqrt()[..., None]

    for column in range(rank):
        v = wide[..., [column]]
        t = unit[..., [column]]
        length_before = length(v, t)
        for _ in range(2):
            along = W.mT @ v + T.mT @ (H @ t)
            v = v - W @ along
            t = t - T @ along
        rest_length = length(v, t)
        keep = rest_length > _DEPENDENT * length_before
        W[..., [column]] = torch.where(keep, v / rest_length, 0.0)
        T[..., [column]] = torch.where(keep, t / rest_length, 0.0)
    return W, T


def _programs(
    frame: _Frame, c: Float[Tensor, "_ objective key"], pending: Bool[Tensor, "row objective"]
) -> tuple[Float[Tensor, "row objective"], Float[Tensor, "row program key"]]:
    """Maximise quantities: return a proven bound of each (infinite where it is not pending), and feasible attention."""
    widest = int(pending.sum(1).max())
    indices = pending.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :widest]
    c = c.expand(len(indices), -1, -1)[torch.arange(len(indices), device=c.device)[:, None], indices]
    raw = frame.rows.attention[:, None] / frame.centre

    def bound(space: Space, state: State) -> Tensor:
        """Return what $z$ proves, but for a constant."""
        slack = state.sigma / frame.centre + (1 - space.visible) * 1e30
        proven = (raw * state.sigma).sum(-1, keepdim=True) - slack.amin(-1, keepdim=True)
        return proven if space.ball is None else proven + (state.z @ space.ball.pull.mT).norm(dim=-1, keepdim=True)

    start = _begin(frame.space, frame.start, c * frame.centre)
    z, xi = follow(frame.space, start, pending.gather(1, indices), bound, steps=STEPS, enough=_ENOUGH)
    infinite = torch.full(pending.shape, torch.inf).to(raw)
    bounds = proven_maximum(frame.rows, c, z @ frame.turn.mT, epsilon=frame.epsilon)
    return infinite.scatter(1, indices, bounds), _feasible(frame, xi)


def _begin(space: Space, start: State, cost: Float[Tensor, "row program key"]) -> State:
    r"""Start each program at the centre, at the $\mu$ where its slack is positive and well balanced."""
    size = cost.abs().amax(-1, keepdim=True)
    mu = (2 * cost.amax(-1, keepdim=True)).clamp(min=0.05 * size).clamp(min=1e-6)
    z = mu * start.z
    sigma = z @ space.wide.mT - cost + (1 - space.visible)
    return State(space.visible.expand_as(cost), sigma, z, start.e.expand(*z.shape[:2], -1), mu * start.multiplier)


def _feasible(frame: _Frame, xi: Float[Tensor, "row program key"]) -> Float[Tensor, "row program key"]:
    r"""Turn each $\xi$ into attention that is in $P_\varepsilon$.

    With $\varepsilon = 0$, project it onto $W^\top\xi = \beta$ and move it towards the anchor until no weight is
    negative. Otherwise move it towards the raw attention until the output has moved little enough.
    """
    rows = frame.rows
    space = frame.space
    raw = rows.attention[:, None]
    hidden = ~rows.visible[:, None]
    if frame.epsilon == 0:
        for _ in range(2):
            xi = xi + (space.right - xi @ space.wide) @ space.wide.mT
        t = torch.where(xi < 0, xi / (xi - frame.anchor), 0.0).amax(-1, keepdim=True)
        feasible = ((xi + t * (frame.anchor - xi)).clamp(min=0) * frame.centre).masked_fill(hidden, 0.0)
    else:
        x = (xi * frame.centre).masked_fill(hidden, 0.0)
        x = x / x.sum(-1, keepdim=True)
        scale = rows.scale[rows.group][:, None]
        moved = ((x - raw) @ frame.basis * scale.where(scale.isfinite(), 0.0)).norm(dim=-1, keepdim=True)
        t = (frame.epsilon * rows.output[:, None, None] / moved).clamp(max=1)
        feasible = raw + t * (x - raw)
    return feasible.where(feasible.isfinite().all(-1, keepdim=True), raw)
