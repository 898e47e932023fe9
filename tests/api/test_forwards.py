"""Chains in ordinary forwards: what `accelerate` fuses, and that no change of a model goes unnoticed.

Most tests make the library believe that kernels run, and count fused chains, whose layers then run one by one on the
CPU: what they compare is the rewritten forward with the one that is written.
"""

from __future__ import annotations

import copy
import gc
import math
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from swaps import copied, kinds, needs_kernels, pickled, saved
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tconv3d
from tconv3d.api import forwards, fusing
from tconv3d.api.fuse import FusedTail
from tconv3d.runtime.compiler import MissingCompilerError
from tconv3d.tails import kinds as kinds_of_calls
from tconv3d.tails import tracing
from tconv3d.tools.tasks import relu_group_norm
from tconv3d.torch_ops import kept

SCALE = 1.5
FACTORS = [1.0, 2.0]
X = torch.randn(2, 2, 2, 3, 2, generator=torch.Generator().manual_seed(1))
SKIP = torch.randn(2, 4, 4, 6, 4, generator=torch.Generator().manual_seed(2))


def helper(y: Tensor) -> Tensor:
    return y * SCALE


class Block(nn.Module):
    """A block of a decoder as people write it."""

    gain = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(2, 4, 2, stride=2)
        self.norm = nn.BatchNorm3d(4)
        self.act = nn.LeakyReLU(0.1, inplace=True)
        self.drop = nn.Dropout(0.5)
        self.more = nn.ModuleList([nn.Tanh(), nn.Sigmoid()])
        self.scale = nn.Parameter(torch.randn(4, 1, 1, 1))
        self.bias: nn.Parameter | None = nn.Parameter(torch.randn(4, 1, 1, 1))
        self.flag = True
        self.number = 3
        self.numbers = [1, 2]

    @property
    def doubled(self) -> int:
        return self.number * 2

    def finished(self, y: Tensor) -> Tensor:
        return helper(y) + self.doubled

    def forward(self, x: Tensor, skip: Tensor | None = None, power: float = 1) -> Tensor:
        y = self.act(self.norm(self.up(x))) * self.scale
        if skip is not None:
            y = y + skip
        if self.bias is not None:
            y = y + self.bias
        if self.flag:
            y = self.finished(y)
        for each in self.more:
            y = each(y)
        if self.training:
            y = y * 3
        return y * self.gain * sum(self.numbers) * power / 1


