"""The module is PyTorch's in everything but the arithmetic, and the arithmetic agrees."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
import torch
from torch import nn

import tconv3d
from tconv3d.torch_ops.backend import Backend

pytestmark = pytest.mark.usefixtures("strict_float32")

# Positional and keyword arguments of the constructor. Every setting differs from its neighbours somewhere, so
# that an argument handed on in the wrong place changes the result.
LAYERS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "plain": ((3, 5, 3), {}),
    "positional": ((4, 6, (2, 3, 1), (2, 1, 3), (0, 1, 0), (1, 0, 2), 2, False, (1, 2, 1)), {}),
    "strided": ((4, 4, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "dilated": ((2, 6, (1, 2, 3)), {"stride": (1, 2, 1), "dilation": (2, 1, 3), "padding": (0, 1, 2)}),
    "grouped": ((6, 9, 2), {"groups": 3, "stride": 2}),
    "depthwise": ((4, 4, (3, 1, 2)), {"groups": 4, "bias": False}),
    "double": ((2, 3, 2), {"dtype": torch.float64}),
}


def pair(name: str) -> tuple[nn.ConvTranspose3d, tconv3d.ConvTranspose3d]:
    """PyTorch's layer and ours, built from the same random stream."""
    arguments, keywords = LAYERS[name]
    torch.manual_seed(7)
    theirs = nn.ConvTranspose3d(*arguments, **keywords)
    torch.manual_seed(7)
    return theirs, tconv3d.ConvTranspose3d(*arguments, **keywords)


@pytest.mark.parametrize("name", LAYERS)
def test_initialisation_draws_the_same_numbers(name: str) -> None:
    theirs, ours = pair(name)
    after_ours = torch.rand(4)
    torch.manual_seed(7)
    nn.ConvTranspose3d(*LAYERS[name][0], **LAYERS[name][1])
    assert torch.equal(torch.rand(4), after_ours), "the random stream stands elsewhere after construction"
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for key, value in theirs.state_dict().items():
        assert torch.equal(value, ours.state_dict()[key])
        assert value.dtype == ours.state_dict()[key].dtype


def test_constructor_and_forward_have_pytorchs_signature() -> None:
    assert inspect.signature(tconv3d.ConvTranspose3d) == inspect.signature(nn.ConvTranspose3d)
    theirs = inspect.signature(nn.ConvTranspose3d.forward).parameters
    ours = inspect.signature(tconv3d.ConvTranspose3d.forward).parameters
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [
        (p.name, p.default, p.kind) for p in theirs.values()
    ]


@pytest.mark.parametrize("name", LAYERS)
def test_it_prints_as_pytorchs(name: str) -> None:
    theirs, ours = pair(name)
    assert ours.extra_repr() == theirs.extra_repr()
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize("backend", ["torch", "emulator"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
def test_result_and_gradients(name: str, backend: Backend, batched: bool) -> None:
    theirs, ours = pair(name)
    theirs, dtype = theirs.double(), ours.weight.dtype
    shape = (2, ours.in_channels, 3, 4, 5) if batched else (ours.in_channels, 3, 4, 5)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    reference_x = x.detach().double().requires_grad_()
    reference = theirs(reference_x)
    grad = torch.randn_like(reference)
    reference.backward(grad)
    with tconv3d.use_backend(backend):
        y = ours(x)
        y.backward(grad.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), reference, rtol=1e-5, atol=1e-5)
    for mine, other in zip([x, *ours.parameters()], [reference_x, *theirs.parameters()], strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("extra", [(0, 0, 0), (1, 0, 2), (0, 1, 1)])
@pytest.mark.parametrize("with_channels", [False, True], ids=["DHW", "NCDHW"])
def test_output_size_chooses_among_what_the_stride_allows(extra: tuple[int, int, int], with_channels: bool) -> None:
    layer = tconv3d.ConvTranspose3d(2, 3, 3, stride=(2, 2, 3), padding=1)
    x = torch.randn(1, 2, 4, 3, 2)
    smallest = nn.functional.conv_transpose3d(x, layer.weight, None, (2, 2, 3), 1).shape[2:]
    wanted = [size + more for size, more in zip(smallest, extra, strict=True)]
    expected = nn.functional.conv_transpose3d(x, layer.weight, layer.bias, (2, 2, 3), 1, extra)
    y = layer(x, output_size=[1, 3, *wanted] if with_channels else wanted)
    assert list(y.shape[2:]) == wanted
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("output_size", [[100, 5, 4], [7, 5], [6, 5, 4]])
def test_an_impossible_output_size_raises_as_pytorch_does(output_size: list[int]) -> None:
    theirs, ours = (
        nn.ConvTranspose3d(2, 3, 3, stride=2, padding=1),
        tconv3d.ConvTranspose3d(2, 3, 3, stride=2, padding=1),
    )
    x = torch.randn(1, 2, 4, 3, 2)
    with pytest.raises(ValueError) as expected:
        theirs(x, output_size=output_size)
    with pytest.raises(ValueError) as got:
        ours(x, output_size=output_size)
    assert str(got.value) == str(expected.value)


def test_other_padding_modes_raise_as_in_pytorch() -> None:
    with pytest.raises(ValueError) as expected:
        nn.ConvTranspose3d(2, 3, 3, padding_mode="circular")
    with pytest.raises(ValueError) as got:
        tconv3d.ConvTranspose3d(2, 3, 3, padding_mode="circular")
    assert str(got.value) == str(expected.value)
    theirs, ours = nn.ConvTranspose3d(2, 3, 3), tconv3d.ConvTranspose3d(2, 3, 3)
    theirs.padding_mode = ours.padding_mode = "reflect"
    x = torch.randn(1, 2, 2, 2, 2)
    with pytest.raises(ValueError) as expected:
        theirs(x)
    with pytest.raises(ValueError) as got:
        ours(x)
    assert str(got.value) == str(expected.value)


def test_state_dict_loads_both_ways() -> None:
    theirs, ours = nn.ConvTranspose3d(4, 6, 3, groups=2), tconv3d.ConvTranspose3d(4, 6, 3, groups=2)
    x = torch.randn(1, 4, 2, 3, 2)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))
    other = tconv3d.ConvTranspose3d(4, 6, 3, groups=2)
    theirs.load_state_dict(other.state_dict())
    torch.testing.assert_close(theirs(x), other(x))


def test_copies_and_saved_modules_are_the_same_layer() -> None:
    layer = tconv3d.ConvTranspose3d(3, 4, 2, stride=2)
    stored = io.BytesIO()
    torch.save(layer, stored)
    stored.seek(0)
    x = torch.randn(1, 3, 2, 2, 2)
    for other in (copy.deepcopy(layer), torch.load(stored, weights_only=False)):
        assert type(other) is tconv3d.ConvTranspose3d
        assert other.weight is not layer.weight
        assert torch.equal(other(x), layer(x))


def test_a_subclass_and_a_parametrized_layer_see_their_own_weight() -> None:
    class Doubled(tconv3d.ConvTranspose3d):
        def forward(self, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
            return 2 * super().forward(input, output_size)

    plain = tconv3d.ConvTranspose3d(2, 3, 2, bias=False)
    doubled = Doubled(2, 3, 2, bias=False)
    doubled.load_state_dict(plain.state_dict())
    x = torch.randn(1, 2, 2, 2, 2)
    torch.testing.assert_close(doubled(x), 2 * plain(x))
    normed = nn.utils.parametrizations.weight_norm(doubled, dim=0)
    normed.parametrizations.weight.original0.data.mul_(3)
    torch.testing.assert_close(normed(x), 6 * plain(x))
