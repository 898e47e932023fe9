"""Forward and all gradients of our kernels against float64: a table, named traps, generated geometries."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layers import TABLE, TRAPS, Layer, check, passes, poisoned

import tconv3d

HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("name", [*TABLE, *TRAPS])
def test_against_float64(name: str, ours: str) -> None:
    check((TABLE | TRAPS)[name], torch.float32, ours)


@pytest.mark.parametrize("dtype", [torch.float64, *HALVES], ids=str)
@pytest.mark.parametrize("name", ["plain", "groups", "depthwise", "asymmetric", "large stride", "empty phases"])
def test_dtypes(name: str, dtype: torch.dtype, ours: str) -> None:
    check((TABLE | TRAPS)[name], dtype, ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "gan",
        "unet up-convolution",
        "groups",
        "depthwise",
        "large stride",
        "many output channels",
        "one channel",
    ],
)
def test_channels_last(name: str, dtype: torch.dtype, ours: str) -> None:
    layer = TABLE[name]
    operands = layer.operands(dtype, ours)
    operands[0] = operands[0].to(memory_format=torch.channels_last_3d)
    check(layer, dtype, ours, operands)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    def three(values: st.SearchStrategy[int]) -> tuple[int, int, int]:
        return draw(values), draw(values), draw(values)

    kernel, stride = three(st.integers(1, 5)), three(st.integers(1, 4))
    dilation, padding = three(st.integers(1, 3)), three(st.integers(0, 3))
    output_padding = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    size = three(st.integers(1, 5))
    layer = Layer(
        groups * draw(st.integers(1, 5)),
        groups * draw(st.integers(1, 9)),
        size,
        kernel,
        stride,
        padding,
        output_padding,  # type: ignore[arg-type]
        dilation,
        groups,
        draw(st.integers(1, 2)),
        draw(st.booleans()),
    )
    pieces = zip(size, kernel, stride, padding, output_padding, dilation, strict=True)
    assume(all((i - 1) * s - 2 * p + d * (k - 1) + o + 1 > 0 for i, k, s, p, o, d in pieces))
    return layer


@pytest.mark.slow
@settings(max_examples=20)
@given(layers(), st.sampled_from([torch.float32, torch.float32, torch.float16]), st.booleans())
def test_generated(layer: Layer, dtype: torch.dtype, channels_last: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    operands = layer.operands(dtype, device)
    if channels_last:
        operands[0] = operands[0].to(memory_format=torch.channels_last_3d)
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    try:
        with tconv3d.use_backend("cuda" if device == "cuda" else "emulator"):
            check(layer, dtype, device, operands)
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


# ---- tensors as callers have them


def test_sliced_and_transposed_inputs(ours: str) -> None:
    layer = TABLE["monai"]
    x, w, b = layer.operands(torch.float32, ours)
    big = torch.zeros(2, 9, 5, 7, 11, device=ours).fill_(float("nan"))
    big[:, 2:7, 1:3, 2:5, 1:9:2] = x
    check(layer, torch.float32, ours, [big[:, 2:7, 1:3, 2:5, 1:9:2], w, b])
    turned = x.permute(4, 2, 0, 3, 1).contiguous().permute(2, 4, 1, 3, 0)
    assert turned.shape == x.shape and not turned.is_contiguous()
    check(layer, torch.float32, ours, [turned, w.transpose(3, 4).contiguous().transpose(3, 4), b])


def test_expanded_grad_output(ours: str) -> None:
    """`sum().backward()` hands down a gradient whose strides are all zero."""
    layer = TABLE["groups"]
    operands = layer.operands(torch.float32, ours)
    exact = [o.double() for o in operands]
    reference, _ = passes(F.conv_transpose3d, exact, layer.settings)
    one = torch.ones((), device=ours).expand(reference.shape)
    _, got = passes(tconv3d.conv_transpose3d, operands, layer.settings, one)
    _, expected = passes(F.conv_transpose3d, exact, layer.settings, one.double())
    for ours_, exact_ in zip(got, expected, strict=True):
        torch.testing.assert_close(ours_.double(), exact_, rtol=1e-4, atol=1e-4)


def test_strided_bias(ours: str) -> None:
    layer = TABLE["plain"]
    x, w, b = layer.operands(torch.float32, ours)
    wide = torch.stack([b, torch.full_like(b, float("nan"))], dim=1)
    check(layer, torch.float32, ours, [x, w, wide[:, 0]])


def test_unbatched(ours: str) -> None:
    layer = TABLE["gan"]
    x, w, b = layer.operands(torch.float32, ours)
    single = tconv3d.conv_transpose3d(x[0], w, b, *layer.settings)
    assert torch.equal(single, tconv3d.conv_transpose3d(x[:1], w, b, *layer.settings)[0])


def test_batch_zero(ours: str) -> None:
    layer = TABLE["gan"]
    x, w, b = layer.operands(torch.float32, ours)
    with poisoned():
        result, (dx, dw, db) = passes(tconv3d.conv_transpose3d, [x[:0], w, b], layer.settings)
    assert result.shape == (0, 3, 6, 6, 6) and dx.shape == (0, 6, 3, 3, 3)
    assert dw.shape == w.shape and not dw.any() and not db.any()


@pytest.mark.parametrize("channels", [1, 4])
def test_memory_format_is_the_one_pytorch_chooses(channels: int, ours: str) -> None:
    layer = Layer(4, channels, (3, 3, 3), (3, 3, 3))
    for x_format in (torch.contiguous_format, torch.channels_last_3d):
        for w_format in (torch.contiguous_format, torch.channels_last_3d):
            x, w, b = layer.operands(torch.float32, ours)
            x, w = x.to(memory_format=x_format), w.to(memory_format=w_format)
            theirs = F.conv_transpose3d(x, w, b)
            assert tconv3d.conv_transpose3d(x, w, b).stride() == theirs.stride(), (x_format, w_format)


def test_offsets_beyond_32_bits(ours: str) -> None:
    """Two samples more than 2^31 elements apart: memory that is reserved and, but for the samples, never touched."""
    layer = Layer(2, 3, (2, 3, 4), (3, 3, 3), (2, 2, 2), (1, 1, 1))
    x, w, b = layer.operands(torch.float16, ours)
    apart = 2**31 + 64
    reserved = torch.empty(apart + x[0].numel(), dtype=torch.float16, device=ours)
    far = reserved.as_strided(x.shape, (apart, *x.stride()[1:]))
    far.copy_(x)
    check(layer, torch.float16, ours, [far, w, b])


@pytest.mark.parametrize("name", ["groups", "depthwise", "plain", "gan"])
def test_bitwise_reproducible(name: str, ours: str) -> None:
    layer = Layer(8, 12, (6, 7, 9), (3, 3, 3), (2, 2, 2), groups=4) if name == "groups" else TABLE[name]
    operands = layer.operands(torch.float32, ours)
    first = passes(tconv3d.conv_transpose3d, operands, layer.settings)
    for _ in range(3):
        again = passes(tconv3d.conv_transpose3d, operands, layer.settings)
        assert all(torch.equal(a, b) for a, b in zip((again[0], *again[1]), (first[0], *first[1]), strict=True))


def test_a_new_volume_or_batch_compiles_nothing(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tconv3d.runtime import compiler

    layer = TABLE["gan"]
    x, w, b = layer.operands(torch.float32, ours)
    tconv3d.conv_transpose3d(x, w, b, *layer.settings)
    units: list[str] = []
    original = compiler.translation_unit

    def counting(kernel: str, constants: object) -> str:
        units.append(original(kernel, constants))  # type: ignore[arg-type]
        return units[-1]

    monkeypatch.setattr(compiler, "translation_unit", counting)
    tconv3d.conv_transpose3d(torch.randn(3, 6, 4, 5, 7, device=ours), w, b, *layer.settings)
    first = set(units)
    tconv3d.conv_transpose3d(torch.randn(1, 6, 5, 3, 6, device=ours), w, b, *layer.settings)
    assert set(units) == first
