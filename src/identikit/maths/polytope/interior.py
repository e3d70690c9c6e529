r"""Programs over sets of attention, many at once, by an interior-point method.

Each program maximises $\gamma \cdot \xi - \tfrac q2\|\xi\|^2$ over $\xi \ge 0$ with $W^\top \xi = \beta$, or with room,
$W^\top \xi = \beta + E^\top e$ where $\|e\| \le 1$. With the slack $\sigma = Wz - \gamma + q\,\xi \ge 0$ the solution
has $\xi_m \sigma_m = 0$ for all m; the method keeps both positive and their products near a common $\mu$, which it
takes to 0 by Mehrotra's predictor and corrector. Programs of one set share $W$, so that the matrices $W^\top D W$ of
all of them are one product with its lines' outer products. All is float64.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from identikit.shapes import Bool, Float, Tensor

_TOWARD_BOUNDARY = 0.995  # the share of the way to the boundary that a step may go
_CENTRING = 30  # steps to a centre at most; real rows need about six
_CENTRED = 1e-9  # a step that changes each weight by less, relatively, ends at the centre
_WORTHWHILE = 0.75  # leave finished programs behind when this share or less is left


class State(NamedTuple):
    r"""Where the programs stand: $\xi$, the slack $\sigma$ and $z$; with room also $e$ and its multiplier."""

    xi: Float[Tensor, "set program key"]
    sigma: Float[Tensor, "set program key"]
    z: Float[Tensor, "set program rank"]
    e: Float[Tensor, "set program room"]
    multiplier: Float[Tensor, "set program 1"]

    def moved(self, step: "State", along: Tensor, across: Tensor) -> "State":
        """Go `along` a step in the primal variables ($\\xi$, $e$), and `across` it in the dual ones."""
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
        return State(*(torch.where(keep, new, old) for new, old in zip(self, other, strict=True)))


class Ball(NamedTuple):
    r"""The room $E^\top e$, $\|e\| \le 1$, that the constraints leave: `pull` is $E$.

    With multiplier $\lambda$ and $\omega = (1 - \|e\|^2)/2$ the conditions are $Ez = \lambda e$ and
    $\lambda\omega = \mu$. Solved for the changes of $e$ and $\lambda$, their linear form adds $E^\top K E$ to the
    matrix of $dz$, where $K = (1 - ee^\top/(\omega + \|e\|^2))/\lambda$.
    """

    pull: Float[Tensor, "set rank rank"]

    def gap(self, state: State) -> Tensor:
        r"""Return $\lambda\omega$."""
        return state.multiplier * (1 - _square(state.e)) / 2

    def curve(self, state: State) -> Tensor:
        r"""Return $E^\top K E$."""
        pulled = state.e @ self.pull
        size = (1 + _square(state.e)) / 2
        outer = pulled[..., None] * (pulled / size)[..., None, :]
        return ((self.pull.mT @ self.pull)[:, None] - outer) / state.multiplier[..., None]

    def change(self, state: State, dz: Tensor | float, aim: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return the changes of $e$ and $\lambda$ that go with a change of $z$, towards $\lambda\omega$ = `aim`."""
        pulled = (state.z + dz) @ self.pull.mT - state.multiplier * state.e
        size = (1 + _square(state.e)) / 2
        dmultiplier = (aim - self.gap(state) + (state.e * pulled).sum(-1, keepdim=True)) / size
        return (pulled - state.e * dmultiplier) / state.multiplier, dmultiplier

    def second(self, state: State, step: State) -> Tensor:
        r"""Return the second-order terms of $\lambda\omega$ in a step."""
        cross = (state.e * step.e).sum(-1, keepdim=True)
        return -step.multiplier * cross - state.multiplier * _square(step.e) / 2

    def reach(self, state: State, step: State) -> Tensor:
        """Return how much of a step stays in the ball."""
        square = _square(step.e)
        cross = (state.e * step.e).sum(-1, keepdim=True)
        room = (1 - _square(state.e)).clamp(min=0)
        return _TOWARD_BOUNDARY * ((cross.square() + square * room).sqrt() - cross) / square.clamp(min=1e-30)


def _square(vectors: Tensor) -> Tensor:
    return vectors.square().sum(-1, keepdim=True)