def block(kind: type[nn.Module] = Block, *arguments: Any) -> Any:
    torch.manual_seed(0)
    return kind(*arguments)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Counts chains that run fused; their layers run one by one."""
    ran: list[str] = []

    def run(self: forwards.FusedChain, input: Tensor, *passed: Any) -> Any:
        ran.append(self.words)
        return self._unfused(input, *passed)

    monkeypatch.setattr(forwards, "current_backend", lambda: "emulator")
    monkeypatch.setattr(forwards.FusedChain, "forward", run)
    return ran


# ---- on the kernels


class Small(nn.Module):
    """A chain with norm, activation, captured and passed tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(16, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm3d(8)
        self.scale = nn.Parameter(torch.randn(8, 1, 1, 1))

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return F.leaky_relu(self.norm(self.up(x)) * self.scale + skip, 0.2)


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


# ---- what is fused


@pytest.mark.parametrize("training", [True, False])
def test_the_whole_forward_is_one_chain(count: list[str], training: bool) -> None:
    model, plain = block().train(training), block().train(training)
    report = tconv3d.plan_swaps(model)
    tconv3d.accelerate(model)
    for arguments in ((X,), (X, SKIP), (X, SKIP, 2.0)):
        torch.testing.assert_close(model(*arguments), plain(*arguments))
    torch.testing.assert_close(model(x=X, power=3), plain(X, None, 3))
    assert len(count) == 4 and count[0].startswith("conv -> batch_norm -> leaky_relu -> mul -> add")
    assert report.layers[0].chain == count[1] and "conv -> batch_norm" in str(report)
    assert torch.equal(model.norm.running_mean, plain.norm.running_mean)


def test_nested_sequences_of_any_kind(count: list[str]) -> None:
    class Named(nn.Sequential):
        """A subclass that keeps the forward of `nn.Sequential`, as MONAI's blocks do."""

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        tail = Named(nn.InstanceNorm3d(4), nn.Dropout(0.1), nn.PReLU())
        return nn.Sequential(
            nn.Conv3d(2, 2, 1), Named(nn.ConvTranspose3d(2, 4, 2), tail), nn.Tanh(), nn.Conv3d(4, 1, 1)
        )

    model, plain = made().eval(), made().eval()
    assert tconv3d.plan_swaps(model).layers[0].chain == "conv -> instance_norm -> prelu -> tanh"
    tconv3d.accelerate(model)
    torch.testing.assert_close(model(X), plain(X))
    torch.testing.assert_close(model[1](X), plain[1](X))
    assert count == ["conv -> instance_norm -> prelu -> tanh", "conv -> instance_norm -> prelu"]
    torch.manual_seed(3)
    found = model.train()(X)
    torch.manual_seed(3)
    torch.testing.assert_close(found, plain.train()(X))
    assert count[2:] == ["conv -> instance_norm"]
    assert kinds(tconv3d.restore(model)) == kinds(plain)


def test_fuse_false_leaves_forwards_alone() -> None:
    model = tconv3d.accelerate(block(), fuse=False)
    assert type(model) is Block and type(model.up) is tconv3d.ConvTranspose3d
    assert not tconv3d.plan_swaps(block(), fuse=False).layers[0].fused


# ---- what must be noticed

Change = Callable[[Any], Any]


def set_global(model: Any) -> None:
    global SCALE
    SCALE = 0.5


def close_hook(model: Any) -> None:
    model.norm.register_forward_hook(lambda module, args, output: output * 2)


def replace_norm_forward(model: Any) -> None:
    model.norm.forward = lambda input: input * 2


CHANGES: dict[str, tuple[Change, int]] = {
    "training": (lambda m: m.eval(), 1),
    "a flag": (lambda m: setattr(m, "flag", False), 1),
    "a number that a property reads": (lambda m: setattr(m, "number", 5), 1),
    "a list is written": (lambda m: m.numbers.append(3), 1),
    "an attribute of the class is hidden": (lambda m: setattr(m, "gain", 7.0), 1),
    "a method is replaced on the object": (lambda m: setattr(m, "finished", lambda y: y - 1), 1),
    "a list of modules grows": (lambda m: m.more.append(nn.ReLU()), 1),
    "a module is replaced": (lambda m: setattr(m, "act", nn.SiLU()), 1),
    "a norm is replaced": (lambda m: setattr(m, "norm", nn.GroupNorm(2, 4)), 1),
    "an activation becomes another": (lambda m: setattr(m.act, "negative_slope", 0.7), 1),
    "a parameter is replaced": (lambda m: setattr(m, "scale", nn.Parameter(torch.full((4, 1, 1, 1), 3.0))), 1),
    "a parameter is removed": (lambda m: setattr(m, "bias", None), 1),
    "a global variable": (set_global, 1),
    "a hook": (close_hook, 0),
    "a replaced forward": (replace_norm_forward, 0),
    "a convolution's hook": (lambda m: m.up.register_forward_pre_hook(lambda module, args: (2 * args[0],)), 0),
    "statistics": (lambda m: m.norm.running_mean.add_(1), 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str, count: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCALE", 1.5)
    change, fused = CHANGES[name]
    model, plain = tconv3d.accelerate(block()), block()
    for each in (model, plain):
        if name == "statistics":
            each.eval()
        each(X, SKIP)
    assert len(count) == 1
    for each in (model, plain):
        change(each)
    for _ in range(2):
        torch.testing.assert_close(model(X, SKIP), plain(X, SKIP))
    assert len(count) == 1 + 2 * fused


class Settings:
    """A class that serves as a namespace."""

    double = True
    numbers: ClassVar[list[int]] = [1]

    class Inner:
        shift = 1


class Asking(Block):
    """Asks for settings in several ways."""

    weights = torch.ones(4, 1, 1, 1)  # a tensor of the class

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings
        self.named = nn.ModuleDict({"one": nn.Tanh(), "other": nn.Softplus()})

    def forward(self, x: Tensor) -> Tensor:
        known, functions = Settings, F
        y = self.up(x) * getattr(self, "extra", 3) * sum(known.numbers) + known.Inner.shift * self.weights
        for each in self.named.values():
            y = each(y)
        return functions.relu(y) * 2 if self.settings.double else functions.relu(y)


ASKED: dict[str, Change] = {
    "an attribute that was missing": lambda patch: patch(Block, "extra", 5),
    "an attribute of a class": lambda patch: patch(Settings, "double", False),
    "a list of a class": lambda patch: patch(Settings, "numbers", [1, 2]),
    "an attribute of a class in a class": lambda patch: patch(Settings.Inner, "shift", 2),
    "a tensor of a class": lambda patch: patch(Asking, "weights", torch.full((4, 1, 1, 1), 2.0)),
    "a function of PyTorch": lambda patch: patch(F, "relu", lambda y: y * 7),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_a_forward_has_asked_for_is_a_condition(
    name: str, count: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = tconv3d.accelerate(block(Asking)), block(Asking)
    torch.testing.assert_close(model(X), plain(X))
    before = plain(X)
    assert len(count) == 1
    ASKED[name](lambda *what: monkeypatch.setattr(*what, raising=False))
    torch.testing.assert_close(model(X), plain(X))
    assert not torch.equal(before, plain(X))


def test_an_attribute_that_an_object_gets_later(count: list[str]) -> None:
    model = tconv3d.accelerate(block(Asking))
    before = model(X)
    model.extra = 5
    after = model(X)
    assert not torch.equal(after, before)
    model.named["one"] = model.named.pop("one")  # another order
    assert not torch.equal(model(X), after) and len(count) == 3


def test_replaced_functions_of_pytorch_are_called_by_layers(
    count: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tconv3d.accelerate(nn.Sequential(nn.ConvTranspose3d(2, 4, 2), nn.LeakyReLU(0.1)))
    model(X)
    with monkeypatch.context() as patch:
        patch.setattr(F, "leaky_relu", lambda y, *rest: y * 7)
        torch.testing.assert_close(model(X), model[0](X) * 7)
        assert len(count) == 1
    model(X)
    assert len(count) == 2


def test_plans_are_limited_and_keep_no_model_alive(count: list[str]) -> None:
    model = tconv3d.accelerate(block())
    model(X)
    dead: list[Any] = []
    gc.disable()
    try:
        model = tconv3d.accelerate(block())
        model.loose = torch.ones(())
        for power in range(forwards.MOST_PLANS + 4):
            model(X, None, power)
        assert len(model.__dict__[forwards.PLANS]._plans) == forwards.MOST_PLANS
        dead += [weakref.ref(model), weakref.ref(model.up.weight)]
        del model
        assert [each() for each in dead] == [None, None]
    finally:
        gc.enable()


def test_a_convolution_that_is_swapped_later_is_fused(count: list[str]) -> None:
    model = tconv3d.accelerate(block())
    model.up = nn.ConvTranspose3d(2, 4, 2, stride=2)
    model(X)
    assert not count
    tconv3d.accelerate(model)(X)
    assert len(count) == 1


def test_what_changes_back_needs_no_new_plan(count: list[str]) -> None:
    model = tconv3d.accelerate(block())
    for _ in range(4):
        model.train()(X)
        model.eval()(X)
    assert model.__dict__[forwards.PLANS]._made == 2 and len(count) == 8


def test_a_class_that_changes(count: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Block):
        pass

    model, plain = tconv3d.accelerate(block(Own)), block(Own)
    model(X)
    monkeypatch.setattr(Block, "finished", lambda self, y: y * 5)
    torch.testing.assert_close(model(X), plain(X))
    monkeypatch.setattr(Own, "gain", 11.0)
    torch.testing.assert_close(model(X), plain(X))
    assert len(count) == 3
    monkeypatch.setattr(Block, "forward", lambda self, x: x * 7)
    torch.testing.assert_close(model(X), plain(X))
    assert len(count) == 3


def test_equal_arguments_of_other_types_are_other_calls(count: list[str]) -> None:
    class Typed(Block):
        def forward(self, x: Tensor, how: Any = None) -> Tensor:
            y = self.norm(self.up(x))
            return y * 2 if isinstance(how, bool) else y * 3 if isinstance(how, int) else torch.tanh(y)

    model, plain = tconv3d.accelerate(block(Typed)), block(Typed)
    for how in (1, True, 1.0, None, "1"):
        torch.testing.assert_close(model(X, how), plain(X, how))
    assert len(count) == 5


def test_arguments_that_are_no_constants_run_as_written(count: list[str]) -> None:
    class Many(Block):
        def forward(self, x: Tensor, skips: Any = ()) -> Tensor:
            y = torch.relu(self.up(x))
            for skip in skips:
                y = y + skip
            return y

    model, plain = tconv3d.accelerate(block(Many)), block(Many)
    torch.testing.assert_close(model(X, [SKIP, SKIP]), plain(X, [SKIP, SKIP]))
    assert not count
    model(X)
    assert len(count) == 1


def test_a_wrong_call_raises_what_it_raised(count: list[str]) -> None:
    model, plain = tconv3d.accelerate(block()), block()
    for arguments, keywords in (((), {}), ((X, SKIP, 1, 2), {}), ((X,), {"x": X}), ((X,), {"y": X})):
        errors = []
        for each in (model, plain):
            with pytest.raises(Exception) as caught:
                each(*arguments, **keywords)
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1]


def test_a_chain_whose_kernels_are_missing_runs_unfused_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: FusedTail, input: Tensor, *extra: Any) -> Any:
        raise MissingCompilerError("no compiler")

    monkeypatch.setattr(forwards, "current_backend", lambda: "emulator")
    monkeypatch.setattr(FusedTail, "forward", missing)
    model, plain = tconv3d.accelerate(block().eval()), block().eval()
    with pytest.warns(UserWarning, match=r"conv -> batch_norm.*runs unfused.*no compiler"):
        torch.testing.assert_close(model(X), plain(X))
    torch.testing.assert_close(model(X), plain(X))


def test_norms_of_measured_blocks_are_precompiled() -> None:
    class Longer(relu_group_norm.Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    for kind in (relu_group_norm.Model, Longer):
        model = tconv3d.accelerate(kind(4, 8, 3, 2))
        assert fusing.norms(model) == {model.conv_transpose: model.group_norm}


# ---- forwards that are not read


class Odd(nn.Module):
    """A forward that something is wrong with."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(2, 4, 2, stride=2)
        self.norm = nn.BatchNorm3d(4)
        self.calls = 0
        self.seen: list[Any] = []
        self.settings = object()
        self.hidden = [nn.ReLU()]
        self.custom = Custom()
        self.writer = Writer()
        self.row = nn.Sequential(self.writer)
        self.switched = switched


def switched(y: Tensor) -> Tensor:
    return y * 2


switched.on = True  # type: ignore[attr-defined]


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor | None:
        return x if x.sum() > 0 else None


class Writer(nn.Module):
    written = 1

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(4, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        self.written = x.shape[0]
        self.average = self.average * 1.5
        return x


def odd(forward: Callable[..., Any]) -> type[Odd]:
    return type("Written", (Odd,), {"forward": forward, "__module__": __name__})


def by_values(self: Odd, x: Tensor) -> Tensor:
    y = torch.relu(self.up(x))
    return y if y.sum() > 0 else -y


def by_sizes(self: Odd, x: Tensor) -> Tensor:
    return torch.relu(self.up(x)) if x.shape[0] > 1 else self.up(x)


def by_chance(self: Odd, x: Tensor) -> Tensor:
    y = torch.relu(self.up(x))
    return y if random.random() > 2 else -y


def by_torch_chance(self: Odd, x: Tensor) -> Tensor:
    y = torch.relu(self.up(x))
    return y if torch.rand(()) > 2 else -y


def counting(self: Odd, x: Tensor) -> Tensor:
    self.calls += 1
    return torch.relu(self.up(x))


def keeping(self: Odd, x: Tensor) -> Tensor:
    y = torch.relu(self.up(x))
    self.seen.append(y)
    return y


def speaking(self: Odd, x: Tensor) -> Tensor:
    print(x.shape)
    return torch.relu(self.up(x))


def without_gradients(self: Odd, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.up(x)
    return torch.relu(y)


def catching(self: Odd, x: Tensor) -> Tensor:
    try:
        y = self.up(x) if x.sum() > 0 else x
    except Exception:
        y = self.up(x)
    return torch.relu(y)


def of_a_type(self: Odd, x: Tensor) -> Tensor:
    y = torch.relu(self.up(x))
    return y if type(x) is Tensor else -y


def a_result_that_may_be_none(self: Odd, x: Tensor) -> Tensor:
    y = self.custom(x)
    return torch.relu(self.up(x if y is None else y))


def an_object(self: Odd, x: Tensor) -> Tensor:
    return torch.relu(self.up(x)) if self.settings else x


def an_unregistered_module(self: Odd, x: Tensor) -> Tensor:
    return self.hidden[0](self.up(x))


def a_global_list(self: Odd, x: Tensor) -> Tensor:
    FACTORS.append(1.0)
    return torch.relu(self.up(x)) * FACTORS[0]


def any_arguments(self: Odd, *x: Tensor) -> Tensor:
    return torch.relu(self.up(x[0]))


def by_the_mode_of_autograd(self: Odd, x: Tensor) -> Tensor:
    y = torch.relu(self.up(x))
    return y if torch.is_grad_enabled() else -y


def by_autocast(self: Odd, x: Tensor) -> Tensor:
    y = torch.relu(self.up(x))
    return y if torch.is_autocast_enabled("cpu") else -y


def checkpointed(self: Odd, x: Tensor) -> Tensor:
    return torch.relu(checkpoint(self.up, x, use_reentrant=False))


def importing(self: Odd, x: Tensor) -> Tensor:
    import math as other

    return torch.relu(self.up(x)) * other.pi


def reading_what_a_module_wrote(self: Odd, x: Tensor) -> Tensor:
    y = self.writer(x)
    return torch.relu(self.up(y)) * self.writer.written


def reading_what_a_module_in_a_row_wrote(self: Odd, x: Tensor) -> Tensor:
    y = self.row(x)
    return torch.relu(self.up(y)) * self.writer.written


def reading_what_a_module_will_replace(self: Odd, x: Tensor) -> Tensor:
    before = self.row[0].average
    return torch.relu(self.up(self.row(x))) * before


def by_an_attribute_of_a_function(self: Odd, x: Tensor) -> Tensor:
    return torch.relu(self.up(x)) if self.switched.on else self.up(x)  # type: ignore[attr-defined]


def by_an_attribute_of_a_tensor(self: Odd, x: Tensor) -> Tensor:
    return torch.relu(self.up(x)) if not hasattr(x, "mask") else self.up(x)


def counting_in_a_closure() -> Callable[..., Any]:
    calls = 0

    def forward(self: Odd, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.relu(self.up(x)) * calls

    return forward


in_a_closure = counting_in_a_closure()


def of_its_class(self: Odd, x: Tensor) -> Tensor:
    return torch.relu(self.up(x)) if self.__class__.dump_patches else self.up(x)


def text_of_sizes(self: Odd, x: Tensor) -> Tensor:
    return torch.relu(self.up(x)) * len(f"{x.shape[0]}")


@torch.no_grad()
def decorated(self: Odd, x: Tensor) -> Tensor:
    return torch.relu(self.up(x))


NOT_READ: dict[Any, str] = {
    by_values: "decides by values",
    by_sizes: "decides by values or sizes",
    by_chance: "random",
    by_torch_chance: "rand without a tensor",
    counting: "attribute",
    keeping: "list",
    speaking: "print",
    without_gradients: "with statement",
    catching: "catches exceptions",
    of_a_type: "type()",
    a_result_that_may_be_none: "None",
    an_object: "settings",
    an_unregistered_module: "hidden",
    a_global_list: "FACTORS",
    any_arguments: "any number of arguments",
    by_the_mode_of_autograd: "is_grad_enabled",
    by_autocast: "is_autocast_enabled",
    checkpointed: "checkpoint",
    importing: "imports",
    text_of_sizes: "makes text",
    reading_what_a_module_wrote: "reads written of a module that it has called",
    reading_what_a_module_in_a_row_wrote: "reads written of a module that it has called",
    reading_what_a_module_will_replace: "reads average of a module that it then calls",
    by_an_attribute_of_a_function: "switched has attributes",
    by_an_attribute_of_a_tensor: "asks for mask of a tensor",
    of_its_class: "__class__",
    decorated: "plain method",
}


@pytest.mark.parametrize("forward", NOT_READ, ids=lambda forward: forward.__name__)
def test_what_is_not_read_and_why(forward: Any, count: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    made = odd(forward)
    model, plain = block(made), block(made)
    (layer,) = tconv3d.plan_swaps(model).layers
    assert not layer.fused and NOT_READ[forward] in layer.why_alone, layer.why_alone
    assert capsys.readouterr().out == ""
    tconv3d.accelerate(model)
    assert type(model) is made and not count
    model.__class__ = fusing.fused_class(made)  # the call itself refuses as well
    torch.testing.assert_close(model(X), plain(X))
    assert not count and model.calls == plain.calls and len(model.seen) == len(plain.seen)


def test_a_module_that_cannot_be_read_does_not_stop_the_others(count: list[str]) -> None:
    model = nn.Sequential(block(odd(by_values)), nn.Conv3d(4, 2, 1), block())
    report = tconv3d.plan_swaps(model)
    assert [layer.fused for layer in report.layers] == [False, True]
    assert "not fused: the forward of Written is not read" in str(report)
    tconv3d.accelerate(model)
    assert [type(each).__name__ for each in model] == ["Written", "Conv3d", "FusedBlock"]


def test_closures_and_constants_of_python(count: list[str]) -> None:
    factor = 2.0

    def forward(self: Odd, x: Tensor) -> Tensor:
        y = torch.relu(self.up(x)) * factor
        return y * math.pi if isinstance(x, Tensor) and hasattr(x, "shape") else -y

    model, plain = tconv3d.accelerate(block(odd(forward))), block(odd(forward))
    torch.testing.assert_close(model(X), plain(X))
    factor = 3.0
    torch.testing.assert_close(model(X), plain(X))
    assert len(count) == 2


def test_a_closure_that_is_written() -> None:
    (layer,) = tconv3d.plan_swaps(block(odd(in_a_closure))).layers
    assert "calls, a variable of a closure" in layer.why_alone


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(2, 4, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(x))


class Derived(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_a_forward_of_a_base_class(count: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = tconv3d.accelerate(block(Derived)), block(Derived)
    torch.testing.assert_close(model(X), plain(X))
    assert count == ["conv -> relu -> mul"]
    monkeypatch.setattr(Base, "forward", lambda self, x: torch.tanh(self.up(x)))
    torch.testing.assert_close(model(X), plain(X))


class Pair(NamedTuple):
    first: Tensor
    second: dict[str, Any]


def test_results_of_any_form(count: list[str]) -> None:
    def forward(self: Odd, x: Tensor) -> Any:
        y = torch.relu(self.up(x))
        return [y, (x, None), {"y": y, "n": 2}]

    def pair(self: Odd, x: Tensor) -> Any:
        y = torch.relu(self.up(x))
        return Pair(y, {"x": x})

    for each in (forward, pair):
        model, plain = tconv3d.accelerate(block(odd(each))), block(odd(each))
        found, expected = model(X), plain(X)
        assert type(found) is type(expected)
        torch.testing.assert_close(found, expected)


def test_a_class_that_refuses_to_be_derived_from() -> None:
    class Final(Base):
        def __init_subclass__(cls, *, registered: bool) -> None:
            super().__init_subclass__()

    (layer,) = tconv3d.plan_swaps(block(Final)).layers
    assert "no class can be derived from Final" in layer.why_alone
    assert type(tconv3d.accelerate(block(Final))) is Final


def test_attributes_of_layers_in_a_chain_are_conditions(count: list[str]) -> None:
    """A chain is traced with them, so another value needs another chain."""
    model = tconv3d.accelerate(block())
    model(X)
    model.act.negative_slope = 0.9
    model(X)
    model.norm.eps = 1.0
    model(X)
    assert model.__dict__[forwards.PLANS]._made == 3


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


def test_parameters_that_are_new_in_every_call_are_not_traced_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(forwards, "current_backend", lambda: "emulator")
    monkeypatch.setattr(forwards, "MOST_STATES", 3)
    monkeypatch.setattr(FusedTail, "_kind", lambda self, input, extra: found.append(input) or "not here")
    model = tconv3d.accelerate(block().eval())
    kept = []
    for _ in range(5):
        kept.append({name: value * 1 for name, value in model.named_parameters()})
        torch.func.functional_call(model, kept[-1], (X,))
    assert len(found) == 3


def test_sizes_are_read_where_they_are_written(count: list[str]) -> None:
    def forward(self: Odd, x: Tensor) -> Any:
        sizes = x.shape
        y = torch.relu(self.up(x))
        x.unsqueeze_(0)
        return y * sizes[0], x.shape

    model, plain = tconv3d.accelerate(block(odd(forward))), block(odd(forward))
    torch.testing.assert_close(model(X.clone()), plain(X.clone()))
    assert count == ["conv -> relu"]


def reading_statistics(self: Odd, x: Tensor) -> Tensor:
    return self.norm(self.up(x)) * self.norm.running_mean.clone().view(1, 4, 1, 1, 1)


def reading_statistics_at_once(self: Odd, x: Tensor) -> Tensor:
    return self.norm(self.up(x)) * self.norm.running_mean.view(1, 4, 1, 1, 1)


@pytest.mark.parametrize("forward", [reading_statistics, reading_statistics_at_once])
def test_statistics_that_a_forward_reads_are_updated_before(forward: Any, count: list[str]) -> None:
    model, plain = tconv3d.accelerate(block(odd(forward))), block(odd(forward))
    torch.testing.assert_close(model(X), plain(X))
    assert count == ["conv -> batch_norm"]


def test_operators_in_place(count: list[str]) -> None:
    """`x += 1` writes to a tensor that the caller has, and that another name stands for."""

    def forward(self: Odd, x: Tensor, y: Tensor) -> Any:
        other = y
        y += 1
        y *= 2
        z = torch.relu(self.up(x))
        z -= 3
        z *= other
        z += 1
        return z + other

    model, plain = tconv3d.accelerate(block(odd(forward))), block(odd(forward))
    mine, theirs = SKIP.clone(), SKIP.clone()
    torch.testing.assert_close(model(X, mine), plain(X, theirs))
    assert torch.equal(mine, theirs) and count == ["conv -> relu -> sub -> mul -> add -> add"]


def test_many_sizes_are_not_traced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(forwards, "current_backend", lambda: "emulator")
    monkeypatch.setattr(forwards, "MANY_SIZES", 2)
    monkeypatch.setattr(FusedTail, "_kind", lambda self, input, extra: found.append(input.shape[2]) or "not here")
    model = tconv3d.accelerate(block().eval())
    with torch.no_grad():
        for size in (1, 2, 3, 4, 1, 4, 3):
            model(torch.randn(1, 2, size, 2, 2))
    assert found == [1, 2, 1, 4, 3]
    model(torch.randn(1, 2, 5, 2, 2))  # a checkpoint must record the same when it repeats a call
    assert found[-1] == 5


def test_an_input_that_is_written_later(count: list[str]) -> None:
    def forward(self: Odd, x: Tensor) -> Tensor:
        y = self.up(x)
        x.mul_(2)
        return torch.relu(y) + x.sum()

    model, plain = tconv3d.accelerate(block(odd(forward))), block(odd(forward))
    torch.testing.assert_close(model(X.clone()), plain(X.clone()))


# ---- modules


@pytest.mark.parametrize("again", [copied, pickled, saved, copy.copy])
def test_copies(again: Any, count: list[str]) -> None:
    model = tconv3d.accelerate(block().eval())
    expected = model(X)
    other = again(model)
    torch.testing.assert_close(other(X), expected)
    assert type(other) is type(model) and len(count) == 1 + (again is not copy.copy)
    if again is not copy.copy:
        with torch.no_grad():
            model.norm.running_mean.add_(3)
        torch.testing.assert_close(other(X), expected)
    assert kinds(tconv3d.restore(other)) == kinds(block())


def test_a_replica_runs_its_own_layers(count: list[str]) -> None:
    model = tconv3d.accelerate(block().eval())
    model(X)
    replica = model._replicate_for_data_parallel()
    replica._modules = {**model._modules, "act": nn.Identity()}
    replica._parameters = dict(model._parameters)
    plain = block().eval()
    plain.act = nn.Identity()
    torch.testing.assert_close(replica(X), plain(X))


def test_restoring_leaves_nothing() -> None:
    model = block()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    tconv3d.restore(tconv3d.accelerate(model))
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    assert type(model) is Block
    tconv3d.accelerate(tconv3d.accelerate(model))
    assert type(tconv3d.restore(model)) is Block


def test_hooks_and_state_of_the_module_itself(count: list[str]) -> None:
    model, plain = block(), block()
    tconv3d.accelerate(model)
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.register_forward_hook(lambda module, args, output: seen.append(output) or output + 1)
    torch.testing.assert_close(model(X), plain(2 * X) + 1)
    assert len(seen) == len(count) == 1
    assert list(model.state_dict()) == list(plain.state_dict())
    model.forward = lambda x: x  # type: ignore[method-assign]
    torch.testing.assert_close(model(X), 2 * X + 1)


def test_a_hook_in_one_chain_leaves_the_other_fused(count: list[str]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.ConvTranspose3d(2, 2, 2), nn.ConvTranspose3d(2, 2, 2)
            self.act = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.second(self.act(self.first(x))))

    model, plain = tconv3d.accelerate(block(Two)), block(Two)
    expected = plain(X)
    torch.testing.assert_close(model(X), expected)
    handle = model.act.register_forward_hook(lambda module, args, output: None)
    torch.testing.assert_close(model(X), expected)
    handle.remove()
    torch.testing.assert_close(model(X), expected)
    both = ["conv -> tanh", "conv -> relu"]
    assert count == [*both, "conv -> relu", *both]


def test_hooks_on_all_modules_see_every_layer(count: list[str]) -> None:
    model = tconv3d.accelerate(block())
    seen: list[Any] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(type(module)))
    try:
        model(X)
    finally:
        handle.remove()
    assert nn.BatchNorm3d in seen and not count


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compilers_and_tracers_see_the_forward_as_it_is_written(count: list[str]) -> None:
    model = tconv3d.accelerate(Small().eval())
    x, skip = torch.randn(1, 16, 2, 2, 2), torch.randn(1, 8, 3, 3, 3)
    expected = model(x, skip)
    assert len(count) == 1
    for other in (
        torch.jit.script(model),
        torch.jit.trace(model, (x, skip), check_trace=False),
        torch.compile(model, backend="eager", fullgraph=True),
        torch.fx.symbolic_trace(model),
        torch.export.export(model, (x, skip)).module(),
    ):
        torch.testing.assert_close(other(x, skip), expected)
    assert len(count) == 1
    names = [node.target for node in torch.fx.symbolic_trace(model).graph.nodes if node.op == "call_module"]
    assert names == ["up", "norm"]


def test_a_traced_or_scripted_model_is_left() -> None:
    traced = torch.fx.symbolic_trace(Small())
    (layer,) = tconv3d.plan_swaps(traced).layers
    assert not layer.fused and "torch.fx has written it" in layer.why_alone


def test_threads_make_plans_at_the_same_time(count: list[str]) -> None:
    model, plain = tconv3d.accelerate(block().eval()), block().eval()
    expected, found = plain(X), []
    threads = [threading.Thread(target=lambda: found.append(model(X))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(torch.allclose(each, expected) for each in found)


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
