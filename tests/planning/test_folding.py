"""Up-convolutions with large kernels as convolutions with kernel 1: passes against float64, and what is planned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import pytest
import torch
import torch.nn.functional as F
from layers import Layer, check, guarded, to_tf32
from preferred import forgetting, preferring
from problems import A100, H200
from registers import report_of
from torch import Tensor

import tconv3d
from tconv3d import emulator
from tconv3d.api.explain import explain
from tconv3d.planning import folding, planner
from tconv3d.planning.folding import Folded
from tconv3d.planning.geometry import Geometry, Triple
from tconv3d.planning.problem import Device, Pass, Problem, channels_last_strides, contiguous_strides
from tconv3d.torch_ops import executor

needs_emulator = pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
DEVICES = {"H200": H200, "A100": A100}


def up(in_channels: int, out_channels: int, size: Triple, kernel: Triple, **more: int) -> Layer:
    return Layer(in_channels, out_channels, size, kernel, kernel, **more)  # type: ignore[arg-type]


LAYERS = {
    "one channel": up(32, 1, (2, 2, 3), (8, 8, 8)),
    "video": up(16, 3, (2, 1, 2), (2, 16, 16)),
    "odd": up(24, 2, (1, 2, 2), (5, 5, 5), batch=1, bias=False),
    "groups": up(32, 2, (2, 2, 2), (4, 4, 8), groups=2),
}
LAST = torch.channels_last_3d
# GPU, layer, type, and the memory formats of input and weight.
RUNS = [
    ("H200", "one channel", torch.bfloat16, torch.contiguous_format, torch.contiguous_format),
    ("H200", "one channel", torch.float32, LAST, torch.contiguous_format),
    ("H200", "video", torch.float16, LAST, LAST),
    ("H200", "odd", torch.float32, torch.contiguous_format, torch.contiguous_format),
    ("A100", "one channel", torch.float16, torch.contiguous_format, torch.contiguous_format),
    ("A100", "video", torch.float32, LAST, LAST),
    ("A100", "groups", torch.bfloat16, torch.contiguous_format, torch.contiguous_format),
    ("A100", "odd", torch.float64, LAST, torch.contiguous_format),
]


@pytest.fixture
def folding_first(ours: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    with preferring(folding.KERNEL):
        yield monkeypatch


def planned_for(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    monkeypatch.setattr(executor, "device_of", lambda _: replace(device, multiprocessors=6))


def operands(layer: Layer, dtype: torch.dtype, x: torch.memory_format, w: torch.memory_format) -> list[Tensor]:
    found = layer.operands(dtype, "cpu")
    found = [to_tf32(each) for each in found] if dtype == torch.float32 else found
    return [found[0].contiguous(memory_format=x), found[1].contiguous(memory_format=w), *found[2:]]


@needs_emulator
@pytest.mark.parametrize(("gpu", "name", "dtype", "x", "w"), RUNS)
def test_every_pass_against_float64(
    gpu: str,
    name: str,
    dtype: torch.dtype,
    x: torch.memory_format,
    w: torch.memory_format,
    folding_first: pytest.MonkeyPatch,
) -> None:
    planned_for(folding_first, DEVICES[gpu])
    plans: list[str] = []
    prepare = emulator.prepare
    folding_first.setattr(emulator, "prepare", lambda launch: plans.append(launch.kernel) or prepare(launch))
    given = operands(LAYERS[name], dtype, x, w)
    check(LAYERS[name], dtype, "cpu", given, tf32=dtype == torch.float32)
    # The bias, y and dy are folded, and dy once more if dx and x have different memory layouts.
    assert plans.count("fold") - (len(given) == 3) in (2, 3)
    with guarded(), torch.no_grad():
        tconv3d.conv_transpose3d(*given[:2], given[2] if len(given) == 3 else None, *LAYERS[name].settings)


@needs_emulator
def test_kept_weights_and_relu(folding_first: pytest.MonkeyPatch) -> None:
    """Calls without gradients skip the launch that packs the weight, and the ReLU is in the products' kernel."""
    planned_for(folding_first, H200)
    layer = LAYERS["one channel"]
    x, w, bias = operands(layer, torch.bfloat16, torch.contiguous_format, torch.contiguous_format)
    module = tconv3d.ConvTranspose3dReLU(32, 1, 8, stride=8, dtype=torch.bfloat16).requires_grad_(False)
    module.weight.copy_(w)
    assert module.bias is not None
    module.bias.copy_(bias)
    exact = F.conv_transpose3d(x.double(), w.double(), bias.double(), *layer.settings).relu()
    with torch.no_grad():
        results = [module(x) for _ in range(3)]
    for result in results:
        assert torch.equal(result, results[0])
        assert float((result - exact).norm() / exact.norm()) < 4e-3