class Space(NamedTuple):
    r"""The constraints of the programs: find $\xi \ge 0$ with $W^\top\xi = \beta + E^\top e$.

    - `wide`: $W$; `square`: its lines' outer products
    - `right`: $\beta$; `visible`: 1 at visible keys; both shared by the programs of a set or given for each
    - `ridge`: added to the diagonal of $W^\top D W$; 1 at columns of 0
    - `ball`: the room, if there is some; `curvature`: $q$
    """

    wide: Float[Tensor, "set key rank"]
    square: Float[Tensor, "set key pair"]
    right: Float[Tensor, "set _ rank"]
    visible: Float[Tensor, "set _ key"]
    ridge: Float[Tensor, "set 1 rank"]
    ball: Ball | None
    curvature: float

    @staticmethod
    def of(
        wide: Tensor,
        right: Tensor,
        visible: Tensor,
        *,
        ball: Ball | None = None,
        curvature: float = 0.0,
        ridge: float = 0.0,
    ) -> "Space":
        """Return the space of these factors, without room or with a `ball` of it."""
        square = (wide[..., :, None] * wide[..., None, :]).flatten(2)
        absent = (wide == 0).all(1, keepdim=True)
        if ball is not None:
            absent &= (ball.pull == 0).all(1, keepdim=True)
        diagonal = absent.to(wide).clamp(min=ridge)
        return Space(wide, square, right, visible, diagonal, ball, curvature)

    def select(self, indices: Tensor) -> "Space":
        """Return the space of some programs of each set."""
        if self.right.shape[1] == 1:
            return self
        return self._replace(right=_take(self.right, indices), visible=_take(self.visible, indices))

    def mean_gap(self, state: State) -> Tensor:
        r"""Return $\mu$, the mean of the products that all become 0."""
        total = (state.xi * state.sigma).sum(-1, keepdim=True)
        count = self.visible.sum(-1, keepdim=True)
        return total / count if self.ball is None else (total + self.ball.gap(state)) / (count + 1)

    def grams(self, weights: Float[Tensor, "set program key"]) -> Float[Tensor, "set program rank rank"]:
        r"""Return $W^\top D W$ for weights on the diagonal of $D$."""
        return (weights @ self.square).unflatten(-1, (-1, self.wide.shape[2]))

    def factor(self, state: State) -> tuple[Tensor, Tensor]:
        r"""Factor $W^\top D W + E^\top K E$, $D = \mathrm{diag}(\xi/(\sigma + q\xi))$; return also where it failed."""
        matrix = self.grams(state.xi / (state.sigma + self.curvature * state.xi))
        if self.ball is not None:
            matrix += self.ball.curve(state)
        diagonal = matrix.diagonal(dim1=-2, dim2=-1)
        diagonal.mul_(1 + 8 * torch.finfo(matrix.dtype).eps).add_(self.ridge)
        factor, info = torch.linalg.cholesky_ex(matrix)
        return factor, info[..., None] > 0

    def step(self, state: State, factor: Tensor, aim: Tensor, first: State | None = None) -> State:
        r"""Solve the linear form of $\xi\sigma = \lambda\omega$ = `aim`, less second-order terms of a `first` step."""
        product = aim if first is None else aim - first.xi * first.sigma
        steep = state.sigma + self.curvature * state.xi
        change = product / steep * self.visible - state.xi * (state.sigma / steep)
        residual = (change + state.xi) @ self.wide - self.right
        de = torch.zeros_like(state.e)
        dmultiplier = torch.zeros_like(state.multiplier)
        if self.ball is not None:
            aim = aim if first is None else aim - self.ball.second(state, first)
            de, _ = self.ball.change(state, 0.0, aim)
            residual = residual - (state.e + de) @ self.ball.pull
        dz = torch.cholesky_solve(residual[..., None], factor)[..., 0]
        across = dz @ self.wide.mT * self.visible
        dxi = change - state.xi / steep * across
        if self.ball is not None:
            de, dmultiplier = self.ball.change(state, dz, aim)
        return State(dxi, across + self.curvature * dxi, dz, de, dmultiplier)

    def reach(self, state: State, step: State) -> tuple[Tensor, Tensor]:
        """Return how far to go along and across a step: at most all of it, and nothing positive becomes 0.

        With curvature the slack depends on the primal variables, and both go equally far.
        """
        along = _TOWARD_BOUNDARY * _step_to_zero(state.xi, step.xi)
        across = _TOWARD_BOUNDARY * _step_to_zero(state.sigma, step.sigma)
        if self.ball is not None:
            along = torch.minimum(along, self.ball.reach(state, step))
            across = torch.minimum(across, _TOWARD_BOUNDARY * _step_to_zero(state.multiplier, step.multiplier))
        if self.curvature:
            along = across = torch.minimum(along, across)
        return along.clamp(max=1), across.clamp(max=1)


