r"""Bounds on any linear reading of attention over all attention with the same output: many rows at once, always valid.

The reading of a row is $c \cdot a'$ (one key's weight, the mass of a group of keys, a difference), $a'$ running over
the set $P_\varepsilon(a)$ of `maths.polytope`. For any vector $y$, with $u_m$ a row of $U$,

$$c \cdot a' \le y \cdot U^\top a + \varepsilon \|o\|\,\|\Sigma^{-1} y\| + \max_m (c_m - y \cdot u_m),$$

so a search for a good $y$ may stop anywhere, round as it likes and fail: only its last evaluation, in float64, has to be
right. The search is an interior-point method (Mehrotra's predictor and corrector), one program per row and objective,
all in step. A first-order ascent needs hundreds of steps for a gap of one point; this takes about ten for 1e-6, each
little dearer, because the matrices $W^\top D W$ of all programs of a row are one product with a fixed matrix.

It works in the coordinates of the row's analytic centre $x$ (the attention in $P_\varepsilon$ that maximises
$\sum \log a'$): $\xi = a' / x$ starts at 1, $W = \mathrm{diag}(x)\,U T$ has orthonormal columns, and the slack
$\sigma = W z - c x$ (of $y = Tz$) starts near a constant. Both sides start feasible and well-conditioned, however small
some weights are.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from identikit.maths.polytope import Rows
from identikit.shapes import Bool, Float, Tensor

_CENTRING = 30  # Newton steps at most; real rows need about six
_CENTRED = 1e-9
_LEAST_ROOM = 1e-12
_BACK = 0.995  # how far towards the boundary a step may go
_ENOUGH = 1e-8  # an end that is proven to within this is done
_DEPENDENT = 1e-13  # of a column's length: what is left of one that depends on the others
_WORTHWHILE = 0.75  # leave finished programs behind when this share or less is left
_BYTES = {"cpu": 2**26, "cuda": 2**33}  # of working memory


def never() -> bool:
    """Set no deadline."""
    return False


class Bounds(NamedTuple):
    r"""Proven ends of each reading: every $c \cdot a'$ lies in [`lower`, `upper`], and neither end is off by more than `gap`.

    The gap is measured against attention found on the way, in $P_\varepsilon$ itself. NaN: the deadline came before.
    """

    lower: Float[Tensor, "row objective"]
    upper: Float[Tensor, "row objective"]
    gap: Float[Tensor, "row objective"]


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
    bounds = Bounds(raw.clone(), raw.clone(), torch.zeros_like(raw))
    moving = rows.free if epsilon == 0 else torch.ones_like(rows.free)
    room = _BYTES.get(attention.device.type, _BYTES["cpu"]) // 8
    block = max(1, min(len(asked), room // (16 * keys + 2 * rank**2)))
    portion = max(1, room // (keys * rank**2 + block * (16 * keys + 2 * rank**2)))
    for chosen in moving.nonzero()[:, 0].split(portion):
        search = _Search(epsilon, steps, dtype, deadline)
        found = _bounds_of(rows.some(chosen), asked, raw[chosen], block, search)
        for all_rows, part in zip(bounds, found, strict=True):
            all_rows[chosen] = part
    return bounds


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
            pending = (proven[side] - attained[side])[:, objectives] > _ENOUGH
            if pending.any():
                frame = frame or _frame(rows, search)
                found, x = _programs(frame, sign * asked[objectives], pending, search)
                proven[side][:, objectives] = torch.minimum(proven[side][:, objectives], found)
                readings = x @ asked.mT
                attained = [torch.maximum(attained[0], readings.amax(1)), torch.maximum(attained[1], -readings.amin(1))]
            finished[side, objectives] = True
    lower, upper = torch.minimum(-proven[1], raw), torch.maximum(proven[0], raw)
    gap = torch.maximum(upper - attained[0], -attained[1] - lower)
    return Bounds(lower, upper, gap.masked_fill(~finished.all(0), torch.nan))


class _State(NamedTuple):
    r"""Where the programs stand: $\xi$, the slack $\sigma$, $z$; with room for the output also its move $e$ and multiplier."""

    xi: Float[Tensor, "row program key"]
    sigma: Float[Tensor, "row program key"]
    z: Float[Tensor, "row program rank"]
    e: Float[Tensor, "row program rank"]
    multiplier: Float[Tensor, "row program 1"]

    def moved(self, step: "_State", along: Tensor, across: Tensor) -> "_State":
        """Go `along` a step in what is sought, and `across` it in what proves it."""
        return _State(
            self.xi + along * step.xi,
            self.sigma + across * step.sigma,
            self.z + across * step.z,
            self.e + along * step.e,
            self.multiplier + across * step.multiplier,
        )

    def where(self, keep: Tensor, other: "_State") -> "_State":
        """Return this state where `keep` says so, elsewhere the other."""
        return _State(*(torch.where(keep, mine, theirs) for mine, theirs in zip(self, other, strict=True)))


class _Ball(NamedTuple):
    r"""The moves $\delta = E^\top e$, $\|e\| \le 1$, that the output may make: `pull` is $E = \varepsilon\|o\|\Sigma^{-1} T$.

    With multiplier $\lambda$ and $\omega = (1 - \|e\|^2)/2$ the conditions are $Ez = \lambda e$ and $\lambda\omega = \mu$. Solved
    for the changes of $e$ and $\lambda$, their linear form adds $E^\top K E$ to the matrix of $dz$, where
    $K = (1 - ee^\top/(\omega + \|e\|^2))/\lambda$.
    """

    pull: Float[Tensor, "row rank rank"]

    def gap(self, state: _State) -> Tensor:
        r"""Return $\lambda\omega$."""
        return state.multiplier * (1 - state.e.square().sum(-1, keepdim=True)) / 2

    def curve(self, state: _State) -> Tensor:
        r"""Return $E^\top K E$."""
        pulled = state.e @ self.pull
        size = (1 + state.e.square().sum(-1, keepdim=True)) / 2
        outer = pulled[..., None] * (pulled / size)[..., None, :]
        return ((self.pull.mT @ self.pull)[:, None] - outer) / state.multiplier[..., None]

    def change(self, state: _State, dz: Tensor | float, aim: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return the changes of $e$ and $\lambda$ that go with a change of $z$, towards $\lambda\omega$ = `aim`."""
        e, multiplier = state.e, state.multiplier
        pulled = (state.z + dz) @ self.pull.mT - multiplier * e
        size = (1 + e.square().sum(-1, keepdim=True)) / 2
        dmultiplier = (aim - self.gap(state) + (e * pulled).sum(-1, keepdim=True)) / size
        return (pulled - e * dmultiplier) / multiplier, dmultiplier

    def second(self, state: _State, step: _State) -> Tensor:
        r"""Return the second-order terms of $\lambda\omega$ in a step."""
        cross, square = (state.e * step.e).sum(-1, keepdim=True), step.e.square().sum(-1, keepdim=True)
        return -step.multiplier * cross - state.multiplier * square / 2

    def reach(self, state: _State, step: _State) -> Tensor:
        """Return how much of a step stays in the ball."""
        square, cross = step.e.square().sum(-1, keepdim=True), (state.e * step.e).sum(-1, keepdim=True)
        room = (1 - state.e.square().sum(-1, keepdim=True)).clamp(min=0)
        return _BACK * ((cross.square() + square * room).sqrt() - cross) / square.clamp(min=1e-30)


