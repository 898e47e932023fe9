"""Where the operators meet the rest of PyTorch: its checks, compiler, autocast, threads, streams and graphs."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from layers import TABLE, Layer, passes
from places import ROOT
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import tconv3d
from tconv3d import emulator
from tconv3d.planning.problem import Device
from tconv3d.torch_ops import executor, ops, pytorch_ops
from tconv3d.torch_ops.backend import Backend, current_backend

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
FORMATS = (torch.contiguous_format, torch.channels_last_3d)
LAYER = Layer(4, 6, (3, 2, 3), (3, 2, 3), (2, 1, 2), (1, 0, 1), (1, 0, 0), groups=2)
OPERATORS = (
    "conv_transpose3d",
    "conv_transpose3d_input_grad",
    "conv_transpose3d_weight_grad",
    "conv_transpose3d_bias_grad",
)


def operator_call(
    name: str, device: str, formats: tuple[torch.memory_format, ...] = FORMATS[:1] * 3
) -> tuple[Any, tuple[Any, ...]]:
    """One of our operators and arguments for it; `formats` of input, weight and the gradient of the result."""
    x, w, b = LAYER.operands(torch.float32, device)
    dy = torch.randn_like(F.conv_transpose3d(x, w, b, *LAYER.settings))
    x, w, dy = (t.to(memory_format=f).requires_grad_() for t, f in zip((x, w, dy), formats, strict=True))
    arguments: dict[str, tuple[Any, ...]] = {
        "conv_transpose3d": (x, w, b.requires_grad_(), *LAYER.settings),
        "conv_transpose3d_input_grad": (dy, w, LAYER.size, *LAYER.settings),
        "conv_transpose3d_weight_grad": (dy, x, LAYER.kernel, *LAYER.settings),
        "conv_transpose3d_bias_grad": (dy,),
    }
    return getattr(torch.ops.tconv3d, name).default, arguments[name]


@pytest.fixture(params=["ours", "default"])
def backend(request: pytest.FixtureRequest, device: str) -> Any:
    """Our kernels, and what a user gets who chooses nothing."""
    chosen: Backend = "auto" if request.param == "default" else "cuda" if device == "cuda" else "emulator"
    # The older of PyTorch's two switches: torch.export does not work while the newer one is set.
    with tconv3d.use_backend(chosen), torch.backends.cudnn.flags(allow_tf32=False):
        yield chosen


# ---- torch.library


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str, backend: Backend, device: str) -> None:
    operator, arguments = operator_call(name, device)
    results = torch.library.opcheck(operator, arguments)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", OPERATORS)
def test_shapes_and_strides_without_data(name: str, backend: Backend, device: str) -> None:
    """Compilers rely on them: fake tensors must have the strides of the real result, in every format."""
    for formats in [(a, b, c) for a in FORMATS for b in FORMATS for c in FORMATS]:
        operator, arguments = operator_call(name, device, formats)
        real = operator(*arguments)
        with FakeTensorMode() as mode:
            fake = operator(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments))
        meta = operator(*(a.detach().to("meta") if isinstance(a, Tensor) else a for a in arguments))
        for one in (fake, meta):
            found = one.shape, one.stride(), one.dtype
            assert found == (real.shape, real.stride(), real.dtype), (name, formats)
        assert fake.device == real.device and meta.device.type == "meta"


def test_meta_tensors(device: str) -> None:
    layer = tconv3d.ConvTranspose3d(4, 6, 3, stride=2, device="meta")
    result = layer(torch.empty(2, 4, 5, 6, 7, device="meta"))
    assert result.shape == (2, 6, 11, 13, 15) and result.device.type == "meta"


# ---- torch.compile and torch.export


def block(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A layer between other operations."""

    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.relu(function(x * 2, w, b, *LAYER.settings)) + 1

    return run


def assert_same_passes(function: Callable[..., Tensor], operands: list[Tensor]) -> None:
    """Result and gradients of `block(ours)` and of `block(PyTorch's)`."""
    both = []
    for run in (function, block(F.conv_transpose3d)):
        leaves = [operand.detach().requires_grad_() for operand in operands]
        result = run(*leaves)
        both.append((result, *torch.autograd.grad(result.pow(2).sum(), leaves)))
    torch.testing.assert_close(both[0], both[1], rtol=1e-4, atol=1e-3)
    assert both[0][0].stride() == block(tconv3d.conv_transpose3d)(*operands).stride()


