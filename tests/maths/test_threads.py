"""Decompositions on one thread each: same bits with any number of threads, and nobody's number of threads changes."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch.linalg import cholesky_ex, eigh, eigvalsh, qr, solve_triangular, svd

from identikit.maths import threads
from identikit.maths.threads import decompose


@pytest.fixture(autouse=True)
def number_of_threads() -> Iterator[None]:
    """Put the number of threads of this thread, and of those that start later, back after a test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def positive(*shape: int) -> torch.Tensor:
    drawn = torch.randn(*shape, shape[-1] + 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return drawn @ drawn.mT


def lower_inverse(factor: torch.Tensor) -> torch.Tensor:
    return solve_triangular(factor, torch.eye(factor.shape[-1], dtype=factor.dtype), upper=False)


def in_new_thread(function: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def fields(answer: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (answer,) if isinstance(answer, torch.Tensor) else answer


@pytest.mark.parametrize(
    "function", [eigh, svd, eigvalsh, cholesky_ex, qr, lower_inverse], ids=lambda function: function.__name__
)
@pytest.mark.parametrize("shape", [(129,), (2, 3, 65), (600, 31), (0, 4)], ids=str)
def test_every_number_of_threads_gives_the_same_bits(function, shape):
    matrices = positive(*shape)
    torch.set_num_threads(1)
    direct = function(matrices)
    single = decompose(function, matrices)
    torch.set_num_threads(3)
    several = decompose(function, matrices)
    assert type(single) is type(several) is type(direct)
    for expected, on_one, on_three in zip(*map(fields, (direct, single, several)), strict=True):
        assert torch.equal(on_one, on_three)
        torch.testing.assert_close(on_one, expected, rtol=1e-9, atol=1e-9)


def test_several_batches_are_cut_at_the_same_places():
    factors = cholesky_ex(positive(40, 30)).L
    right = torch.randn(40, 30, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.set_num_threads(2)
    solved = decompose(partial(solve_triangular, upper=False), factors, right)
    torch.testing.assert_close(factors @ solved, right)


def test_numbers_of_threads_stay_as_they_were():
    """In the thread that calls, in two that call at once, in those that start later; also after an error."""
    torch.set_num_threads(3)
    threads._workers.cache_clear()
    together = threading.Barrier(2)

    def fails(_: torch.Tensor) -> torch.Tensor:
        assert torch.get_num_threads() == 1
        raise ValueError("no decomposition")

    def work(number: int) -> list[int]:
        torch.set_num_threads(number)
        assert torch.get_num_threads() == number  # from here on the number is this thread's own
        together.wait()
        decompose(eigh, positive(6, 40))
        after_success = torch.get_num_threads()
        with pytest.raises(ValueError, match="no decomposition"):
            decompose(fails, positive(6, 40))
        return [after_success, torch.get_num_threads()]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, [2, 4])) == [[2, 2], [4, 4]]
    torch.set_num_threads(3)
    threads._workers.cache_clear()
    assert decompose(lambda matrix: torch.full_like(matrix, torch.get_num_threads()), positive(2, 2)).eq(1).all()
    assert torch.get_num_threads() == 3
    assert in_new_thread(torch.get_num_threads) == 3


def test_workers_keep_the_callers_gradient_mode():
    torch.set_num_threads(2)
    matrices = positive(3, 5).requires_grad_()
    assert decompose(eigvalsh, matrices).requires_grad
    with torch.no_grad():
        assert not decompose(eigvalsh, matrices).requires_grad
    with torch.inference_mode():
        assert decompose(eigvalsh, matrices).is_inference()
    decompose(eigvalsh, matrices).sum().backward()
    torch.testing.assert_close(matrices.grad, torch.eye(5, dtype=torch.float64).expand(3, 5, 5))  # the trace's


def test_other_devices_are_called_directly():
    torch.set_num_threads(2)
    callers = []

    def remember(matrices: torch.Tensor) -> torch.Tensor:
        callers.append(threading.current_thread())
        return matrices

    decompose(remember, torch.empty(4, 3, 3, device="meta"))
    assert callers == [threading.current_thread()]


@pytest.mark.parametrize(
    ("looks", "contend"), [([0, 0], False), ([1, 1], True), ([1, 0, 0], False), ([0, 1, 1], True), ([1, 0, 1], True)]
)
def test_threads_contend_where_two_looks_of_three_say_so(looks, contend, monkeypatch):
    left = list(looks)
    monkeypatch.setattr(threads, "_all_are_slower", lambda number: bool(left.pop(0)))
    assert threads._threads_contend(2) is contend
    assert not left


def test_looking_at_threads_leaves_their_number():
    torch.set_num_threads(2)
    assert threads.useful_thread_count() in (1, 2)
    assert torch.get_num_threads() == 2
