r"""Linear programs over sets of attention, many at once, by an interior-point method.

Each program maximises $\gamma \cdot \xi$ over $\xi \ge 0$ with $W^\top \xi = \beta$, or with room,
$W^\top \xi = \beta + E^\top e$ where $\|e\| \le 1$. With the slack $\sigma = Wz - \gamma \ge 0$ the solution has
$\xi_m \sigma_m = 0$ for all m; the method keeps both positive and their products near a common $\mu$, which it takes
to 0 by Mehrotra's predictor and corrector. Programs of one row share $W$, so that the matrices $W^\top D W$ of all of
them are one product with its lines' outer products.
"""

from typing import NamedTuple

import torch

from identikit.shapes import Bool, Float, Tensor

ENOUGH = 1e-8  # an optimum that is known to within this is done
_BACK = 0.995  # how far towards the boundary a step may go
_CENTRING = 30  # steps to a centre at most; real rows need about six
_CENTRED = 1e-9
_WORTHWHILE = 0.75  # leave finished programs behind when this share or less is left


class State(NamedTuple):
    r"""Where the programs stand: $\xi$, the slack $\sigma$ and $z$; with room also $e$ and its multiplier."""

    xi: Float[Tensor, "row program key"]
    sigma: Float[Tensor, "row program key"]
    z: Float[Tensor, "row program rank"]
    e: Float[Tensor, "row program room"]
    multiplier: Float[Tensor, "row program 1"]

    def moved(self, step: "State", along: Tensor, across: Tensor) -> "State":
        """Go `along` a step in what is sought, and `across` it in what proves it."""
        return State(
            self.xi + along * step.xi,
            self.sigma + across * step.sigma,
            self.z + across * step.z,
            self.e + along * step.e,
            self.multiplier + across * step.multiplier,
        )

    def finite(self) -> Tensor:
        """Return which programs have finite numbers only."""
        return self.xi.isfinite().all(-1, keepdim=True) & self.z.isfinite().all(-1, keepdim=True)

    def where(self, keep: Tensor, other: "State") -> "State":
        """Return this state where `keep` says so, elsewhere the other."""
        return State(*(torch.where(keep, mine, theirs) for mine, theirs in zip(self, other, strict=True)))


