"""Chains in ordinary forwards: which Python code `accelerate` reads, and why it leaves other forwards alone.

Fused chains are counted (`count`), and their layers run one by one on the CPU.
"""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from decoder_blocks import SKIP, X, block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tconv3d
from tconv3d.api import fusing

FACTORS = [1.0, 2.0]


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


def test_a_tensor_where_pytorch_also_takes_a_number(count: list[str]) -> None:
    """PyTorch asks for the class of each argument, and reads the memory of what calls itself a tensor."""

    def forward(self: Odd, x: Tensor) -> Tensor:
        y = self.up(x)
        return torch.where(y > 0, x.mean(), 0.5) + torch.where(y < 0, y, 0.5)

    model, plain = tconv3d.accelerate(block(odd(forward))), block(odd(forward))
    torch.testing.assert_close(model(X), plain(X))
    assert len(count) == 1


@pytest.mark.parametrize("known", [True, False], ids=["known number", "any number"])
def test_a_model_whose_forward_unpacks_is_freed_at_once(known: bool, count: list[str]) -> None:
    def forward(self: Odd, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=1)
        (n, *_) = (2,) if known else x.shape
        return torch.relu(self.up(x)) * n + first.mean() * second.mean()

    gc.collect()
    gc.disable()
    try:
        model = tconv3d.accelerate(block(odd(forward)))
        model(X)
        reference = weakref.ref(model)
        del model
        assert reference() is None and len(count) == known
    finally:
        gc.enable()


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


def test_an_input_that_is_written_later(count: list[str]) -> None:
    def forward(self: Odd, x: Tensor) -> Tensor:
        y = self.up(x)
        x.mul_(2)
        return torch.relu(y) + x.sum()

    model, plain = tconv3d.accelerate(block(odd(forward))), block(odd(forward))
    torch.testing.assert_close(model(X.clone()), plain(X.clone()))
