"""Chains in ordinary forwards on this library's kernels: values, gradients, statistics, threads."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decoder_blocks import Small, block
from swaps import needs_kernels
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tconv3d
from tconv3d.api import forwards, fusing
from tconv3d.tails import kinds as kinds_of_calls
from tconv3d.tails import tracing
from tconv3d.tools.tasks import relu_group_norm
from tconv3d.torch_ops import kept


@needs_kernels
@pytest.mark.parametrize("training", [True, False])
def test_values_gradients_and_statistics(ours: str, training: bool) -> None:
    torch.manual_seed(0)
    model = Small().to(ours).train(training)
    plain = copy.deepcopy(model)
    tconv3d.accelerate(model)
    assert type(model) is not Small and isinstance(model, Small)
    x, skip = torch.randn(2, 16, 3, 4, 5, device=ours), torch.randn(2, 8, 5, 7, 9, device=ours)
    for gradients in (False, True):
        found = []
        for each in (model, plain):
            a, b = x.clone().requires_grad_(gradients), skip.clone().requires_grad_(gradients)
            with torch.set_grad_enabled(gradients):
                y = each(a, b)
            wanted = torch.autograd.grad(y.sigmoid().sum(), [a, b, *each.parameters()]) if gradients else ()
            found.append([y.detach(), *wanted, *each.buffers()])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()) + 1e-4)
    (plan,) = [plan for plans in model.__dict__[forwards.PLANS]._plans.values() for plan in plans]
    assert plan.function is not None


@needs_kernels
@pytest.mark.parametrize(
    "how", ["an optimizer steps", "nothing is kept", "a graph was captured", "it lies in a buffer"]
)
def test_weights_that_are_written_behind_the_back_of_pytorch(
    how: str, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averages of weights are often updated through `.data`, which no version counter notices."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    plain = Small().to(ours).eval()
    model = tconv3d.accelerate(copy.deepcopy(plain))
    x, skip = torch.randn(2, 16, 3, 4, 5, device=ours), torch.randn(2, 8, 5, 7, 9, device=ours)
    with torch.no_grad():
        if how == "nothing is kept":
            tconv3d.keep_weights(False)
        elif how == "a graph was captured":
            model(x, skip)
            with monkeypatch.context() as patch:
                patch.setattr(kept, "_capturing", lambda weight, stream: True)
                model(x, skip)
        elif how == "it lies in a buffer":
            model.norm.weight.data = torch.cat([model.norm.weight, model.norm.weight])[:8]
        try:
            for _ in range(3):
                if how == "an optimizer steps":
                    optimizer.step()
                for each in (model, plain):
                    each.norm.weight.data.mul_(1.5).add_(0.1)
                torch.testing.assert_close(model(x, skip), plain(x, skip), rtol=1e-3, atol=1e-3)
        finally:
            tconv3d.keep_weights(True)


@needs_kernels
def test_a_norm_that_is_written_between_a_call_and_its_gradients(ours: str) -> None:
    torch.manual_seed(0)
    model = tconv3d.accelerate(Small().to(ours))
    x, skip = torch.randn(2, 16, 3, 4, 5, device=ours), torch.randn(2, 8, 5, 7, 9, device=ours)
    first = model(x, skip)
    model(x, skip).sum().backward()  # statistics are written, which no gradient reads
    first.sum().backward()
    y = model(x, skip)
    with torch.no_grad():
        model.norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@needs_kernels
def test_numbers_that_are_passed_to_a_chain(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and numbers out of tensors are passed; a number that is new in every call is not traced forever."""

    class Numbers(Small):
        def forward(self, x: Tensor) -> Tensor:
            factor = self.scale[0].item()
            return torch.relu(self.up(x)) * factor / x.shape[0]

    monkeypatch.setattr(forwards, "MOST_STATES", 1)
    torch.manual_seed(0)
    plain = Numbers().to(ours)
    model = tconv3d.accelerate(copy.deepcopy(plain))
    traced: list[Any] = []
    trace = kinds_of_calls.trace
    monkeypatch.setattr(kinds_of_calls, "trace", lambda *given: traced.append(given) or trace(*given))
    x = torch.randn(2, 16, 3, 4, 5, device=ours)
    for _ in range(2):
        found = []
        for each in (model, plain):
            y = each(x)
            found.append([y.detach(), *torch.autograd.grad(y.sin().sum(), [each.up.weight, each.up.bias])])
            with torch.no_grad():
                each.scale.mul_(2)
        torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-2)
    assert len(traced) == 1


@needs_kernels
def test_results_of_a_chain_may_be_written(ours: str) -> None:
    """Dropout ends a chain; what follows it in place writes to the chain's result."""

    class Written(Small):
        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            y = F.dropout(F.leaky_relu(self.norm(self.up(x)) * self.scale + skip, 0.2), 1e-9, inplace=True)
            return y.mul_(2)

    torch.manual_seed(0)
    model = Written().to(ours)
    plain = copy.deepcopy(model)
    tconv3d.accelerate(model)
    x, skip = torch.randn(2, 16, 3, 4, 5, device=ours), torch.randn(2, 8, 5, 7, 9, device=ours)
    found = []
    for each in (model, plain):
        y = each(x, skip)
        found.append([y.detach(), *torch.autograd.grad(y.sigmoid().sum(), list(each.parameters()))])
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


