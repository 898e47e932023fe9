"""Operators of the fused blocks under torch.library, torch.compile, autocast and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_blocks import BF16, BLOCKS, CUDA, F16, FORMATS, T1, T3, TOLERANCE, Block, errors, run, three_layers
from layers import Layer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tconv3d
from tconv3d.torch_ops.backend import Backend

STEPS = ("conv_transpose3d_relu_statistics", "normalize", "relu_group_norm_grad")


def operator_call(name: str, device: str, memory_format: torch.memory_format) -> tuple[Any, tuple[Any, ...]]:
    layer = Layer(4, 6, (3, 2, 3), (3, 2, 3), (2, 1, 2), (1, 0, 1), (1, 0, 0), groups=2)
    x, w, b = layer.operands(torch.float32, device)
    x = x.contiguous(memory_format=memory_format)
    y = torch.relu(F.conv_transpose3d(x, w, b, *layer.settings)).contiguous(memory_format=memory_format)
    gamma, beta = torch.randn(6, device=device), torch.randn(6, device=device)
    statistics = torch.stack([y.view(2, 3, -1).mean(2), y.view(2, 3, -1).std(2)]) if y.is_contiguous() else None
    if statistics is None:
        statistics = torch.rand(2, 2, 3, device=device) + 0.5
    leaves = [t.detach().requires_grad_() for t in (x, w, b, gamma, beta)]
    arguments: dict[str, tuple[Any, ...]] = {
        "conv_transpose3d_relu": (*leaves[:3], *layer.settings),
        "conv_transpose3d_relu_group_norm": (*leaves, 3, 1e-5, torch.float32, *layer.settings),
        "conv_transpose3d_relu_statistics": (x, w, b, 3, 1e-5, *layer.settings),
        "normalize": (y, statistics, gamma, beta, torch.float32),
        "relu_group_norm_grad": (torch.randn_like(y), y, statistics, gamma, torch.float32, (True, True, True)),
    }
    return getattr(torch.ops.tconv3d, name).default, arguments[name]


OPERATORS = ("conv_transpose3d_relu", "conv_transpose3d_relu_group_norm", *STEPS)


@pytest.fixture(params=["ours", "default"])
def backend(request: pytest.FixtureRequest, device: str) -> Any:
    """Our kernels, and what a user gets who chooses nothing."""
    chosen: Backend = "auto" if request.param == "default" else "cuda" if device == "cuda" else "emulator"
    with tconv3d.use_backend(chosen), torch.backends.cudnn.flags(allow_tf32=False):
        yield chosen


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str, backend: Backend, device: str) -> None:
    operator, arguments = operator_call(name, device, torch.contiguous_format)
    results = torch.library.opcheck(operator, arguments)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("name", OPERATORS)
def test_shapes_and_strides_without_data(name: str, memory_format: str, backend: Backend, device: str) -> None:
    operator, arguments = operator_call(name, device, FORMATS[memory_format])
    real = operator(*arguments)
    with FakeTensorMode() as mode:
        fake = operator(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments))
    real, fake = ((found,) if isinstance(found, Tensor) else found for found in (real, fake))
    assert [(t.shape, t.stride(), t.dtype) for t in fake] == [(t.shape, t.stride(), t.dtype) for t in real]


def test_operators_compute_the_same_on_both_backends(device: str) -> None:
    for name in OPERATORS:
        operator, arguments = operator_call(name, device, torch.contiguous_format)
        found = []
        for chosen in ("torch", "cuda" if device == "cuda" else "emulator"):
            with tconv3d.use_backend(chosen), torch.backends.cudnn.flags(allow_tf32=False):  # type: ignore[arg-type]
                found.append(operator(*arguments))
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_compile(memory_format: str, backend: Backend, device: str) -> None:
    torch._dynamo.reset()
    block = BLOCKS["plain"]
    module, x = block.module(device), block.input(device, FORMATS[memory_format])
    compiled: Any = torch.compile(nn.Sequential(module, nn.Tanh()), fullgraph=True, backend="aot_eager")
    got = run_with(compiled, module, x)
    expected = run(nn.Sequential(three_layers(module), nn.Tanh()), x.double())
    assert max(errors(got, expected)) < 1e-5
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), got[0])


def run_with(call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    y = call(leaf)
    return [y.detach(), *torch.autograd.grad(y.sum(), [leaf, *module.parameters()])]


def test_compile_once_for_all_sizes(backend: Backend, device: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    module = BLOCKS["plain"].module(device)
    compiled: Any = torch.compile(module, fullgraph=True, backend=counter)
    for batch, *size in ((2, 3, 4, 5), (3, 4, 4, 6), (5, 2, 7, 3)):
        x = torch.randn(batch, 4, *size, device=device)
        for dim in (0, 2, 3, 4):
            torch._dynamo.mark_dynamic(x, dim)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_autocast(dtype: torch.dtype, ours: str) -> None:
    """Types as the three layers have them: the norm is float32 on CUDA, and the convolution's on the CPU."""
    block = BLOCKS["plain"]
    module, x = block.module(ours), block.input(ours)
    layers = nn.Sequential(module.conv_transpose, nn.ReLU(), module.group_norm)
    with torch.autocast(ours, dtype):
        got = run(module, x)
        with tconv3d.use_backend("torch"):
            expected = run(layers, x)
        relu = tconv3d.conv_transpose3d_relu(x, module.conv_transpose.weight)
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    assert got[0].dtype == (torch.float32 if ours == "cuda" else dtype) and relu.dtype == dtype
    assert max(errors(got, [t.double() for t in expected])) < 2 * TOLERANCE[dtype]


