"""Modules whose forwards have fused chains: copies, hooks, compilers, threads.

Fused chains are counted (`count`), and their layers run one by one on the CPU.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from decoder_blocks import Block, Small, X, block
from swaps import copied, kinds, pickled, saved
from torch import Tensor, nn

import tconv3d


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


class Norm(nn.GroupNorm):
    """Inherits everything but its constructor."""

    def __init__(self, channels: int) -> None:
        super().__init__(2, channels)


class Bounded(Norm):
    def extra_repr(self) -> str:
        return "bounded"


@pytest.mark.parametrize("kind", [Norm, Bounded])
def test_a_class_that_inherits_from_one_of_pytorch(kind: type[Norm], count: list[str], monkeypatch: Any) -> None:
    model = tconv3d.accelerate(nn.Sequential(nn.ConvTranspose3d(2, 4, 2, stride=2), kind(4), nn.SiLU()))
    expected = model[2](model[1](model[0](X)))
    torch.testing.assert_close(model(X), expected)
    assert count == (["conv -> group_norm -> silu"] if kind is Norm else [])
    monkeypatch.setattr(kind, "forward", lambda self, x: 0 * x, raising=False)
    assert not model(X).any()


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
