"""Accelerated models under torch.fx and TorchScript: traced, compiled, saved, loaded and run.

Annotations are evaluated in this file: torch.fx cannot pickle a graph of a `forward` whose annotations are strings.
"""

import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tconv3d
from tconv3d.torch_ops import executor

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


class Network(nn.Module):
    """Layers alone and in a sequence that is fused, and this library's own blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(4, 4, 2, stride=2)
        self.tail = nn.Sequential(nn.ConvTranspose3d(4, 4, 2, stride=2), nn.ReLU(), nn.GroupNorm(2, 4))
        self.relu = tconv3d.ConvTranspose3dReLU(4, 4, 2, stride=2)
        self.block = tconv3d.ConvTranspose3dReLUGroupNorm(4, 4, 2, num_groups=2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.relu(self.tail(self.up(x) + 1)))  # type: ignore[no-any-return]


def model(device: str, seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return tconv3d.accelerate(Network().to(device, torch.float64))


def volume(device: str, seed: int = 0, batch: int = 2) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 4, 1, 2, 1, generator=random, dtype=torch.float64).to(device)


def results(network: Callable[[Tensor], Tensor], parameters: list[Tensor], x: Tensor) -> list[Tensor]:
    y = network(x)
    return [y.detach(), *torch.autograd.grad(y.pow(2).sum(), parameters)]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes that ran on this library's kernels."""
    names: list[str] = []
    for name in ("forward", "forward_with_statistics", "backward", "input_grad", "weight_grad"):
        original = getattr(executor, name)

        def run(*arguments: Any, _name: str = name, _original: Any = original, **keywords: Any) -> Any:
            names.append(_name)
            return _original(*arguments, **keywords)

        monkeypatch.setattr(executor, name, run)
    return names


# ---- torch.fx


def test_layers_are_leaves_of_a_traced_model(ours: str, launches: list[str]) -> None:
    network = model(ours)
    traced = torch.fx.symbolic_trace(network)
    called = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
    assert called == ["up", "tail.0", "tail.1", "tail.2", "relu", "block"]
    assert [node.op for node in traced.graph.nodes if node.op == "get_attr"] == []
    again = pickle.loads(pickle.dumps(traced))
    for graph in (traced, again):
        launches.clear()
        for seed in (0, 1):
            x = volume(ours, seed)
            got = results(graph, list(graph.parameters()), x)
            assert "forward" in launches and "backward" in launches
            torch.testing.assert_close(got, results(network, list(network.parameters()), x))


def test_a_traced_layer_takes_an_output_size(ours: str) -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose3d(4, 4, 2, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x, output_size=[3, 5, 3])  # type: ignore[no-any-return]

    traced = torch.fx.symbolic_trace(tconv3d.accelerate(Sized().to(ours, torch.float64)))
    assert traced(volume(ours)).shape == (2, 4, 3, 5, 3)


KINDS = [tconv3d.ConvTranspose3d, tconv3d.ConvTranspose3dReLU, tconv3d.ConvTranspose3dReLUGroupNorm]


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_the_traced_model_itself(kind: Any, ours: str) -> None:
    """The graph then has the layer's function and parameters, as with PyTorch's layers."""
    layer = kind(4, 4, 2, 2, dtype=torch.float64, device=ours)
    traced = torch.fx.symbolic_trace(layer, concrete_args={"output_size": None})
    functions = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert functions[-1] in (
        tconv3d.conv_transpose3d,
        tconv3d.conv_transpose3d_relu,
        tconv3d.conv_transpose3d_relu_group_norm,
    )
    torch.testing.assert_close(traced(volume(ours), None), layer(volume(ours)))


def test_functions_are_traced(ours: str) -> None:
    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = tconv3d.conv_transpose3d(x, w, b, stride=2)
        return tconv3d.conv_transpose3d_relu(y * 2, w, b, stride=2)

    traced = torch.fx.symbolic_trace(run)
    assert next(n.target for n in traced.graph.nodes if n.op == "call_function") is tconv3d.conv_transpose3d
    random = torch.Generator().manual_seed(0)
    shapes = (2, 4, 1, 2, 1), (4, 4, 2, 2, 2), (4,)
    operands = [torch.randn(shape, generator=random, dtype=torch.float64).to(ours) for shape in shapes]
    torch.testing.assert_close(traced(*operands), run(*operands))


# ---- TorchScript


def scripted(network: nn.Module, x: Tensor) -> Any:
    return torch.jit.script(network)


def traced(network: nn.Module, x: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        return torch.jit.trace(network, (x,))


OPERATORS = {
    scripted: ["conv_transpose3d", "conv_transpose3d", "conv_transpose3d_relu", "conv_transpose3d"],
    traced: [
        "conv_transpose3d",
        "conv_transpose3d_relu_group_norm",
        "conv_transpose3d_relu",
        "conv_transpose3d_relu_group_norm",
    ],
}


@pytest.mark.parametrize("make", OPERATORS, ids=lambda make: make.__name__)
def test_torchscript(make: Callable[[nn.Module, Tensor], Any], ours: str, launches: list[str]) -> None:
    """Saved, loaded and run, with gradients. The model itself stays as it was."""
    network = model(ours)
    kinds = [type(module) for module in network.modules()]
    program = make(network, volume(ours))
    nodes = [node.kind() for node in program.inlined_graph.nodes()]
    assert [kind for kind in nodes if "tconv3d" in kind] == [f"tconv3d::{name}" for name in OPERATORS[make]]
    file = io.BytesIO()
    torch.jit.save(program, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    assert [type(module) for module in network.modules()] == kinds
    for seed, batch in ((0, 2), (1, 3)):
        x = volume(ours, seed, batch)
        launches.clear()
        got = results(loaded, list(loaded.parameters()), x)
        assert {"forward", "backward"} <= set(launches)
        torch.testing.assert_close(got, results(network, list(network.parameters()), x))


def test_a_scripted_layer_takes_what_the_layer_takes(ours: str) -> None:
    layer = tconv3d.ConvTranspose3d(4, 4, 2, stride=2, dtype=torch.float64, device=ours)
    program = torch.jit.script(layer)
    x = volume(ours)
    torch.testing.assert_close(program(x[0]), layer(x[0]))
    size = [3, 5, 3]
    torch.testing.assert_close(program(x, output_size=size), layer(x, output_size=size))
    with pytest.raises(Exception, match="channels"):
        program(x[:, :3])


def test_a_scripted_model_runs_pytorchs_operator_by_default_on_the_cpu(launches: list[str]) -> None:
    network = model("cpu")
    x = volume("cpu")
    torch.testing.assert_close(torch.jit.script(network)(x), network(x))
    assert launches == []
