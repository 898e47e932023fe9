"""Results of kernels beside PyTorch's, before they are timed: what is wrong is found, and rounding is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

import tconv3d
from tconv3d import emulator
from tconv3d.planning import winners
from tconv3d.planning.problem import Plan
from tconv3d.runtime import cache
from tconv3d.torch_ops import choosing, examining, executor, pytorch_ops
from tconv3d.torch_ops.checks import Convolution
from tconv3d.torch_ops.examining import Examiner
from tconv3d.torch_ops.measuring import WrongResult

CONVOLUTION: Convolution = ((2, 2, 2), (1, 1, 1), (0, 0, 0), 1, (1, 1, 1))
TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(2, 6, 3, 5, 4).to(dtype), torch.randn(6, 5, 3, 3, 3).to(dtype), torch.randn(5).to(dtype)


def examine(theirs: partial[object], ours: Sequence[Tensor | None], write: Callable[[], None]) -> None:
    Examiner(lambda: ours, theirs)(write)


def written(
    target: Tensor, value: Tensor, spoil: Callable[[Tensor], object] = lambda result: None
) -> Callable[[], None]:
    def run() -> None:
        target.copy_(value)
        spoil(target)

    return run


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_result_with_the_rounding_of_its_type_passes(
    dtype: torch.dtype, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examining, "AT_ONCE", 7)  # results are compared in several parts
    x, w, b = operands(dtype)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last_3d)
    theirs = partial(pytorch_ops.forward, x, w, b, CONVOLUTION)
    exact = pytorch_ops.forward(x.double(), w.double(), b.double(), CONVOLUTION)
    ours = torch.empty_like(theirs())
    examine(theirs, [ours], written(ours, exact.to(dtype)))


def _set_none(result: Tensor) -> None:
    result[1, 2, 3, 4, 5] = float("nan")  # as if no thread wrote this element: memory held NaN before


def _add_twice(result: Tensor) -> None:
    result[0, 0] *= 2


def _shift(result: Tensor) -> None:
    result.copy_(result.roll(1, 4))


@pytest.mark.parametrize("spoil", [_set_none, _add_twice, _shift])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_wrong_result_is_found(dtype: torch.dtype, spoil: Callable[[Tensor], object]) -> None:
    x, w, b = operands(dtype)
    theirs = partial(pytorch_ops.forward, x, w, b, CONVOLUTION)
    ours = torch.empty_like(theirs())
    with pytest.raises(WrongResult, match="differs from PyTorch's by"):
        examine(theirs, [ours], written(ours, theirs(), spoil))


def test_an_element_that_is_not_written_is_found() -> None:
    x, w, b = operands(torch.float32)
    theirs = partial(pytorch_ops.forward, x, w, b, CONVOLUTION)
    right = theirs()
    ours = right.clone()  # an earlier candidate left the right values in the memory

    def run() -> None:
        ours[:, 1:] = right[:, 1:]

    with pytest.raises(WrongResult):
        examine(theirs, [ours], run)


def test_rounding_that_is_all_that_is_left_of_a_sum_is_not_wrong() -> None:
    """The gradient of a bias before a norm is zero but for rounding, which is no reason to drop a kernel."""
    torch.manual_seed(5)
    dy = torch.randn(2, 3, 8, 8, 8)
    dy[:, :, 4:] = -dy[:, :, :4].flip((2, 3, 4))
    theirs = partial(pytorch_ops.bias_grad, dy)
    ours = torch.empty(3)
    one_by_one = dy.transpose(0, 1).flatten(1).flip(1).cumsum(1)[:, -1]  # sums in another order
    exact = dy.double().sum((0, 2, 3, 4))
    assert exact.abs().max() < 1e-12
    assert (one_by_one - theirs()).norm() > examining.LARGEST * theirs().norm(), "the sums differ by rounding alone"
    noise = theirs() + 4 * theirs().abs().max() * torch.tensor([1.0, -1.0, 0.5])
    examine(theirs, [ours], written(ours, noise))
    with pytest.raises(WrongResult):
        examine(theirs, [ours], written(ours, torch.full((3,), 0.5)))


def test_infinite_operands_say_nothing_about_a_kernel() -> None:
    x, w, b = operands(torch.float32)
    x[0, 0, 0, 0, 0] = float("inf")
    theirs = partial(pytorch_ops.forward, x, w, b, CONVOLUTION)
    ours = torch.empty_like(theirs())
    examine(theirs, [ours], written(ours, torch.zeros_like(ours)))


def test_without_memory_for_pytorchs_result_nothing_is_compared() -> None:
    def short() -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    ours = torch.empty(3)
    examine(partial(short), [ours], lambda: pytest.fail("ran without anything to compare with"))


class Clock:
    """Says that every run is a little slower than the one before, so that the first candidate that is timed wins."""

    def __init__(self) -> None:
        self.ms = 1.0

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        self.ms += 1e-3
        return self.ms


@pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")
@pytest.mark.parametrize("backward", [False, True])
def test_a_wrong_kernel_does_not_run(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = executor.Trials.prepare
    stored: dict[str, bytes] = {}
    find, get = cache.find, cache.get

    def broken(self: executor.Trials, plan: Plan) -> Callable[[], None]:
        run = prepare(self, plan)

        def spoiled() -> None:
            run()
            for result in self.results:
                if result is not None:
                    result.mul_(1.5)

        return spoiled if (len(self.layouts) == 3) == backward else run

    monkeypatch.setattr(executor.Trials, "prepare", broken)
    monkeypatch.setattr(
        cache, "find", lambda key, suffix: stored.get(key) if suffix == winners.SUFFIX else find(key, suffix)
    )
    monkeypatch.setattr(
        cache,
        "get",
        lambda key, suffix, build: (
            stored.setdefault(key, build()) if suffix == winners.SUFFIX else get(key, suffix, build)
        ),
    )
    layer = tconv3d.ConvTranspose3d(5, 3, 2, dtype=torch.float64)
    x = torch.randn(1, 5, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    wanted = torch.nn.functional.conv_transpose3d(x, layer.weight, layer.bias)
    executor.forget()
    with tconv3d.use_backend("emulator"), choosing.measured_by(Clock()):
        with pytest.warns(RuntimeWarning, match=r"does not use the kernel direct.* 0.5 of the norm"):
            y = layer(x)
            y.backward(torch.ones_like(y))
        torch.testing.assert_close(y, wanted)
        found = {
            len(key[0]) if isinstance(key[0], tuple) else 1: task.theirs for key, task in executor._tasks.items()
        }
        assert found == {1: not backward, 3: backward}, "PyTorch's operator takes the place of the wrong kernel alone"
        executor.forget()
        layer(x).sum().backward()  # the stored winner counts: nothing is examined, and nothing warns
    executor.forget()
    assert stored