def in_forward_mode(model: nn.Module, x: Tensor, skip: Tensor) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)), skip)))


def counted_flops(model: nn.Module, x: Tensor, skip: Tensor) -> Any:
    with FlopCounterMode(display=False) as counter:
        model(x, skip)
    return torch.tensor(counter.get_total_flops())


def checkpointed_gradient(model: nn.Module, x: Tensor, skip: Tensor) -> Any:
    x = x.clone().requires_grad_()
    checkpoint(model, x, skip, use_reentrant=False).sin().sum().backward()
    return x.grad


def with_other_parameters(model: nn.Module, x: Tensor, skip: Tensor) -> Any:
    parameters = {name: value * 2 for name, value in model.named_parameters()}
    return torch.func.functional_call(model, parameters, (x, skip))


@needs_kernels
@pytest.mark.parametrize(
    "use",
    [
        in_forward_mode,
        counted_flops,
        checkpointed_gradient,
        with_other_parameters,
        lambda model, x, skip: torch.vmap(lambda a, b: model(a[None], b[None])[0])(x, skip),
        lambda model, x, skip: torch.func.jvp(lambda a: model(a, skip), (x,), (x,)),
        lambda model, x, skip: model(x[:1], skip[:1]),
        lambda model, x, skip: model(x[:0], skip[:0]),
    ],
)
def test_who_else_looks_at_a_call(use: Any, ours: str) -> None:
    torch.manual_seed(0)
    model = Small().to(ours).eval()
    plain = copy.deepcopy(model)
    tconv3d.accelerate(model)
    x, skip = torch.randn(2, 16, 3, 4, 5, device=ours), torch.randn(2, 8, 5, 7, 9, device=ours)
    torch.testing.assert_close(use(model, x, skip), use(plain, x, skip), rtol=1e-3, atol=1e-4)


@needs_kernels
def test_the_task_runs_the_measured_block(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    run = forwards.convolve_relu_group_norm
    monkeypatch.setattr(forwards, "convolve_relu_group_norm", lambda *a: ran.append("block") or run(*a))
    model = relu_group_norm.Model(4, 8, 3, 2).to(ours)
    x = torch.randn(1, 4, 2, 3, 2, device=ours)
    expected = model(x)
    report = tconv3d.plan_swaps(model)
    assert report.layers[0].chain == "conv -> relu -> group_norm"
    torch.testing.assert_close(tconv3d.accelerate(model)(x), expected, rtol=1e-3, atol=1e-4)
    assert ran == ["block"]


def test_norms_of_measured_blocks_are_precompiled() -> None:
    class Longer(relu_group_norm.Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    for kind in (relu_group_norm.Model, Longer):
        model = tconv3d.accelerate(kind(4, 8, 3, 2))
        assert fusing.norms(model) == {model.conv_transpose: model.group_norm}


@needs_kernels
def test_a_parameter_that_is_cast_needs_another_trace(ours: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.scale = (
                nn.ConvTranspose3d(16, 8, 3, stride=2, padding=1),
                nn.Parameter(torch.ones(8, 1, 1, 1)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x) * self.scale

    model = tconv3d.accelerate(block(Scaled).to(ours))
    x = torch.randn(2, 16, 3, 4, 5, device=ours)
    with torch.no_grad():
        assert model(x).dtype == torch.float32
        model.scale.data = model.scale.data.double()
        assert model(x).dtype == torch.float64


@needs_kernels
def test_threads_trace_one_after_the_other(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch cannot trace in two threads at once, and replaces methods of all modules meanwhile."""
    active: list[int] = []
    most: list[int] = []
    make_fx = tracing.make_fx

    def slowly(*given: Any, **named: Any) -> Any:
        def run(*arguments: Any) -> Any:
            active.append(1)
            most.append(len(active))
            time.sleep(0.05)
            try:
                return make_fx(*given, **named)(*arguments)
            finally:
                active.pop()

        return run

    monkeypatch.setattr(tracing, "make_fx", slowly)
    torch.manual_seed(0)
    plain = Small().to(ours).eval()
    model = tconv3d.accelerate(copy.deepcopy(plain))
    found: dict[int, Tensor] = {}
    backend = "emulator" if ours == "cpu" else "cuda"

    def call(batch: int) -> None:
        x, skip = torch.ones(batch, 16, 3, 4, 5, device=ours), torch.ones(batch, 8, 5, 7, 9, device=ours)
        with tconv3d.use_backend(backend):
            found[batch] = model(x, skip)

    threads = [threading.Thread(target=call, args=(batch,)) for batch in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = plain(torch.ones(1, 16, 3, 4, 5, device=ours), torch.ones(1, 8, 5, 7, 9, device=ours))
    assert sorted(found) == [1, 2, 3, 4] and max(most) == 1
    for each in found.values():
        torch.testing.assert_close(each, expected.expand_as(each), rtol=1e-3, atol=1e-3)
    assert model.__dict__[forwards.PLANS]._made == 1