def _step_to_zero(values: Tensor, change: Tensor) -> Tensor:
    """Return how much of a change takes the first of some positive numbers to 0."""
    return torch.where(change < 0, -values / change, torch.inf).amin(-1, keepdim=True)


def centre(space: Space, attention: Float[Tensor, "set 1 key"]) -> State:
    r"""Find the point $x$ of the set with the greatest $\sum\log x$ (and $\log\omega$), by Newton's method.

    Its conditions are those of a program of cost 0 at $\mu = 1$. Where some weight can only be 0 there is no such
    point, and what is returned is merely positive. The first column of $W$ is constant; it starts from
    `attention`.
    """
    count = space.visible.sum(-1, keepdim=True)
    z = torch.zeros_like(space.right)
    z[..., :1] = count**2 / space.wide.sum(1, keepdim=True)[..., :1]
    e = z[..., :0] if space.ball is None else torch.zeros_like(z)
    ones = torch.ones_like(count)
    state = State((attention + space.visible / count) / 2, z @ space.wide.mT + (1 - space.visible), z, e, 2 * ones)
    for _ in range(_CENTRING):
        factor, failed = space.factor(state)
        step = space.step(state, factor, ones)
        fine = ~failed & step.finite()
        state = state.moved(step, *space.reach(state, step)).where(fine, state)
        if bool((~fine | (step.xi.abs() <= _CENTRED * state.xi).all(-1, keepdim=True)).all()):
            break
    return state


def follow(
    space: Space,
    state: State,
    pending: Bool[Tensor, "set program"],
    merit: Callable[[Space, State], Tensor],
    *,
    steps: int,
    enough: float,
) -> tuple[Float[Tensor, "set program rank"], Float[Tensor, "set program key"]]:
    r"""Take the pending programs towards their optima; return the $z$ of the least `merit` of each and the last $\xi$.

    The other programs only fill the sets.
    """
    alive = pending[..., None]
    best = state.z
    lowest = torch.full_like(state.multiplier, torch.inf)
    best_of_all = torch.empty_like(state.z)
    last_of_all = torch.empty_like(state.sigma)
    index = torch.arange(alive.shape[1], device=alive.device).expand(alive.shape[:2])[..., None]
    for _ in range(steps):
        state, alive, mu = _stride(space, state, alive)
        value = merit(space, state)
        better = value < lowest
        best = torch.where(better, state.z, best)
        lowest = torch.where(better, value, lowest)
        alive = alive & (mu * space.visible.sum(-1, keepdim=True) > enough)
        remaining = int(alive.sum(1).max())
        if remaining < _WORTHWHILE * alive.shape[1]:
            _write(best_of_all, index, best)
            _write(last_of_all, index, state.xi)
            keep = alive.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :remaining]
            space = space.select(keep)
            state = State(*(_take(array, keep) for array in state))
            index, alive, best, lowest = (_take(array, keep) for array in (index, alive, best, lowest))
        if remaining == 0:
            break
    _write(best_of_all, index, best)
    _write(last_of_all, index, state.xi)
    return best_of_all, last_of_all


def _stride(space: Space, state: State, alive: Tensor) -> tuple[State, Tensor, Tensor]:
    r"""Predict a step to $\mu = 0$, correct it, and take it where nothing failed; also return $\mu$ before it."""
    mu = space.mean_gap(state)
    factor, failed = space.factor(state)
    step = space.step(state, factor, torch.zeros_like(mu))
    remaining = space.mean_gap(state.moved(step, *space.reach(state, step)))
    step = space.step(state, factor, (remaining / mu) ** 3 * mu, step)
    alive = alive & ~failed & step.finite()
    return state.moved(step, *space.reach(state, step)).where(alive, state), alive, mu


def _take(array: Tensor, indices: Tensor) -> Tensor:
    """Return the programs at these indices of each set."""
    return array.gather(1, indices.expand(-1, -1, array.shape[2]))


def _write(target: Tensor, index: Tensor, array: Tensor) -> None:
    """Write programs to these indices of each set."""
    target.scatter_(1, index.expand(-1, -1, array.shape[2]), array)
