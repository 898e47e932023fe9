"""Bad arguments: PyTorch's exception type, a message with what was expected and what came, and nothing launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tconv3d
from tconv3d.planning import planner
from tconv3d.torch_ops import executor

Operands = tuple[Any, Any, Any]


def good(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """input [2, 4, 3, 3, 3], weight [4, 6, 3, 3, 3], bias [6]."""
    shapes = ((2, 4, 3, 3, 3), (4, 6, 3, 3, 3), (6,))
    x, w, b = (torch.arange(torch.Size(s).numel(), dtype=torch.float32, device=device).view(s) for s in shapes)
    return x, w, b


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("a bad call was planned or launched")

    monkeypatch.setattr(planner, "plan", refuse)
    monkeypatch.setattr(executor, "_prepare_steps", refuse)
    monkeypatch.setattr(executor.Task, "run", refuse)
    monkeypatch.setattr(torch, "conv_transpose3d", refuse)  # F.conv_transpose3d keeps the original


def failure(function: Callable[..., Tensor], operands: Operands, settings: dict[str, Any]) -> Exception | None:
    try:
        function(*operands, **settings)
    except Exception as error:
        return error
    return None


Change = Callable[[Tensor, Tensor, Tensor], Operands]


def expect_as_pytorch(change: Change, settings: dict[str, Any], words: tuple[str, ...], device: str) -> None:
    """Our exception has the type of the one that PyTorch's CPU operator raises, whichever device is ours."""
    theirs = failure(F.conv_transpose3d, change(*good("cpu")), settings)
    assert theirs is not None, "PyTorch takes this call"
    ours = failure(tconv3d.conv_transpose3d, change(*good(device)), settings)
    assert type(ours) is type(theirs), f"expected {theirs!r}, got {ours!r}"
    for word in words:
        assert word in str(ours), f"{word!r} is not in: {ours}"


def unchanged(x: Tensor, w: Tensor, b: Tensor) -> Operands:
    return x, w, b


# ---- operands


def changed(change: Change, **settings: Any) -> tuple[Change, dict[str, Any]]:
    return change, settings