@pytest.mark.parametrize("gpu", DEVICES)
@pytest.mark.parametrize(
    ("channels", "out", "kernel", "size"),
    [(768, 1, (16, 16, 16), (6, 6, 6)), (512, 3, (2, 16, 16), (4, 14, 14)), (1024, 1, (8, 8, 8), (8, 8, 8))],
)
def test_masked_autoencoders_get_tensor_cores(
    gpu: str, channels: int, out: int, kernel: Triple, size: Triple
) -> None:
    """The layers that this is for, forward and backward."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    for dtype, layout in ((torch.float32, torch.contiguous_format), (torch.bfloat16, LAST)):
        layer = tconv3d.ConvTranspose3d(channels, out, kernel, kernel, device="meta", dtype=dtype)
        x = torch.empty((8, channels, *size), device="meta", dtype=dtype, memory_format=layout)
        found = {each.name: each.kernel for each in explain(layer, x, gpu=gpu).passes}
        for name in ("forward", "input_grad", "weight_grad"):
            assert "fold" in found[name] and "direct" not in found[name], (dtype, layout, found)


def plan_of(layer: Layer, device: Device, which: Pass = Pass.FORWARD, **changes: object) -> str:
    geometry = Geometry.make(layer.in_channels, layer.out_channels, layer.kernel, layer.stride, layer.padding)
    x = contiguous_strides((layer.batch, layer.in_channels, *layer.size))
    y = contiguous_strides((layer.batch, layer.out_channels, *geometry.output_size(layer.size)))
    w = contiguous_strides((layer.in_channels, layer.out_channels, *layer.kernel))
    problem = Problem(which, geometry, layer.batch, layer.size, "bfloat16", x, w, y)
    with forgetting():
        found = folding.answers({which: replace(problem, **changes)}, device, planner.taken, planner._in_turn)  # type: ignore[arg-type]
    return "nothing" if not found else getattr(found[0], "why", "an offer")


@pytest.mark.parametrize(
    ("layer", "changes", "answer"),
    [
        (up(32, 1, (2, 2, 2), (8, 8, 8)), {}, "an offer"),
        (up(32, 1, (2, 2, 2), (4, 4, 4)), {}, "nothing"),  # other families are for these
        (Layer(32, 1, (2, 2, 2), (8, 8, 8), (8, 8, 4)), {}, "nothing"),
        (Layer(32, 1, (2, 2, 2), (8, 8, 8), (8, 8, 8), (0, 0, 1)), {}, "nothing"),
        (up(32, 1, (2, 2, 2), (8, 8, 8), batch=0), {}, "nothing"),
        (up(32, 8, (2, 2, 2), (32, 32, 16)), {}, "131072 channels of the folded layer are more than 65536"),
        (up(32, 64, (32, 32, 32), (8, 8, 8)), {}, "more than 256 MB"),
        (
            up(32, 2, (2, 2, 2), (8, 8, 8)),
            {"weight": (2048, 1024, 128, 16, 2)},
            "neither contiguous nor channels-last",
        ),
    ],
)
def test_which_layers_are_folded(layer: Layer, changes: dict[str, object], answer: str) -> None:
    assert answer in plan_of(layer, H200, **changes)
    if answer == "an offer":
        assert plan_of(layer, H200.thrifty) == "memory is short"


@needs_emulator
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("taps_first", [False, True])
@pytest.mark.parametrize(
    ("dtype", "kernel"), [(torch.int16, (2, 3, 8)), (torch.int32, (1, 2, 6)), (torch.int64, (3, 1, 5))]
)
def test_the_kernel_permutes_as_pytorch_does(
    dtype: torch.dtype, kernel: Triple, taps_first: bool, rows: bool, back: bool
) -> None:
    n, c, (d, h, w), (kd, kh, kw) = 2, 3, (2, 3, 4), kernel
    layer = Folded(Geometry.make(5, c, kernel, kernel), n, (d, h, w), dtype.itemsize, taps_first, rows)
    whole = torch.randint(-1000, 1000, (n, c, d * kd, h * kh, w * kw)).to(dtype)
    whole = whole.contiguous(memory_format=LAST) if rows else whole
    apart = whole.reshape(n, c, d, kd, h, kh, w, kw)
    order = (0, 3, 5, 7, 1, 2, 4, 6) if taps_first else (0, 1, 3, 5, 7, 2, 4, 6)
    expected = apart.permute(*order).reshape(n, c * prod(kernel), d, h, w)
    expected = expected.contiguous(memory_format=LAST if rows else torch.contiguous_format)
    result = torch.zeros_like(whole if back else expected)
    launch = layer.launch("from", "to", whole.stride(), True, back)
    emulator.prepare(launch)(((expected if back else whole).data_ptr(), result.data_ptr()))
    assert torch.equal(result, whole if back else expected)
    assert layer.strides == expected.stride()


@pytest.mark.parametrize(("arch", "strides"), [("sm_80", contiguous_strides), ("sm_90a", channels_last_strides)])
def test_the_kernel_compiles_without_spills(arch: str, strides: object) -> None:
    for item_bytes in (2, 4, 8):
        layer = Folded(Geometry.make(8, 1, (16,) * 3, (16,) * 3), 1, (6, 6, 6), item_bytes, False, arch == "sm_80")
        for back in (False, True):
            launch = layer.launch("a", "b", strides((1, 1, 96, 96, 96)), True, back)  # type: ignore[operator]
            report = report_of(launch, arch)
            assert report.spill_loads == report.spill_stores == report.stack_bytes == 0 < report.registers < 64
