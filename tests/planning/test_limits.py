"""Every legal call is planned in bounded time and memory, or left to PyTorch's operator with a reason."""

from __future__ import annotations

import contextlib
import cProfile
import random
import time
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from layers import Layer, Triple, passes

import tconv3d
from tconv3d.api.explain import call_of, launches, problems_of
from tconv3d.planning import planner
from tconv3d.planning.gpus import GPUS
from tconv3d.planning.offers import Refusal
from tconv3d.planning.problem import Device
from tconv3d.tools.bench.layers import layer
from tconv3d.tools.bench.problems import problems_of_layer
from tconv3d.tools.bench.wide import wide_layers
from tconv3d.torch_ops import executor, fused_ops, ops, pytorch_ops
from tconv3d.torch_ops.backend import Backend

DEVICES = {"emulator": executor.EMULATED, "H200": GPUS["H200"].device}
CASES = 300
# The promise is 0.2 s for a call; here are the four passes of a training step, on a machine that may be busy.
SECONDS = 2.0
BYTES = 100e6
MOST_ELEMENTS = 2**33


@dataclass(frozen=True)
class Case:
    """A legal call, drawn so that any of its numbers may be very large."""

    layer: Layer
    dtype: torch.dtype
    channels_last: bool
    device: str

    def plan(self) -> None:
        layer = self.layer
        shapes = (
            (layer.batch, layer.in_channels, *layer.size),
            (layer.in_channels, layer.out_channels // layer.groups, *layer.kernel),
            (layer.out_channels,),
        )
        x, w, b = (torch.empty(shape, dtype=self.dtype, device="meta") for shape in shapes)
        if self.channels_last:
            x = x.to(memory_format=torch.channels_last_3d)
        problems = problems_of(x, w, b, layer.settings)
        gradients = tuple(problems[1:])
        try:
            planner.plan(problems[0], DEVICES[self.device])
            planner.gradient_plans(gradients, DEVICES[self.device])
        except planner.Refused:
            with pytest.raises(planner.Refused):
                planner.gradient_plans(gradients, DEVICES[self.device])


def drawn(chance: random.Random) -> Case:
    """Most numbers are small; each may reach the largest that PyTorch takes."""

    def some(bits: int) -> int:
        return int(2 ** chance.uniform(0, chance.uniform(0, bits)))

    def three(bits: int) -> tuple[int, int, int]:
        return chance.choice([(some(bits),) * 3, (some(bits), some(bits), some(bits))])  # type: ignore[return-value]

    while True:
        groups = some(17)
        kernel, stride, dilation, size = three(chance.choice([5, 10, 20])), three(17), three(20), three(10)
        output_padding = tuple(
            chance.choice([0, chance.randrange(max(s, d))]) for s, d in zip(stride, dilation, strict=True)
        )
        padding = tuple(chance.choice([0, 0, some(10)]) for _ in range(3))
        layer = Layer(
            groups * some(7),
            groups * some(7),
            size,
            kernel,
            stride,
            padding,
            output_padding,
            dilation,
            groups,
            some(20),
        )  # type: ignore[arg-type]
        output = [
            (i - 1) * s - 2 * p + d * (k - 1) + o + 1
            for i, s, p, d, k, o in zip(size, stride, padding, dilation, kernel, output_padding, strict=True)
        ]
        elements = (
            layer.batch * layer.in_channels * prod(size),
            layer.batch * layer.out_channels * prod(output),
            layer.in_channels * layer.out_channels // groups * prod(kernel),
        )
        if min(output) > 0 and max(elements) < MOST_ELEMENTS:
            dtype = chance.choice([torch.float32, torch.bfloat16, torch.float64])
            return Case(layer, dtype, chance.random() < 0.3, chance.choice(list(DEVICES)))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No choice of an earlier search is found."""
    monkeypatch.setenv("TCONV3D_CACHE_DIR", str(tmp_path))


EXTREMES = {
    "stride of 128": Layer(2, 3, (1, 1, 1), (2, 2, 2), (128, 128, 128)),
    "stride of 100000": Layer(2, 3, (1, 1, 1), (2, 2, 2), (100000, 100000, 100000)),
    "largest stride": Layer(2, 3, (1, 1, 1), (2, 2, 2), (2**31 - 1,) * 3),  # type: ignore[arg-type]
    "kernel of 65": Layer(2, 2, (1, 1, 1), (65, 65, 65)),
    "kernel of a million": Layer(1, 1, (1, 1, 1), (1, 1, 1_000_000)),
    "many taps and phases": Layer(3, 30, (2, 6, 1), (73, 73, 73), (22, 22, 22), groups=3),
    "many phases, few inputs": Layer(4, 20, (92, 1, 1), (2, 3, 1), (1241, 105, 7), groups=2),
    "largest dilation": Layer(1, 1, (1, 1, 1), (2, 1, 1), (1, 1, 1), (2**30 - 1, 0, 0), (0, 0, 0), (2**31 - 1, 1, 1)),
    "largest output padding": Layer(1, 1, (1, 1, 1), (1, 1, 1), (1, 1, 50000), (0, 0, 0), (0, 0, 49999)),
    "a million groups": Layer(2**20, 2**20, (1, 1, 1), (3, 3, 3), (2, 2, 2), groups=2**20, batch=1),
    "batch of a million": Layer(2, 2, (1, 1, 1), (3, 3, 3), (2, 2, 2), batch=2**20),
}


def check_bounds(case: Case) -> None:
    planner.forget()
    started = time.process_time()
    case.plan()
    seconds = time.process_time() - started
    assert seconds < SECONDS, f"{seconds:.1f} s for {case}"


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_calls_are_planned_in_bounded_time_and_memory(name: str, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(EXTREMES[name], dtype, False, device)
        check_bounds(case)
        planner.forget()
        tracemalloc.start()
        case.plan()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < BYTES, f"{peak / 1e6:.0f} MB"


# ---- the work of planning

# Function calls of one planned call, whether it is a forward pass or all gradients together. Unlike seconds, they are
# the same on every machine: 2 million take about 0.2 s.
MOST_CALLS = 1_200_000
MEAN_CALLS = 262_000  # mean over the layers below
KINDS = tuple(product(("tf32", "bfloat16", "float16", "float32", "float64"), ("contiguous", "channels_last_3d")))
LARGE = {
    "kernel of 31": layer(2, 32, 32, 16, 31, 1, 15),
    "kernel of 13": layer(1, 32, 32, 16, 13, 2, 6),
    "kernel of 9": layer(2, 256, 256, 12, 9, 2, 4),
    "depthwise kernel of 31": layer(1, 64, 64, 16, 31, 1, 15, groups=64),
    "patches": layer(1, 768, 1, 6, 16, 16),
    "stride of 100": layer(1, 16, 16, 3, 3, 100),
    "stride of 100 along w": layer(1, 64, 64, (16, 16, 4), 3, (1, 1, 100)),
    "stride of 8": layer(2, 64, 32, 8, 8, 8),
    "dilation of 50": layer(1, 32, 32, 16, 3, 2, dilation=50),
    "640 groups": layer(2, 640, 640, 16, 7, 2, 3, 1, groups=640),
    "320 groups": layer(2, 640, 640, 16, 3, 2, 1, 1, groups=320),
    "4096 channels": layer(1, 4096, 4096, 4, 3, 2, 1, 1),
    "4095 channels": layer(1, 4095, 4093, 5, 3, 2, 1),
    "few to 4096 channels": layer(1, 3, 4096, 8, 4, 2, 1),
    "depth of 2000": layer(1, 32, 32, (2000, 1, 1), 3, 2, 1),
    "width of 2000": layer(1, 64, 32, (1, 2, 2000), (1, 2, 2), (1, 2, 2)),
    "plane of 2000": layer(1, 8, 8, (1, 2000, 2000), (1, 3, 3), (1, 2, 2), (0, 1, 1)),
    "one voxel": layer(1, 512, 512, 1, 4),
    "batch of 1000": layer(1000, 37, 53, (3, 5, 7), (4, 3, 2), (1, 2, 2)),
    "small volume": layer(2, 192, 96, (3, 6, 6), 3, 2, 1),
    "small volume, kernel of 7": layer(2, 320, 160, 12, (7, 1, 7), (4, 2, 3), (3, 0, 3)),
}


def calls_of(plan: Callable[[], object]) -> int:
    """Returns how many functions a cold plan calls."""
    planner.forget()
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        with contextlib.suppress(planner.Refused):
            plan()
    finally:
        profiler.disable()
    return sum(entry.callcount for entry in profiler.getstats())


def test_planning_work_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large numbers and random layers, types and layouts: the searches of all families together stay short."""
    large = [(name, each, KINDS[3 * i % len(KINDS)]) for i, (name, each) in enumerate(LARGE.items())]
    types, layouts = (tuple(dict.fromkeys(names)) for names in zip(*KINDS, strict=True))
    wide = [(name, each, kind) for name, (each, kind) in wide_layers(12, 5, types, layouts).items()]
    devices = [GPUS["H200"].device, GPUS["A100"].device, GPUS["RTX 4090"].device, executor.EMULATED]
    counts: dict[str, int] = {}
    for number, (name, each, kind) in enumerate(large + wide):
        forward, *gradients = problems_of_layer(each, *kind)
        for gpu in (devices[number % len(devices)],) if number % 2 else (devices[0],):
            monkeypatch.setenv("TCONV3D_CACHE_DIR", str(tmp_path / str(len(counts))))
            words = f"{name}, {', '.join(kind)}, {gpu.name}"
            counts[f"forward pass of {words}"] = calls_of(partial(planner.plan, forward, gpu))
            counts[f"gradients of {words}"] = calls_of(partial(planner.gradient_plans, tuple(gradients), gpu))
    worst = max(counts, key=lambda words: counts[words])
    assert counts[worst] < MOST_CALLS, f"{counts[worst]} calls to plan the {worst}"
    assert sum(counts.values()) < MEAN_CALLS * len(counts), (
        f"{sum(counts.values()) / len(counts):.0f} calls on average"
    )


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.thorough
def test_random_calls_are_planned_in_bounded_time() -> None:
    chance = random.Random(0)
    for _ in range(CASES):
        check_bounds(drawn(chance))


@pytest.mark.parametrize("size", [(2**31, 1, 1), (1, 1, 2**30 + 1)], ids=["input", "output"])
def test_dimensions_beyond_32_bits_are_refused(size: Triple) -> None:
    """The output of the second volume is twice as long as its input."""
    settings = Layer(1, 1, size, (1, 1, 2), (1, 1, 2)).settings
    x, w = (torch.empty(shape, dtype=torch.float16, device="meta") for shape in ((1, 1, *size), (1, 1, 1, 1, 2)))
    for problem in problems_of(x, w, None, settings):
        with pytest.raises(planner.Refused, match="longer than 2147483647"):
            planner.plan(problem, GPUS["H200"].device)


# ---- what a refused call gets

REFUSED = Layer(2, 4, (1, 2, 1), (2, 2, 2), (128, 3, 256), output_padding=(3, 1, 2))


def fused(*arguments: object) -> torch.Tensor:
    x, w, b, *settings = arguments
    return tconv3d.conv_transpose3d_relu_group_norm(x, w, b, 2, None, None, 1e-5, *settings)  # type: ignore[arg-type]


FUNCTIONS = {
    "plain": (tconv3d.conv_transpose3d, F.conv_transpose3d),
    "operator": (torch.ops.tconv3d.conv_transpose3d, F.conv_transpose3d),
    "relu": (tconv3d.conv_transpose3d_relu, lambda *a: F.conv_transpose3d(*a).relu()),
    "norm": (fused, lambda *a: F.group_norm(F.conv_transpose3d(*a).relu(), 2)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_refused_calls_are_pytorchs(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under "auto" a warning, once, and the right result; where the user insists on our kernels, an error."""
    monkeypatch.setattr(pytorch_ops, "_warned", set())
    # On a machine without a GPU "auto" would not ask the planner.
    monkeypatch.setattr(ops, "why_not_ours", lambda tensor, backend=None: None)
    monkeypatch.setattr(fused_ops, "why_not_ours", lambda tensor, backend=None: None)
    operands = REFUSED.operands(torch.float64, device)
    ours, theirs = FUNCTIONS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = passes(ours, operands, REFUSED.settings)
    assert len([c for c in caught if "98304 phases, more than 65536" in str(c.message)]) == 1
    torch.testing.assert_close(got, passes(theirs, operands, REFUSED.settings))
    insisting: Backend = "cuda" if device == "cuda" else "emulator"
    with tconv3d.use_backend(insisting), pytest.raises(NotImplementedError, match="98304 phases"):
        ours(*operands, *REFUSED.settings)


def test_second_derivatives_of_refused_calls(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "why_not_ours", lambda tensor, backend=None: None)
    layer = Layer(1, 1, (1, 2, 1), (1, 2, 1), (70000, 1, 1), batch=1)
    leaves = [operand.requires_grad_() for operand in layer.operands(torch.float64, device)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.autograd.gradgradcheck(lambda *a: tconv3d.conv_transpose3d(*a, *layer.settings), leaves)


@pytest.mark.parametrize("name", ["stride of 100000", "kernel of a million", "largest dilation"])
def test_explain_says_why(name: str, device: str) -> None:
    layer = EXTREMES[name]
    x, w, b = (torch.empty_like(operand, device="meta") for operand in layer.operands(torch.float32, "cpu"))
    found = tconv3d.explain(x, w, b, *layer.settings, gpu="H200")
    assert {each.kernel for each in found.passes} == {"PyTorch's operator"}
    assert len(str(found)) < 4000 and any(word in str(found) for word in ("more than", "longer than", "exceeds"))
    module = tconv3d.ConvTranspose3dReLUGroupNorm(
        layer.in_channels, 2 * layer.out_channels, layer.kernel, 1, layer.stride, layer.padding, layer.output_padding,
        dilation=layer.dilation, device="meta",
    )  # fmt: skip
    assert tconv3d.explain(module, x, gpu="H200").kernel == "PyTorch's operator"
    assert launches(module, x, DEVICES["H200"]) == ()


def test_explain_says_what_runs_here(device: str) -> None:
    operands = REFUSED.operands(torch.float32, device)
    ours: Backend = "cuda" if device == "cuda" else "emulator"
    with tconv3d.use_backend(ours):
        assert tconv3d.explain(*operands, *REFUSED.settings).here.startswith(
            "an error: tconv3d has no kernel: a stride"
        )
    assert tconv3d.explain(*operands, *REFUSED.settings).here.startswith("PyTorch's operator (")


@pytest.mark.parametrize("device", DEVICES)
def test_large_layers_that_are_used_keep_their_kernels(device: str) -> None:
    """A decoder of patches of 16 voxels, and kernels of 15: they are not near a limit."""
    gpu: Device = DEVICES[device]
    for kernel, stride in ((16, 16), (15, 1)):
        layer = tconv3d.ConvTranspose3d(32, 4, kernel, stride=stride, device="meta")
        problems = problems_of(*call_of(layer, (1, 32, 4, 4, 4)))
        answers = planner.answers({problems[0].which: problems[0]}, gpu)
        assert not any(isinstance(each, Refusal) and "more than 4096" in each.why for each in answers)
