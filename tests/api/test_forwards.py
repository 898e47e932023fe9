"""Chains in ordinary forwards: what `accelerate` fuses, and that no change of a model goes unnoticed.

The library believes that kernels run, and fused chains are counted (`count`), whose layers then run one by one on the
CPU: what is compared is the rewritten forward with the one that is written.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import decoder_blocks
import pytest
import torch
import torch.nn.functional as F
from decoder_blocks import SKIP, Block, X, block
from swaps import kinds
from torch import Tensor, nn

import tconv3d
from tconv3d.api import forwards
from tconv3d.api.fuse import FusedTail
from tconv3d.runtime.compiler import MissingCompilerError
from tconv3d.tails.kinds import Kinds


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


Change = Callable[[Any], Any]


def set_global(model: Any) -> None:
    decoder_blocks.SCALE = 0.5


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
    monkeypatch.setattr(decoder_blocks, "SCALE", 1.5)
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


def test_attributes_of_layers_in_a_chain_are_conditions(count: list[str]) -> None:
    """A chain is traced with them, so another value needs another chain."""
    model = tconv3d.accelerate(block())
    model(X)
    model.act.negative_slope = 0.9
    model(X)
    model.norm.eps = 1.0
    model(X)
    assert model.__dict__[forwards.PLANS]._made == 3


def test_parameters_that_are_new_in_every_call_are_not_traced_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(forwards, "current_backend", lambda: "emulator")
    monkeypatch.setattr(forwards, "MOST_STATES", 3)
    monkeypatch.setattr(FusedTail, "_why_not", lambda *_: None)
    monkeypatch.setattr(Kinds, "find", lambda self, input, *_: found.append(input) or "not here")
    model = tconv3d.accelerate(block().eval())
    kept = []
    for _ in range(5):
        kept.append({name: value * 1 for name, value in model.named_parameters()})
        torch.func.functional_call(model, kept[-1], (X,))
    assert len(found) == 3


def test_many_sizes_are_not_traced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(forwards, "current_backend", lambda: "emulator")
    monkeypatch.setattr(forwards, "MANY_SIZES", 2)
    monkeypatch.setattr(FusedTail, "_why_not", lambda *_: None)
    monkeypatch.setattr(Kinds, "find", lambda self, input, *_: found.append(input.shape[2]) or "not here")
    model = tconv3d.accelerate(block().eval())
    with torch.no_grad():
        for size in (1, 2, 3, 4, 1, 4, 3):
            model(torch.randn(1, 2, size, 2, 2))
    assert found == [1, 2, 1, 4, 3]
    model(torch.randn(1, 2, 5, 2, 2))  # a checkpoint must record the same when it repeats a call
    assert found[-1] == 5