# The change to good operands, the settings, and words of the message: the expected, and what came.
OPERANDS: dict[str, tuple[tuple[Change, dict[str, Any]], tuple[str, ...]]] = {
    "input of 2 dimensions": (changed(lambda x, w, b: (x[0, 0, 0], w, b)), ("4D", "5D", "[3, 3]")),
    "input of 3 dimensions": (changed(lambda x, w, b: (x[0, 0], w, b)), ("4D", "5D", "[3, 3, 3]")),
    "input of 6 dimensions": (changed(lambda x, w, b: (x[None], w, b)), ("4D", "5D", "[1, 2, 4, 3, 3, 3]")),
    "weight of 3 dimensions": (changed(lambda x, w, b: (x, w[0, 0], b)), ("5D", "[3, 3, 3]")),
    "weight of 4 dimensions": (changed(lambda x, w, b: (x, w[0], b)), ("5D", "[6, 3, 3, 3]")),
    "weight of 4 dimensions, input unbatched": (changed(lambda x, w, b: (x[0], w[0], b)), ("5D", "[6, 3, 3, 3]")),
    "weight of 6 dimensions": (changed(lambda x, w, b: (x, w[None], b)), ("5D", "[1, 4, 6, 3, 3, 3]")),
    "channels": (changed(lambda x, w, b: (x[:, :3], w, b)), ("4 channels", "3 channels")),
    "channels, unbatched": (changed(lambda x, w, b: (x[0, :3], w, b)), ("4 channels", "3 channels")),
    "weight in the order of a convolution": (
        changed(lambda x, w, b: (x, w.transpose(0, 1), b)),
        ("6 channels", "4 channels"),
    ),
    "groups do not divide the channels": (
        changed(lambda x, w, b: (x, w, b.repeat(3)), groups=3),
        ("groups=3", "[4, 6, 3, 3, 3]"),
    ),
    "more groups than channels": (
        changed(lambda x, w, b: (x, w, b.repeat(8)), groups=8),
        ("groups=8", "[4, 6, 3, 3, 3]"),
    ),
    "no channels in the input": (changed(lambda x, w, b: (x[:, :0], w, b)), ("4 channels", "0 channels")),
    "no channels at all": (changed(lambda x, w, b: (x[:, :0], w[:0], b)), ("[0, 6, 3, 3, 3]",)),
    "no output channels": (changed(lambda x, w, b: (x, w[:, :0], b[:0])), ("[4, 0, 3, 3, 3]",)),
    "empty kernel": (changed(lambda x, w, b: (x, w[..., :0], b)), ("[4, 6, 3, 3, 0]",)),
    "empty width": (changed(lambda x, w, b: (x[..., :0], w, b)), ("no empty", "[3, 3, 0]")),
    "empty depth": (changed(lambda x, w, b: (x[:, :, :0], w, b)), ("no empty", "[0, 3, 3]")),
    "weight of another dtype": (changed(lambda x, w, b: (x, w.double(), b)), ("float32", "float64")),
    "input of another dtype": (changed(lambda x, w, b: (x.half(), w, b)), ("float16", "float32")),
    "bias of another dtype": (changed(lambda x, w, b: (x, w, b.double())), ("bias", "float32", "float64")),
    "bias too short": (changed(lambda x, w, b: (x, w, b[:5])), ("6 elements", "[5]")),
    "bias too long": (changed(lambda x, w, b: (x, w, b.repeat(2))), ("6 elements", "[12]")),
    "bias of one element": (changed(lambda x, w, b: (x, w, b[:1])), ("6 elements", "[1]")),
    "bias of two dimensions": (changed(lambda x, w, b: (x, w, b[None])), ("1-dimensional", "[1, 6]")),
    "bias without dimensions": (changed(lambda x, w, b: (x, w, b[0])), ("1-dimensional", "[]")),
    "bias of one group": (changed(lambda x, w, b: (x, w, b), groups=2), ("12 elements", "[6]")),
    "no input": (changed(lambda x, w, b: (None, w, b)), ("input", "Tensor", "NoneType")),
    "input is a list": (changed(lambda x, w, b: (x.tolist(), w, b)), ("input", "Tensor", "list")),
    "input is an array": (changed(lambda x, w, b: (np.zeros((2, 4, 3, 3, 3)), w, b)), ("input", "Tensor", "ndarray")),
    "no weight": (changed(lambda x, w, b: (x, None, b)), ("weight", "Tensor", "NoneType")),
    "weight is a text": (changed(lambda x, w, b: (x, "weight", b)), ("weight", "Tensor", "str")),
    "bias is a list": (changed(lambda x, w, b: (x, w, b.tolist())), ("bias", "Tensor", "list")),
    "bias is a bool": (changed(lambda x, w, b: (x, w, False)), ("bias", "Tensor", "bool")),
}


@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.usefixtures("nothing_runs")
def test_operands(name: str, ours: str) -> None:
    (change, settings), words = OPERANDS[name]
    expect_as_pytorch(change, settings, words, ours)


# ---- settings

SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "padding below zero": ({"padding": -1}, ("negative padding", "[-1, -1, -1]")),
    "padding below zero along w": ({"padding": (0, 0, -1)}, ("negative padding", "[0, 0, -1]")),
    "output_padding below zero": ({"output_padding": -1, "stride": 2}, ("negative output_padding", "[-1, -1, -1]")),
    "output_padding of the stride": ({"output_padding": 1}, ("smaller", "output_padding=[1, 1, 1]", "[1, 1, 1]")),
    "output_padding of a stride of two": ({"output_padding": 2, "stride": 2}, ("smaller", "[2, 2, 2]")),
    "output_padding of the stride, along w": (
        {"output_padding": (0, 0, 2), "stride": 2, "dilation": (3, 3, 1)},
        ("smaller", "[0, 0, 2]", "[2, 2, 2]", "[3, 3, 1]"),
    ),
    "stride of zero": ({"stride": 0}, ("stride", "[0, 0, 0]")),
    "stride of zero along h": ({"stride": (1, 0, 1)}, ("stride", "[1, 0, 1]")),
    "stride below zero": ({"stride": -2}, ("stride", "[-2, -2, -2]")),
    "dilation of zero": ({"dilation": 0}, ("dilation", "[0, 0, 0]")),
    "dilation below zero along h": ({"dilation": (1, -1, 1)}, ("dilation", "[1, -1, 1]")),
    "no groups": ({"groups": 0}, ("groups", "groups=0")),
    "groups below zero": ({"groups": -1}, ("groups", "groups=-1")),
    "groups is a float": ({"groups": 1.0}, ("groups", "integer", "1.0")),
    "groups is a bool": ({"groups": True}, ("groups", "integer", "True")),
    "groups is a text": ({"groups": "1"}, ("groups", "integer", "'1'")),
    "groups is a tuple": ({"groups": (1,)}, ("groups", "integer", "(1,)")),
    "groups is none": ({"groups": None}, ("groups", "integer", "None")),
    "nothing is left": ({"padding": 3}, ("too small", "[3, 3, 3]", "[-1, -1, -1]")),
    "nothing is left along w": ({"padding": (0, 0, 3)}, ("too small", "[5, 5, -1]")),
    "stride beyond 32 bits": ({"stride": 2**40}, ("stride", "2^31", str(2**40))),
    "dilation beyond 32 bits": ({"dilation": (1, 1, 2**40)}, ("dilation", "2^31", str(2**40))),
    "padding beyond 32 bits": ({"padding": 2**40}, ("padding", "2^31", str(2**40))),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.usefixtures("nothing_runs")
def test_settings(name: str, ours: str) -> None:
    settings, words = SETTINGS[name]
    expect_as_pytorch(unchanged, settings, words, ours)


NOT_THREE_INTEGERS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    ((1, 1), ("3", "[1, 1]")),
    ([1, 1, 1, 1], ("3", "[1, 1, 1, 1]")),
    ((), ("3", "[]")),
    (1.0, ("integer", "1.0")),
    ((1, 1, 1.5), ("integer", "1.5")),
    ((None, 1, 1), ("integer", "None")),
    (None, ("integer", "None")),
    ("same", ("integer", "'same'")),
    (("1", "1", "1"), ("integer", "'1'")),
    (True, ("integer", "True")),
    ((True, True, True), ("integer", "True")),
    ({1, 2, 3}, ("integer", "{1, 2, 3}")),
    ([[1, 1, 1]], ("integer", "[1, 1, 1]")),
    (range(1, 4), ("integer", "range(1, 4)")),
    (np.array([1, 1, 1]), ("integer", "array")),
    (torch.tensor([1, 1, 1]), ("integer", "tensor([1, 1, 1])")),
    ((torch.tensor(1.0), 1, 1), ("integer", "tensor(1.)")),
)


@pytest.mark.parametrize("value, words", NOT_THREE_INTEGERS, ids=[repr(v) for v, _ in NOT_THREE_INTEGERS])
@pytest.mark.parametrize("setting", ["stride", "padding", "output_padding", "dilation"])
@pytest.mark.usefixtures("nothing_runs")
def test_not_three_integers(setting: str, value: object, words: tuple[str, ...], ours: str) -> None:
    expect_as_pytorch(unchanged, {setting: value}, (setting, *words), ours)


@pytest.mark.parametrize(
    "value", [2, (2,), [2, 2, 2], torch.Size((2, 2, 2)), np.int64(2), (np.int32(2), 2, 2), torch.tensor(2)], ids=repr
)
def test_all_that_pytorch_takes_for_integers(value: Any, ours: str) -> None:
    x, w, b = good(ours)
    for setting in ("stride", "padding", "dilation"):
        settings = {setting: value, "output_padding": 1 if setting != "padding" else 0}
        expected = F.conv_transpose3d(x, w, b, **settings)
        torch.testing.assert_close(tconv3d.conv_transpose3d(x, w, b, **settings), expected)