@pytest.mark.parametrize("memory_format", FORMATS, ids=["contiguous", "channels last"])
def test_compile(backend: Backend, memory_format: torch.memory_format, device: str) -> None:
    torch._dynamo.reset()
    x, w, b = LAYER.operands(torch.float32, device)
    function = torch.compile(block(tconv3d.conv_transpose3d), fullgraph=True, backend="aot_eager")
    assert_same_passes(function, [x.to(memory_format=memory_format), w, b])


def test_compiled_functions_honour_use_backend(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice within the function holds for the calls within the choice, and for no other, in every run."""
    torch._dynamo.reset()
    x, w, b = LAYER.operands(torch.float32, device)
    ran: list[str] = []
    forward = executor.forward
    monkeypatch.setattr(executor, "forward", lambda *a: ran.append(current_backend()) or forward(*a))  # type: ignore[func-returns-value]
    ours: Backend = "cuda" if device == "cuda" else "emulator"

    def run(x: Tensor) -> Tensor:
        first = tconv3d.conv_transpose3d(x, w, b, *LAYER.settings)
        with tconv3d.use_backend(ours):
            second = tconv3d.conv_transpose3d(x + 1, w, b, *LAYER.settings)
            with tconv3d.use_backend("torch"):
                third = tconv3d.conv_transpose3d(x + 2, w, b, *LAYER.settings)
        return first + second + third + tconv3d.conv_transpose3d(x + 3, w, b, *LAYER.settings)

    with tconv3d.use_backend("torch"):
        expected = run(x)
    ran.clear()
    for compiled in (torch.compile(run, backend="eager"), torch.compile(run, backend="aot_eager")):
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected)
            assert [each for each in ran if each != "auto"] == [ours] and current_backend() == "auto"
            ran.clear()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="use_backend"):
        torch.compile(run, backend="eager", fullgraph=True)(x)


def test_compile_with_inductor(ours: str) -> None:
    if ours == "cpu" and not emulator.available():
        pytest.skip("there is no C++ compiler")
    torch._dynamo.reset()
    function = torch.compile(block(tconv3d.conv_transpose3d), fullgraph=True)
    assert_same_passes(function, LAYER.operands(torch.float32, ours))


def test_compile_once_for_all_sizes(backend: Backend, device: str) -> None:
    torch._dynamo.reset()
    _, w, b = LAYER.operands(torch.float32, device)
    compiled = CompileCounterWithBackend("aot_eager")
    function = torch.compile(block(tconv3d.conv_transpose3d), fullgraph=True, backend=compiled)

    def marked(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        for dim in (0, 2, 3, 4):
            torch._dynamo.mark_dynamic(x, dim)  # an error if anything fixes this size
        return function(x, w, b)

    for batch, *size in ((2, 3, 4, 5), (3, 4, 4, 6), (5, 2, 7, 3), (2, 5, 5, 5)):
        assert_same_passes(marked, [torch.randn(batch, 4, *size, device=device), w, b])
    assert compiled.frame_count == 1


def test_compiled_module_with_an_output_size(backend: Backend, device: str) -> None:
    torch._dynamo.reset()
    layer = tconv3d.ConvTranspose3d(4, 6, 3, stride=2, padding=1, device=device)
    x = torch.randn(2, 4, 3, 4, 5, device=device)
    function = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert function(x, output_size=(6, 7, 10)).shape == (2, 6, 6, 7, 10)
    torch.testing.assert_close(function(x, output_size=(6, 7, 10)), layer(x, output_size=[6, 7, 10]))
    torch.testing.assert_close(function(x), layer(x))


def test_export(backend: Backend, device: str) -> None:
    layer = tconv3d.ConvTranspose3d(4, 6, 3, stride=2, device=device)
    batch, depth = torch.export.Dim("batch", min=2), torch.export.Dim("depth", min=2)
    x = torch.randn(3, 4, 2, 3, 4, device=device)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: batch, 2: depth},))
    assert any(node.target is torch.ops.tconv3d.conv_transpose3d.default for node in program.graph.nodes)
    other = torch.randn(2, 4, 5, 3, 4, device=device)
    torch.testing.assert_close(program.module()(other), layer(other))


def test_functional_call(backend: Backend, device: str) -> None:
    layer = tconv3d.ConvTranspose3d(4, 6, 3, device=device)
    x = torch.randn(1, 4, 2, 3, 2, device=device)
    tensors = {"weight": torch.randn_like(layer.weight), "bias": torch.randn(6, device=device)}
    got = torch.func.functional_call(layer, tensors, (x,))
    torch.testing.assert_close(got, F.conv_transpose3d(x, tensors["weight"], tensors["bias"]), rtol=1e-4, atol=1e-4)


# ---- autocast


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype: torch.dtype, backend: Backend, device: str) -> None:
    leaves = [operand.requires_grad_() for operand in LAYER.operands(dtype, device)]
    x, w, b = leaves
    with torch.autocast(device, dtype=torch.bfloat16):
        result = tconv3d.conv_transpose3d(x, w, b, *LAYER.settings)
        theirs = F.conv_transpose3d(x, w, b, *LAYER.settings)
    assert result.dtype == theirs.dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)
    ones = torch.ones_like(result)
    grads = torch.autograd.grad(result, leaves, ones)
    assert [grad.dtype for grad in grads] == [dtype] * 3
    if ops.why_not_ours(x) is not None:  # PyTorch's own CPU operator, which adds in bfloat16
        assert torch.equal(result, theirs)
        return
    exact = [leaf.detach().to(result.dtype).double() for leaf in leaves]
    expected, expected_grads = passes(F.conv_transpose3d, exact, LAYER.settings)
    for got, one in zip((result, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(got.double(), one, rtol=1e-2, atol=1e-3)


def test_autocast_switched_off_inside(ours: str) -> None:
    x, w, b = LAYER.operands(torch.float32, ours)
    with torch.autocast(ours, dtype=torch.bfloat16), torch.autocast(ours, enabled=False):
        assert tconv3d.conv_transpose3d(x, w, b, *LAYER.settings).dtype == torch.float32


# ---- use_backend


def test_backends(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs under each backend, on this machine's tensors."""
    x, w, b = LAYER.operands(torch.float32, device)
    ran: list[str] = []
    forward, original = executor.forward, torch.conv_transpose3d
    monkeypatch.setattr(executor, "forward", lambda *a: ran.append("ours") or forward(*a))  # type: ignore[func-returns-value]
    monkeypatch.setattr(torch, "conv_transpose3d", lambda *a: ran.append("theirs") or original(*a))  # type: ignore[func-returns-value]
    expected = {
        "auto": "ours" if device == "cuda" else "theirs",
        "torch": "theirs",
        "emulator": RuntimeError if device == "cuda" else "ours",
        "cuda": "ours" if device == "cuda" else RuntimeError,
    }
    assert set(expected) == set(get_args(Backend))
    for name in get_args(Backend):
        ran.clear()
        with tconv3d.use_backend(name):
            if expected[name] is RuntimeError:
                with pytest.raises(RuntimeError, match=rf'"{name}"\) expects C.* tensors, but got a tensor on'):
                    tconv3d.conv_transpose3d(x, w, b, *LAYER.settings)
            else:
                tconv3d.conv_transpose3d(x, w, b, *LAYER.settings)
                assert ran == [expected[name]], name


def test_use_backend_as_a_block_nests_and_ends() -> None:
    assert current_backend() == "auto"
    with tconv3d.use_backend("torch"):
        with tconv3d.use_backend("emulator"):
            assert current_backend() == "emulator"
        assert current_backend() == "torch"
        with pytest.raises(KeyError), tconv3d.use_backend("cuda"):
            raise KeyError
        assert current_backend() == "torch"
    assert current_backend() == "auto"


def test_use_backend_as_a_function_stays() -> None:
    try:
        tconv3d.use_backend("torch")
        assert current_backend() == "torch"
    finally:
        tconv3d.use_backend("auto")
    assert current_backend() == "auto"


def test_use_backend_refuses_other_names() -> None:
    with pytest.raises(ValueError, match=r"'auto', 'cuda', 'emulator', 'torch', got 'gpu'"):
        tconv3d.use_backend("gpu")  # type: ignore[arg-type]
    assert current_backend() == "auto"


def test_use_backend_belongs_to_its_thread() -> None:
    seen: list[str] = []
    with tconv3d.use_backend("torch"):
        thread = threading.Thread(target=lambda: seen.append(current_backend()))
        thread.start()
        thread.join()
    assert seen == ["auto"]


@pytest.mark.parametrize("reason", ["dtype", "capability"])
def test_what_we_do_not_support_warns_once(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch_ops, "_warned", set())
    old = Device("an old GPU", (7, 5), 40, 65536)
    monkeypatch.setattr(executor, "device_of", lambda _: old)
    dtype = torch.float32 if reason == "capability" else torch.complex64
    tensor: Any = SimpleNamespace(is_cuda=True, is_nested=False, device=torch.device("cuda", 0), dtype=dtype)
    words = r"compute capability 7\.5 is below 8\.0" if reason == "capability" else r"dtype torch\.complex64 is not"
    with pytest.warns(UserWarning, match=words) as caught:
        for _ in range(3):
            assert ops.why_not_ours(tensor) is not None
    assert len(caught) == 1
    with tconv3d.use_backend("cuda"), pytest.raises(NotImplementedError, match=words):
        ops.why_not_ours(tensor)


def test_dtypes_we_do_not_support(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch_ops, "_warned", set())
    x, w, b = LAYER.operands(torch.complex64, device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            got = tconv3d.conv_transpose3d(x, w, b, *LAYER.settings)
    assert len([c for c in caught if "complex64" in str(c.message)]) == (device == "cuda")
    torch.testing.assert_close(got, F.conv_transpose3d(x, w, b, *LAYER.settings))
    ours: Backend = "cuda" if device == "cuda" else "emulator"
    with tconv3d.use_backend(ours), pytest.raises(NotImplementedError, match=r"complex64 is not one of float32"):
        tconv3d.conv_transpose3d(x, w, b, *LAYER.settings)


# ---- threads


def test_threads_at_once(ours: str) -> None:
    """Different layers in several threads, each result that of one thread alone."""
    names = ("plain", "gan", "groups", "dilated")
    backend = current_backend()
    calls = {name: (TABLE[name].operands(torch.float32, ours), TABLE[name].settings) for name in names}
    alone = {name: passes(tconv3d.conv_transpose3d, *calls[name]) for name in names}
    executor._tasks.clear()
    failures: list[str] = []
    ready = threading.Barrier(len(names))

    def work(name: str) -> None:
        ready.wait()
        with tconv3d.use_backend(backend):
            for _ in range(5):
                result, grads = passes(tconv3d.conv_transpose3d, *calls[name])
                same = all(map(torch.equal, (result, *grads), (alone[name][0], *alone[name][1])))
                if not same:
                    failures.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


COLD = """
import threading
from tconv3d.runtime import compiler
failures, ready = [], threading.Barrier(4)
constants = (("kThreads", 256), ("kMinBlocks", 1), ("Scalar", "float"), ("Acc", "float"))
def work(lanes):
    ready.wait()
    try:
        compiler.compile("reduce", (*constants, ("kLanes", lanes), ("kMoreLanes", 0), ("kOverlaps", False)), "sm_80")
        compiler.compile("reduce", (*constants, ("kLanes", lanes), ("kMoreLanes", 0), ("kOverlaps", False)), "sm_90a")
    except Exception as error:
        failures.append(error)
threads = [threading.Thread(target=work, args=(lanes,)) for lanes in (1, 32, 1, 32)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
raise SystemExit(str(failures) if failures else 0)
"""


def test_threads_that_compile_first(tmp_path: Path) -> None:
    """The first kernels of a process, in several threads: importing the compiler is part of it."""
    pytest.importorskip("cuda.core")
    environment = {**os.environ, "TCONV3D_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    child = subprocess.run([sys.executable, "-c", COLD], env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr


# ---- CUDA's own


@CUDA
def test_graph_capture_and_replay(ours: str) -> None:
    x, w, b = (operand.requires_grad_() for operand in LAYER.operands(torch.float32, ours))

    def step() -> tuple[Tensor, ...]:
        result = tconv3d.conv_transpose3d(x, w, b, *LAYER.settings)
        return (result, *torch.autograd.grad(result.pow(2).sum(), (x, w, b)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (3, 4):
        with torch.no_grad():
            for operand, fresh in zip((x, w, b), LAYER.operands(torch.float32, ours, seed), strict=True):
                operand.copy_(fresh)
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        torch.testing.assert_close(replayed, list(step()), rtol=0, atol=0)


@CUDA
def test_streams(ours: str) -> None:
    """The kernel runs on the caller's stream: behind what is already on it, and beside other streams."""
    layer = Layer(16, 16, (24, 24, 24), (3, 3, 3))
    x, w, b = layer.operands(torch.float32, ours)
    expected = tconv3d.conv_transpose3d(x, w, b)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # some milliseconds: a kernel on another stream would read zeros
            input = torch.zeros_like(x)
            input.copy_(x)
            results.append(tconv3d.conv_transpose3d(input, w, b))
            assert not stream.query(), "the call waited for the GPU"
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


@CUDA
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_the_tensors_device_is_used() -> None:
    x, w, b = (operand.to("cuda:1") for operand in LAYER.operands(torch.float32, "cpu"))
    with torch.cuda.device(0):
        result = tconv3d.conv_transpose3d(x, w, b, *LAYER.settings)
        assert torch.cuda.current_device() == 0
    assert result.device == x.device
    torch.testing.assert_close(result, F.conv_transpose3d(x, w, b, *LAYER.settings), rtol=1e-3, atol=1e-3)


@CUDA
def test_out_of_memory_leaves_a_usable_process(ours: str) -> None:
    x, w = torch.ones(1, 1, 64, 64, 64, device=ours), torch.ones(1, 8, 2, 2, 2, device=ours)
    expected = tconv3d.conv_transpose3d(x, w, None, 2)
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + (1 << 20)
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            [tconv3d.conv_transpose3d(x, w, None, 2) for _ in range(100)]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(tconv3d.conv_transpose3d(x, w, None, 2), expected)


@CUDA
def test_host_time_of_a_repeated_call(ours: str) -> None:
    """At most that of PyTorch's layer, with some room for a busy machine."""
    x = torch.randn(1, 4, 4, 4, 4, device=ours)
    layers = [kind(4, 4, 3, device=ours) for kind in (tconv3d.ConvTranspose3d, torch.nn.ConvTranspose3d)]

    def microseconds(layer: torch.nn.Module) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            layer(x)
        return (time.perf_counter() - start) / 20 * 1e6

    for layer in layers:
        microseconds(layer)
    with torch.no_grad():
        samples = [[microseconds(layer) for layer in layers] for _ in range(30)]
    mine, theirs = (statistics.median(column) for column in zip(*samples, strict=True))
    assert mine <= 1.3 * theirs, f"{mine:.1f} us, PyTorch's layer {theirs:.1f} us"


@CUDA
@pytest.mark.parametrize("channels, edge", [(1, 1300), (32, 410)])
def test_more_than_2_to_31_elements(channels: int, edge: int, ours: str) -> None:
    """Two taps of small integers, exact in float16: y = x + 2 * x one step earlier along every dimension."""
    assert channels * edge**3 > 2**31
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of GPU memory")
    pattern = torch.arange(channels * edge * edge, device=ours, dtype=torch.int32).mul_(2654435761 % 2**31)
    plane = pattern.view(1, channels, 1, edge, edge).bitwise_right_shift_(16).remainder_(13).to(torch.float16)
    del pattern
    x = plane.repeat(1, 1, edge, 1, 1)
    x += (torch.arange(edge, device=ours).view(1, 1, -1, 1, 1) % 7).to(torch.float16)
    w = torch.zeros(channels, channels, 3, 3, 3, device=ours, dtype=torch.float16)
    index = torch.arange(channels, device=ours)
    w[index, index, 1, 1, 1], w[index, index, 2, 2, 2] = 1, 2
    y = tconv3d.conv_transpose3d(x, w, None, padding=1)
    assert y.shape == x.shape
    for first in range(0, edge, 50):  # a piece at a time: the comparison needs memory too
        last = min(first + 50, edge)
        expected = x[:, :, first:last].clone()
        start = max(first, 1)
        expected[:, :, start - first :, 1:, 1:] += 2 * x[:, :, start - 1 : last - 1, :-1, :-1]
        assert torch.equal(y[:, :, first:last], expected), f"planes {first} to {last}"
    del x, y, w, plane
    gc.collect()
    torch.cuda.empty_cache()


@CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_extra_memory_of_a_forward_pass(dtype: torch.dtype, ours: str) -> None:
    """The result, and no more than one packed copy of the weight and one copy of the input."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]  # the fixture restores it
    for layer in (Layer(512, 512, (8, 8, 8), (3, 3, 3)), Layer(256, 256, (8, 8, 8), (4, 4, 4), (2, 2, 2))):
        x, w, b = layer.operands(dtype, ours)
        tconv3d.conv_transpose3d(x, w, b, *layer.settings)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = tconv3d.conv_transpose3d(x, w, b, *layer.settings)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before
        # PyTorch hands out blocks up to 1 MiB larger than asked.
        allowed = result.nbytes + w.nbytes + x.nbytes + 2 * 2**20
        assert w.nbytes > 4 * 2**20 + x.nbytes  # a second copy would show
        assert extra <= allowed, f"{extra} bytes, allowed {allowed}"