def test_a_norm_in_float32_of_a_half_precision_convolution(ours: str) -> None:
    """What autocast asks for on CUDA, here too: three types in one block."""
    x, w, b = Layer(16, 8, (3, 4, 5), T3).operands(F16, ours)
    gamma, beta = torch.randn(8, device=ours), torch.randn(8, device=ours)
    leaves = [t.detach().requires_grad_() for t in (x, w, b, gamma, beta)]
    settings = (T1, (0, 0, 0), (0, 0, 0), 1, T1)
    y = torch.ops.tconv3d.conv_transpose3d_relu_group_norm(*leaves, 2, 1e-5, torch.float32, *settings)
    assert y.dtype == torch.float32
    grad = torch.randn_like(y)
    got = torch.autograd.grad(y, leaves, grad)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    reference = F.group_norm(torch.relu(F.conv_transpose3d(*exact[:3])), 2, *exact[3:])
    expected = torch.autograd.grad(reference, exact, grad.double())
    assert [t.dtype for t in got] == [t.dtype for t in leaves]
    assert max(errors([y.detach(), *got], [reference.detach(), *expected])) < TOLERANCE[F16]
    with torch.no_grad():
        again = torch.ops.tconv3d.conv_transpose3d_relu_group_norm(*leaves, 2, 1e-5, torch.float32, *settings)
    assert torch.equal(again, y)


@CUDA
def test_graph_capture_and_replay(ours: str) -> None:
    block = BLOCKS["plain"]
    module, x = block.module(ours), block.input(ours)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(module, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(module, x)
    for _ in range(2):
        x.copy_(block.input(ours))
        graph.replay()
        assert all(map(torch.equal, captured, run(module, x)))


@CUDA
def test_peak_memory_of_a_training_step(ours: str) -> None:
    block = Block(Layer(16, 32, (48, 48, 48), T3), 8)
    module, x = block.module(ours), block.input(ours)
    layers = nn.Sequential(nn.ConvTranspose3d(16, 32, 3), nn.ReLU(), nn.GroupNorm(8, 32)).to(ours)
    peaks = []
    for model in (module, layers):
        run(model, x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(model, x)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] <= peaks[1] * 1.01, peaks