# ---- where a cached call could hide a bad one, and where PyTorch is the laxer one


def test_a_known_shape_hides_no_bad_argument(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.0 and True equal 1 as keys; a bias, an input and a weight of another kind must be another key."""
    x, w, b = good(ours)
    tconv3d.conv_transpose3d(x, w, b)
    monkeypatch.setattr(executor.Task, "run", lambda *_: pytest.fail("a bad call was launched"))
    for bad in ({"groups": 1.0}, {"groups": True}, {"stride": True}, {"stride": (1.0, 1.0, 1.0)}):
        with pytest.raises(TypeError, match=r"expected .* to be an integer"):
            tconv3d.conv_transpose3d(x, w, b, **bad)
    for operands in ((x, w, b.double()), (x, w.double(), b), (x, w, b[:5]), (x, w, b.expand(6, 6)), (x[:, :3], w, b)):
        with pytest.raises(RuntimeError, match=r"but got|should be the same"):
            tconv3d.conv_transpose3d(*operands)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_mixed_devices(which: str, ours: str) -> None:
    """PyTorch may take a meta tensor among others; here all operands are on the input's device."""
    x, w, b = good(ours)
    for other in ("meta", "cpu"):
        if other == ours:
            continue
        operands = (x, w.to(other), b) if which == "weight" else (x, w, b.to(other))
        with pytest.raises(RuntimeError, match=f"same device, but Input is on {ours}.* and {which} is on {other}"):
            tconv3d.conv_transpose3d(*operands)


@pytest.mark.usefixtures("nothing_runs")
def test_an_output_without_elements(ours: str) -> None:
    """PyTorch's CPU operator returns an empty tensor for a size of exactly zero, and an error for less."""
    x, w, b = good(ours)
    with pytest.raises(RuntimeError, match=r"output size per channel: \[5, 5, 0\]. Output size is too small"):
        tconv3d.conv_transpose3d(x[..., :1], w[..., :2], b, padding=(0, 0, 1))


@pytest.mark.parametrize("backward", [False, True])
def test_gradients_of_another_shape_are_refused(backward: bool, ours: str) -> None:
    """The operators behind autograd check too: they are reachable as torch.ops.tconv3d."""
    x, w, b = good(ours)
    settings = ((1, 1, 1), (0, 0, 0), (0, 0, 0), 1, (1, 1, 1))
    if backward:
        result = tconv3d.conv_transpose3d(x.requires_grad_(), w, b)
        with pytest.raises(RuntimeError):
            result.backward(torch.ones(2, 6, 5, 5, 4, device=ours))
        return
    input_grad = torch.ops.tconv3d.conv_transpose3d_input_grad
    weight_grad = torch.ops.tconv3d.conv_transpose3d_weight_grad
    small = torch.ones(2, 6, 5, 5, 4, device=ours)
    with pytest.raises(RuntimeError, match=r"have shape \[N, 6, 5, 5, 5\], but got \[2, 6, 5, 5, 4\]"):
        input_grad(small, w, (3, 3, 3), *settings)
    with pytest.raises(RuntimeError, match=r"have shape \[2, 6, 5, 5, 5\], but got \[2, 6, 5, 5, 4\]"):
        weight_grad(small, x, (3, 3, 3), *settings)
    with pytest.raises(RuntimeError, match=r"have shape \[2, 6, 5, 5, 5\], but got \[3, 6, 5, 5, 5\]"):
        weight_grad(torch.ones(3, 6, 5, 5, 5, device=ours), x, (3, 3, 3), *settings)


def test_the_module_raises_before_it_runs(ours: str) -> None:
    layer = tconv3d.ConvTranspose3d(4, 6, 3, stride=2, device=ours)
    with pytest.raises(RuntimeError, match="4 channels, but got 5 channels"):
        layer(torch.zeros(1, 5, 3, 3, 3, device=ours))
    with pytest.raises(ValueError, match="requested an output size"):
        layer(torch.zeros(1, 4, 3, 3, 3, device=ours), output_size=(99, 99, 99))