class _Space(NamedTuple):
    r"""The programs' common data in one precision: find $\xi \ge 0$ with $W^\top\xi = \beta + E^\top e$.

    `wide` is $W$, `square` its lines' outer products (one triangle) in the precision of the large products, `right`
    $\beta$, `shown` 1 at visible keys, `absent` 1 at columns of 0.
    """

    wide: Float[Tensor, "row key rank"]
    square: Float[Tensor, "row key pair"]
    right: Float[Tensor, "row 1 rank"]
    shown: Float[Tensor, "row 1 key"]
    absent: Float[Tensor, "row 1 rank"]
    ball: _Ball | None

    @staticmethod
    def of(wide: Tensor, right: Tensor, shown: Tensor, ball: _Ball | None, dtype: torch.dtype) -> "_Space":
        """Gather it, in `dtype` or float32."""
        first, second = torch.tril_indices(*wide.shape[2:] * 2, device=wide.device)
        square = (wide[..., first] * wide[..., second]).to(dtype)
        absent = (wide == 0).all(1, keepdim=True)
        if ball is not None:
            absent &= (ball.pull == 0).all(1, keepdim=True)
        at_least = torch.promote_types(dtype, torch.float32)
        ball = ball and _Ball(ball.pull.to(at_least))
        wide, right, shown, absent = (part.to(at_least) for part in (wide, right, shown, absent))
        return _Space(wide, square, right, shown, absent, ball)

    def mean_gap(self, state: _State) -> Tensor:
        r"""Return $\mu$, the mean of the products that all become 0."""
        total, count = (state.xi * state.sigma).sum(-1, keepdim=True), self.shown.sum(-1, keepdim=True)
        return total / count if self.ball is None else (total + self.ball.gap(state)) / (count + 1)

    def factor(self, state: _State) -> tuple[Tensor, Tensor]:
        r"""Factor $W^\top D W + E^\top K E$, $D = \mathrm{diag}(\xi/\sigma)$; also return where that failed."""
        rank, weights = self.wide.shape[2], state.xi / state.sigma
        if self.square.dtype == weights.dtype:
            packed = weights @ self.square
        else:
            top = weights.amax(-1, keepdim=True)
            packed = top * ((weights / top).to(self.square) @ self.square).to(weights)
        line = torch.arange(rank, device=weights.device)
        high, low = torch.maximum(line[:, None], line), torch.minimum(line[:, None], line)
        matrix = packed.index_select(-1, (high * (high + 1) // 2 + low).flatten()).unflatten(-1, (rank, rank))
        if self.ball is not None:
            matrix += self.ball.curve(state)
        diagonal = matrix.diagonal(dim1=-2, dim2=-1)
        diagonal.mul_(1 + 8 * torch.finfo(self.square.dtype).eps).add_(self.absent)
        factor, info = torch.linalg.cholesky_ex(matrix)
        return factor, info[..., None] > 0

    def step(self, state: _State, factor: Tensor, aim: Tensor, first: _State | None = None) -> _State:
        r"""Solve the linearised conditions for $\xi\sigma = \lambda\omega$ = `aim`, less the second-order terms of a `first` step."""
        product = aim if first is None else aim - first.xi * first.sigma
        change = product / state.sigma * self.shown - state.xi
        wanted = (change + state.xi) @ self.wide - self.right
        de, dmultiplier = state.e, state.multiplier
        if self.ball is not None:
            aim = aim if first is None else aim - self.ball.second(state, first)
            de, _ = self.ball.change(state, 0.0, aim)
            wanted = wanted - (state.e + de) @ self.ball.pull
        dz = torch.cholesky_solve(wanted[..., None], factor)[..., 0]
        dsigma = dz @ self.wide.mT
        if self.ball is not None:
            de, dmultiplier = self.ball.change(state, dz, aim)
        return _State(change - state.xi / state.sigma * dsigma, dsigma, dz, de, dmultiplier)

    def reach(self, state: _State, step: _State) -> tuple[Tensor, Tensor]:
        """Return how far to go along and across a step: at most all of it, and nothing positive becomes 0."""
        along, across = (
            _BACK * torch.where(change < 0, -value / change, torch.inf).amin(-1, keepdim=True)
            for value, change in ((state.xi, step.xi), (state.sigma, step.sigma))
        )
        if self.ball is not None:
            lost = torch.where(step.multiplier < 0, -state.multiplier / step.multiplier, torch.inf)
            along = torch.minimum(along, self.ball.reach(state, step))
            across = torch.minimum(across, _BACK * lost)
        return along.clamp(max=1), across.clamp(max=1)


class _Frame(NamedTuple):
    r"""Rows in the coordinates of their analytic centres, in float64.

    `centre` is $x$, `turn` $T$, `wide` $W = \mathrm{diag}(x)\,U T$, `start` the centre's own state ($Wz \approx 1$), `anchor` a feasible
    $\xi$: 1 where the centre was reached, elsewhere that of the raw attention. `space` is what the search works with.
    """

    rows: Rows
    basis: Float[Tensor, "row key rank"]
    right: Float[Tensor, "row 1 rank"]
    centre: Float[Tensor, "row 1 key"]
    turn: Float[Tensor, "row rank rank"]
    wide: Float[Tensor, "row key rank"]
    start: _State
    anchor: Float[Tensor, "row 1 key"]
    space: _Space


def _frame(rows: Rows, search: _Search) -> _Frame:
    """Find the centre of each row, and coordinates in which it is 1 and the basis orthonormal."""
    basis = rows.basis[rows.group].where(rows.visible[..., None], 0.0)
    attention, shown = rows.attention[:, None], rows.visible[:, None].double()
    right, ball, curve = attention @ basis, None, None
    if search.epsilon > 0:
        room = (search.epsilon * rows.output).clamp(min=_LEAST_ROOM)
        ball = _Ball(torch.diag_embed(room[:, None] / rows.scale[rows.group]))
    centre = _centre(_Space.of(basis, right, shown, ball, torch.float64), attention)
    x = centre.xi + (1 - shown)
    if ball is not None:
        curve = ball.curve(centre)[:, 0]
    wide, turn = _orthonormal(x.mT * basis, curve)
    start = (x * (centre.z @ basis.mT)) @ wide
    if curve is not None and ball is not None:
        start, ball = start + centre.z @ curve @ turn, _Ball(ball.pull @ turn)
    reached = (right @ turn - shown @ wide).norm(dim=-1, keepdim=True) < _CENTRED
    anchor = torch.where(reached, shown, attention / x)
    space = _Space.of(wide, right @ turn, shown, ball, search.dtype)
    start = _State(shown, shown, start, centre.e, centre.multiplier)
    return _Frame(rows, basis, right, x, turn, wide, start, anchor, space)


def _centre(space: _Space, attention: Float[Tensor, "row 1 key"]) -> _State:
    r"""Find the attention $x$ in $P_\varepsilon$ of greatest $\sum\log x$ (and $\log\omega$), by Newton's method.

    Its conditions are those of a program of cost 0 at $\mu = 1$. Where some weight can only be 0 there is no such point,
    and what is returned is merely positive.
    """
    count = space.shown.sum(-1, keepdim=True)
    one = torch.ones_like(count)
    e = torch.zeros_like(space.right)
    w = torch.zeros_like(space.right)
    w[..., :1] = count**2 / space.wide.sum(1, keepdim=True)[..., :1]
    x, slack = (attention + space.shown / count) / 2, w @ space.wide.mT + (1 - space.shown)
    state = _State(x, slack, w, e, 2 * one)
    for _ in range(_CENTRING):
        factor, failed = space.factor(state)
        step = space.step(state, factor, one)
        along, across = space.reach(state, step)
        fine = ~failed & step.xi.isfinite().all(-1, keepdim=True) & step.z.isfinite().all(-1, keepdim=True)
        state = state.moved(step, along, across).where(fine, state)
        if bool((~fine | (step.xi.abs() <= _CENTRED * state.xi).all(-1, keepdim=True)).all()):
            break
    return state


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
    z, xi = _search(frame, c[chosen] * frame.centre, pending.gather(1, chosen), search.steps)
    y = z.double() @ frame.turn.mT
    return proven.scatter(1, chosen, _proven(frame, c[chosen], y, search.epsilon)), _feasible(frame, xi, search.epsilon)


def _search(
    frame: _Frame, cost: Float[Tensor, "row program key"], alive: Bool[Tensor, "row program"], steps: int
) -> tuple[Tensor, Tensor]:
    r"""Maximise `cost`$\cdot\xi$ by steps of all programs together; return the best $z$ and the last $\xi$ of each."""
    space, start = frame.space, frame.start
    cost, inverse = (part.to(space.wide) for part in (cost, 1 / frame.centre))
    weigh = (frame.rows.attention[:, None] / frame.centre).to(cost)
    hidden, keys = 1 - space.shown, space.shown.sum(-1, keepdim=True)
    enough = max(_ENOUGH, 64 * torch.finfo(cost.dtype).eps)
    size = cost.abs().amax(-1, keepdim=True)
    mu = (2 * cost.amax(-1, keepdim=True)).clamp(min=0.05 * size).clamp(min=1e-6)
    z = mu * start.z.to(cost)
    sigma = z @ space.wide.mT - cost + hidden
    e = start.e.to(cost).expand_as(z)
    state = _State(space.shown.expand_as(cost), sigma, z, e, mu * start.multiplier.to(cost))
    best, lowest, alive = z, torch.full_like(mu, torch.inf), alive[..., None]
    ended = torch.empty_like(z), torch.empty_like(cost)
    place = torch.arange(cost.shape[1], device=cost.device).expand(cost.shape[:2])[..., None]
    for _ in range(steps):
        mu = space.mean_gap(state)
        factor, failed = space.factor(state)
        step = space.step(state, factor, 0 * mu)
        left = space.mean_gap(state.moved(step, *space.reach(state, step)))
        step = space.step(state, factor, (left / mu) ** 3 * mu, step)
        along, across = space.reach(state, step)
        alive = alive & ~failed & (along + across).isfinite() & step.z.isfinite().all(-1, keepdim=True)
        state = state.moved(step, along, across).where(alive, state)
        bound = (weigh * state.sigma).sum(-1, keepdim=True)
        bound = bound - (state.sigma * inverse + hidden * 1e30).amin(-1, keepdim=True)
        if space.ball is not None:
            bound = bound + (state.z @ space.ball.pull.mT).norm(dim=-1, keepdim=True)
        better = bound < lowest
        best, lowest = torch.where(better, state.z, best), torch.where(better, bound, lowest)
        alive = alive & (mu * keys > enough)
        left_over = int(alive.sum(1).max())
        if left_over < _WORTHWHILE * alive.shape[1]:
            _put(ended, place, (best, state.xi))
            keep = alive.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :left_over]
            state = _State(*(_take(part, keep) for part in state))
            place, alive, best, lowest = (_take(part, keep) for part in (place, alive, best, lowest))
        if left_over == 0:
            break
    _put(ended, place, (best, state.xi))
    return ended


def _take(part: Tensor, chosen: Tensor) -> Tensor:
    """Return the chosen programs of each row."""
    return part.gather(1, chosen.expand(-1, -1, part.shape[2]))


def _put(ended: tuple[Tensor, Tensor], place: Tensor, parts: tuple[Tensor, Tensor]) -> None:
    """Write programs back to their places."""
    for whole, part in zip(ended, parts, strict=True):
        whole.scatter_(1, place.expand(-1, -1, part.shape[2]), part)


def _proven(
    frame: _Frame, c: Float[Tensor, "row program key"], y: Float[Tensor, "row program rank"], epsilon: float
) -> Float[Tensor, "row program"]:
    r"""Evaluate the bound at $y$ in float64 and add what rounding can have taken from it.

    The first coordinate of $y$ adds a constant to all $y \cdot u_m$ and cancels; it is set to 0. A product $y \cdot u_m$ of
    float64 is off by at most $k\,\mathrm{eps}\,\|y\|\,\|u_m\|$, with $\|u_m\| \le 1$, a weighted mean of n of them by n eps
    more.
    """
    y = y.nan_to_num(0.0, 0.0, 0.0)
    y[..., 0] = 0
    keys, rank = frame.basis.shape[1:]
    scores = y @ frame.basis.mT
    top = (c - scores).masked_fill(~frame.rows.visible[:, None], -torch.inf).amax(-1)
    moved = epsilon * frame.rows.output[:, None] * (y / frame.rows.scale[frame.rows.group][:, None]).norm(dim=-1)
    size = y.norm(dim=-1) + moved + c.abs().amax(-1)
    margin = 2 * (keys + rank + 8) * torch.finfo(torch.float64).eps * size
    return (scores * frame.rows.attention[:, None]).sum(-1) + top + moved + margin


def _feasible(frame: _Frame, xi: Float[Tensor, "row program key"], epsilon: float) -> Float[Tensor, "row program key"]:
    r"""Turn each $\xi$ into attention that is in $P_\varepsilon$.

    With $\varepsilon = 0$, project it onto $W^\top\xi = \beta$, and move it towards the anchor until no weight is negative.
    Otherwise move it towards the raw attention until the output moves little enough.
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