class Ball(NamedTuple):
    r"""The room $E^\top e$, $\|e\| \le 1$, that the constraints leave: `pull` is $E$.

    With multiplier $\lambda$ and $\omega = (1 - \|e\|^2)/2$ the conditions are $Ez = \lambda e$ and
    $\lambda\omega = \mu$. Solved for the changes of $e$ and $\lambda$, their linear form adds $E^\top K E$ to the
    matrix of $dz$, where $K = (1 - ee^\top/(\omega + \|e\|^2))/\lambda$.
    """

    pull: Float[Tensor, "row rank rank"]

    def gap(self, state: State) -> Tensor:
        r"""Return $\lambda\omega$."""
        return state.multiplier * (1 - state.e.square().sum(-1, keepdim=True)) / 2

    def curve(self, state: State) -> Tensor:
        r"""Return $E^\top K E$."""
        pulled = state.e @ self.pull
        size = (1 + state.e.square().sum(-1, keepdim=True)) / 2
        outer = pulled[..., None] * (pulled / size)[..., None, :]
        return ((self.pull.mT @ self.pull)[:, None] - outer) / state.multiplier[..., None]

    def change(self, state: State, dz: Tensor | float, aim: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return the changes of $e$ and $\lambda$ that go with a change of $z$, towards $\lambda\omega$ = `aim`."""
        e, multiplier = state.e, state.multiplier
        pulled = (state.z + dz) @ self.pull.mT - multiplier * e
        size = (1 + e.square().sum(-1, keepdim=True)) / 2
        dmultiplier = (aim - self.gap(state) + (e * pulled).sum(-1, keepdim=True)) / size
        return (pulled - e * dmultiplier) / multiplier, dmultiplier

    def second(self, state: State, step: State) -> Tensor:
        r"""Return the second-order terms of $\lambda\omega$ in a step."""
        cross, square = (state.e * step.e).sum(-1, keepdim=True), step.e.square().sum(-1, keepdim=True)
        return -step.multiplier * cross - state.multiplier * square / 2

    def reach(self, state: State, step: State) -> Tensor:
        """Return how much of a step stays in the ball."""
        square, cross = step.e.square().sum(-1, keepdim=True), (state.e * step.e).sum(-1, keepdim=True)
        room = (1 - state.e.square().sum(-1, keepdim=True)).clamp(min=0)
        return _BACK * ((cross.square() + square * room).sqrt() - cross) / square.clamp(min=1e-30)


class Space(NamedTuple):
    r"""The programs' common data in one precision: find $\xi \ge 0$ with $W^\top\xi = \beta + E^\top e$.

    `wide` is $W$, `square` its lines' outer products (one triangle) in the precision of the large products, `right`
    $\beta$, `shown` 1 at visible keys, `absent` 1 at columns of 0.
    """

    wide: Float[Tensor, "row key rank"]
    square: Float[Tensor, "row key pair"]
    right: Float[Tensor, "row 1 rank"]
    shown: Float[Tensor, "row 1 key"]
    absent: Float[Tensor, "row 1 rank"]
    ball: Ball | None

    @staticmethod
    def of(wide: Tensor, right: Tensor, shown: Tensor, ball: Ball | None, dtype: torch.dtype) -> "Space":
        """Gather it, in `dtype` or float32."""
        first, second = torch.tril_indices(*wide.shape[2:] * 2, device=wide.device)
        square = (wide[..., first] * wide[..., second]).to(dtype)
        absent = (wide == 0).all(1, keepdim=True)
        if ball is not None:
            absent &= (ball.pull == 0).all(1, keepdim=True)
        at_least = torch.promote_types(dtype, torch.float32)
        ball = ball and Ball(ball.pull.to(at_least))
        wide, right, shown, absent = (part.to(at_least) for part in (wide, right, shown, absent))
        return Space(wide, square, right, shown, absent, ball)

    def mean_gap(self, state: State) -> Tensor:
        r"""Return $\mu$, the mean of the products that all become 0."""
        total, count = (state.xi * state.sigma).sum(-1, keepdim=True), self.shown.sum(-1, keepdim=True)
        return total / count if self.ball is None else (total + self.ball.gap(state)) / (count + 1)

    def factor(self, state: State) -> tuple[Tensor, Tensor]:
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

    def step(self, state: State, factor: Tensor, aim: Tensor, first: State | None = None) -> State:
        r"""Solve the linear form of $\xi\sigma = \lambda\omega$ = `aim`, less second-order terms of a `first` step."""
        product = aim if first is None else aim - first.xi * first.sigma
        change = product / state.sigma * self.shown - state.xi
        wanted = (change + state.xi) @ self.wide - self.right
        de, dmultiplier = torch.zeros_like(state.e), torch.zeros_like(state.multiplier)
        if self.ball is not None:
            aim = aim if first is None else aim - self.ball.second(state, first)
            de, _ = self.ball.change(state, 0.0, aim)
            wanted = wanted - (state.e + de) @ self.ball.pull
        dz = torch.cholesky_solve(wanted[..., None], factor)[..., 0]
        dsigma = dz @ self.wide.mT
        if self.ball is not None:
            de, dmultiplier = self.ball.change(state, dz, aim)
        return State(change - state.xi / state.sigma * dsigma, dsigma, dz, de, dmultiplier)

    def reach(self, state: State, step: State) -> tuple[Tensor, Tensor]:
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


def centre(space: Space, attention: Float[Tensor, "row 1 key"]) -> State:
    r"""Find the point $x$ of the set with the greatest $\sum\log x$ (and $\log\omega$), by Newton's method.

    Its conditions are those of a program of cost 0 at $\mu = 1$. Where some weight can only be 0 there is no such
    point, and what is returned is merely positive. The first column of $W$ is constant; it starts from
    `attention`.
    """
    count = space.shown.sum(-1, keepdim=True)
    w = torch.zeros_like(space.right)
    w[..., :1] = count**2 / space.wide.sum(1, keepdim=True)[..., :1]
    e = w[..., :0] if space.ball is None else torch.zeros_like(w)
    x, slack = (attention + space.shown / count) / 2, w @ space.wide.mT + (1 - space.shown)
    one = torch.ones_like(count)
    state = State(x, slack, w, e, 2 * one)
    for _ in range(_CENTRING):
        factor, failed = space.factor(state)
        step = space.step(state, factor, one)
        fine = ~failed & step.finite()
        state = state.moved(step, *space.reach(state, step)).where(fine, state)
        if bool((~fine | (step.xi.abs() <= _CENTRED * state.xi).all(-1, keepdim=True)).all()):
            break
    return state


class Programs(NamedTuple):
    r"""What to maximise: `cost` is $\gamma$, `pending` which programs count, the others only fill the rows.

    A bound that $z$ proves is $\sum_m$ `raw`$_m \sigma_m - \min_m$ `inverse`$_m \sigma_m$, but for a constant.
    """

    cost: Float[Tensor, "row program key"]
    pending: Bool[Tensor, "row program"]
    raw: Float[Tensor, "row 1 key"]
    inverse: Float[Tensor, "row 1 key"]


def maximise(space: Space, start: State, programs: Programs, steps: int) -> tuple[Tensor, Tensor]:
    r"""Take all programs from the centre towards their optima; return the $z$ of the best bound and the last $\xi$."""
    enough = max(ENOUGH, 64 * torch.finfo(space.wide.dtype).eps)
    raw, inverse = programs.raw.to(space.wide), programs.inverse.to(space.wide)
    hidden, keys = 1 - space.shown, space.shown.sum(-1, keepdim=True)
    state, alive = _begin(space, start, programs.cost.to(space.wide)), programs.pending[..., None]
    best, lowest = state.z, torch.full_like(state.multiplier, torch.inf)
    ended = torch.empty_like(state.z), torch.empty_like(state.sigma)
    place = torch.arange(alive.shape[1], device=alive.device).expand(alive.shape[:2])[..., None]
    for _ in range(steps):
        state, alive, mu = _stride(space, state, alive)
        bound = (raw * state.sigma).sum(-1, keepdim=True)
        bound = bound - (state.sigma * inverse + hidden * 1e30).amin(-1, keepdim=True)
        if space.ball is not None:
            bound = bound + (state.z @ space.ball.pull.mT).norm(dim=-1, keepdim=True)
        better = bound < lowest
        best, lowest = torch.where(better, state.z, best), torch.where(better, bound, lowest)
        alive = alive & (mu * keys > enough)
        left = int(alive.sum(1).max())
        if left < _WORTHWHILE * alive.shape[1]:
            _put(ended, place, (best, state.xi))
            keep = alive.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :left]
            state = State(*(_take(part, keep) for part in state))
            place, alive, best, lowest = (_take(part, keep) for part in (place, alive, best, lowest))
        if left == 0:
            break
    _put(ended, place, (best, state.xi))
    return ended


def _begin(space: Space, start: State, cost: Float[Tensor, "row program key"]) -> State:
    r"""Start each program at the centre, at the $\mu$ where its slack is positive and well balanced."""
    size = cost.abs().amax(-1, keepdim=True)
    mu = (2 * cost.amax(-1, keepdim=True)).clamp(min=0.05 * size).clamp(min=1e-6)
    z = mu * start.z.to(cost)
    sigma = z @ space.wide.mT - cost + (1 - space.shown)
    e = start.e.to(cost).expand(*z.shape[:2], -1)
    return State(space.shown.expand_as(cost), sigma, z, e, mu * start.multiplier.to(cost))


def _stride(space: Space, state: State, alive: Tensor) -> tuple[State, Tensor, Tensor]:
    r"""Predict a step to $\mu = 0$, correct it, and take it where nothing failed; also return $\mu$ before it."""
    mu = space.mean_gap(state)
    factor, failed = space.factor(state)
    step = space.step(state, factor, torch.zeros_like(mu))
    left = space.mean_gap(state.moved(step, *space.reach(state, step)))
    step = space.step(state, factor, (left / mu) ** 3 * mu, step)
    alive = alive & ~failed & step.finite()
    return state.moved(step, *space.reach(state, step)).where(alive, state), alive, mu


def _take(part: Tensor, chosen: Tensor) -> Tensor:
    """Return the chosen programs of each row."""
    return part.gather(1, chosen.expand(-1, -1, part.shape[2]))


def _put(ended: tuple[Tensor, Tensor], place: Tensor, parts: tuple[Tensor, Tensor]) -> None:
    """Write programs back to their places."""
    for whole, part in zip(ended, parts, strict=True):
        whole.scatter_(1, place.expand(-1, -1, part.shape[2]), part)
