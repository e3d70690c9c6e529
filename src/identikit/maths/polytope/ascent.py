r"""Bounds on any linear reading of attention over all attention with the same output: many rows at once, always valid.

The reading of a row is $c \cdot a'$ (one key's weight, the mass of a group of keys, a difference), $a'$ running over
the set $P_\varepsilon(a)$ of `rows`. Any vector $y$ proves a bound (`bounds.proven_maximum`), so the search for a good
one may stop anywhere, round as it likes and fail: only the proof, in float64, has to be right. The search is the
interior-point method of `interior`, one program per row and objective, all in step.
First-order ascent needs hundreds of steps for a gap of one point; this takes about ten for 1e-6.

It works in the coordinates of the row's analytic centre $x$ (the attention in $P_\varepsilon$ that maximises
$\sum \log a'$): $\xi = a' / x$ starts at 1, $W = \mathrm{diag}(x)\,U T$ has orthonormal columns, and the slack
$\sigma = W z - c x$ (of $y = Tz$) starts near a constant. Both sides start feasible and well-conditioned, however small
some weights are.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from identikit.maths.polytope.bounds import Bounds, proven_maximum
from identikit.maths.polytope.interior import ENOUGH, Ball, Programs, Space, State, maximise
from identikit.maths.polytope.interior import centre as find_centre
from identikit.maths.polytope.rows import Rows
from identikit.shapes import Bool, Float, Tensor

_FEASIBLE = 1e-9  # relative to the centre's weights
_LEAST_ROOM = 1e-12  # for the output; the search needs some
_DEPENDENT = 1e-13  # of a column's length: what is left of one that depends on the others
_BYTES = {"cpu": 2**24, "cuda": 2**33}  # of working memory; on a CPU, what stays near it


def never() -> bool:
    """Set no deadline."""
    return False


def certified_bounds(
    rows: Rows,
    objectives: Float[Tensor, "objective key"] | None = None,
    *,
    epsilon: float = 0.0,
    steps: int = 20,
    dtype: torch.dtype = torch.float64,
    deadline: Callable[[], bool] = never,
) -> Bounds:
    r"""Bound each reading $c \cdot a'$ of each row over all attention with the same output, to within $\varepsilon$.

    `objectives` holds one $c$ per line, asked of every row; without it, each key's weight. At most `steps` steps are
    taken, and an end stops when it is known to 1e-8. They are computed in `dtype`; in half precision only the large
    product $W^\top D W$ is, the rest in float32. Whatever they did, the ends are valid: they are evaluated in float64,
    with a margin for rounding, and contain the row's own reading. `deadline` is asked between portions of the work;
    what is left then has the ends that hold for any attention, and a gap of NaN.
    """
    keys, rank = rows.basis.shape[1:]
    attention = rows.attention
    asked = torch.eye(keys).to(attention) if objectives is None else objectives.to(attention)
    raw = attention @ asked.mT
    bounds = Bounds(raw.clone(), raw.clone(), torch.zeros_like(raw), torch.full_like(rows.group, -1))
    moving = rows.free if epsilon == 0 else torch.ones_like(rows.free)
    room = _numbers(attention.device)
    block = max(1, min(len(asked), room // (16 * keys + 2 * rank**2)))
    portion = max(1, room // (keys * rank**2 + block * (16 * keys + 2 * rank**2)))
    for chosen in moving.nonzero()[:, 0].split(portion):
        search = _Search(epsilon, steps, dtype, deadline)
        found = _bounds_of(rows.some(chosen), asked, raw[chosen], block, search)
        for all_rows, part in zip(bounds, found, strict=True):
            all_rows[chosen] = part
    return bounds


def _numbers(device: torch.device) -> int:
    """Return how many float64 numbers to work on at a time."""
    room = _BYTES.get(device.type, _BYTES["cpu"])
    if device.type == "cuda":
        room = min(room, torch.cuda.mem_get_info(device)[0] // 3)
    return room // 8


class _Search(NamedTuple):
    epsilon: float
    steps: int
    dtype: torch.dtype
    deadline: Callable[[], bool]


def _bounds_of(
    rows: Rows,
    asked: Float[Tensor, "objective key"],
    raw: Float[Tensor, "row objective"],
    block: int,
    search: _Search,
) -> Bounds:
    """Bound all readings of some rows. Upper ends come first: what they attain settles most lower ends."""
    hidden, frame = ~rows.visible[:, None], None
    blocks = torch.arange(len(asked), device=asked.device).split(block)
    # Of c and of -c: what no attention exceeds, and what some attention attains.
    proven = [torch.cat([(c * asked[b]).masked_fill(hidden, -torch.inf).amax(-1) for b in blocks], 1) for c in (1, -1)]
    attained = [raw, -raw]
    finished = torch.zeros(2, len(asked), dtype=torch.bool, device=asked.device)
    for side, sign in enumerate((1, -1)):
        for objectives in blocks:
            if search.deadline():
                break
            pending = (proven[side] - attained[side])[:, objectives] > ENOUGH
            if pending.any():
                frame = frame or _frame(rows, search)
                found, x = _programs(frame, sign * asked[objectives], pending, search)
                proven[side][:, objectives] = torch.minimum(proven[side][:, objectives], found)
                readings = x @ asked.mT
                attained = [torch.maximum(attained[0], readings.amax(1)), torch.maximum(attained[1], -readings.amin(1))]
            finished[side, objectives] = True
    lower, upper = torch.minimum(-proven[1], raw), torch.maximum(proven[0], raw)
    gap = torch.maximum(upper - attained[0], -attained[1] - lower)
    return Bounds(lower, upper, gap.masked_fill(~finished.all(0), torch.nan), torch.full_like(rows.group, -1))


class _Frame(NamedTuple):
    r"""Rows in the coordinates of their analytic centres, in float64.

    `centre` is $x$, `turn` $T$, `wide` $W = \mathrm{diag}(x)\,U T$, `start` the centre's own state ($Wz \approx 1$),
    `anchor` a feasible $\xi$: 1 where the centre was reached, elsewhere that of the raw attention. `space` is what the
    search works with.
    """

    rows: Rows
    basis: Float[Tensor, "row key rank"]
    right: Float[Tensor, "row 1 rank"]
    centre: Float[Tensor, "row 1 key"]
    turn: Float[Tensor, "row rank rank"]
    wide: Float[Tensor, "row key rank"]
    start: State
    anchor: Float[Tensor, "row 1 key"]
    space: Space


def _frame(rows: Rows, search: _Search) -> _Frame:
    """Find the centre of each row, and coordinates in which it is 1 and the basis orthonormal."""
    basis = rows.basis[rows.group].where(rows.visible[..., None], 0.0)
    attention, shown = rows.attention[:, None], rows.visible[:, None].double()
    right, ball, curve = attention @ basis, None, None
    if search.epsilon > 0:
        room = (search.epsilon * rows.output).clamp(min=_LEAST_ROOM)
        ball = Ball(torch.diag_embed(room[:, None] / rows.scale[rows.group]))
    centre = find_centre(Space.of(basis, right, shown, ball, torch.float64), attention)
    x = centre.xi + (1 - shown)
    if ball is not None:
        curve = ball.curve(centre)[:, 0]
    wide, turn = _orthonormal(x.mT * basis, curve)
    start = (x * (centre.z @ basis.mT)) @ wide
    if curve is not None and ball is not None:
        start, ball = start + centre.z @ curve @ turn, Ball(ball.pull @ turn)
    reached = (right @ turn - shown @ wide).norm(dim=-1, keepdim=True) < _FEASIBLE
    anchor = torch.where(reached, shown, attention / x)
    space = Space.of(wide, right @ turn, shown, ball, search.dtype)
    start = State(shown, shown, start, centre.e, centre.multiplier)
    return _Frame(rows, basis, right, x, turn, wide, start, anchor, space)


def _orthonormal(wide: Float[Tensor, "row key rank"], curve: Tensor | None) -> tuple[Tensor, Tensor]:
    r"""Turn columns so that $W^\top W + T^\top H T = 1$, H being `curve`; return $W$ and $T$.

    Gram and Schmidt's method, twice over each column. A column that depends on those before becomes 0.
    """
    rank = wide.shape[2]
    turn = torch.eye(rank).to(wide).repeat(len(wide), 1, 1)
    H = torch.zeros_like(turn) if curve is None else curve
    W, T = torch.zeros_like(wide), torch.zeros_like(turn)
    for column in range(rank):
        v, t = wide[..., [column]], turn[..., [column]]
        whole = ((v * v).sum(1) + (t * (H @ t)).sum(1)).clamp(min=0).sqrt()[..., None]
        for _ in range(2):
            along = W.mT @ v + T.mT @ (H @ t)
            v, t = v - W @ along, t - T @ along
        length = ((v * v).sum(1) + (t * (H @ t)).sum(1)).clamp(min=0).sqrt()[..., None]
        keep = length > _DEPENDENT * whole
        W[..., [column]], T[..., [column]] = (torch.where(keep, part / length, 0.0) for part in (v, t))
    return W, T


def _programs(
    frame: _Frame, c: Float[Tensor, "objective key"], pending: Bool[Tensor, "row objective"], search: _Search
) -> tuple[Float[Tensor, "row objective"], Float[Tensor, "row program key"]]:
    """Maximise readings: return a proven bound of each (infinite where it is not pending), and attention found."""
    proven = torch.full(pending.shape, torch.inf).to(frame.centre)
    most = int(pending.sum(1).max())
    chosen = pending.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
    raw, inverse = frame.rows.attention[:, None] / frame.centre, 1 / frame.centre
    programs = Programs(c[chosen] * frame.centre, pending.gather(1, chosen), raw, inverse)
    z, xi = maximise(frame.space, frame.start, programs, search.steps)
    y = z.double() @ frame.turn.mT
    bound = proven_maximum(frame.rows, c[chosen], y, epsilon=search.epsilon)
    return proven.scatter(1, chosen, bound), _feasible(frame, xi, search.epsilon)


def _feasible(frame: _Frame, xi: Float[Tensor, "row program key"], epsilon: float) -> Float[Tensor, "row program key"]:
    r"""Turn each $\xi$ into attention that is in $P_\varepsilon$.

    With $\varepsilon = 0$, project it onto $W^\top\xi = \beta$ and move it towards the anchor until no weight is
    negative. Otherwise move it towards the raw attention until the output has moved little enough.
    """
    xi, raw = xi.double(), frame.rows.attention[:, None]
    if epsilon == 0:
        for _ in range(2):
            xi = xi + (frame.right @ frame.turn - xi @ frame.wide) @ frame.wide.mT
        t = torch.where(xi < 0, xi / (xi - frame.anchor), 0.0).amax(-1, keepdim=True)
        found = ((xi + t * (frame.anchor - xi)).clamp(min=0) * frame.centre).where(frame.rows.visible[:, None], 0.0)
    else:
        x = (xi * frame.centre).where(frame.rows.visible[:, None], 0.0)
        x = x / x.sum(-1, keepdim=True)
        scale = frame.rows.scale[frame.rows.group][:, None]
        moved = ((x @ frame.basis - frame.right) * scale.where(scale.isfinite(), 0.0)).norm(dim=-1, keepdim=True)
        t = (epsilon * frame.rows.output[:, None, None] / moved).clamp(max=1)
        found = raw + t * (x - raw)
    return found.where(found.isfinite().all(-1, keepdim=True), raw)
