"""Wrong arguments of every public function: an error that says what was expected and what came, and no change."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tconv3d
from tconv3d.tools.bench import layers

LAYER = nn.ConvTranspose3d(2, 3, 2, device="meta")
BLOCK = tconv3d.ConvTranspose3dReLUGroupNorm(2, 4, 2, 2, device="meta")
SEQUENCE = nn.Sequential(nn.ConvTranspose3d(2, 3, 2, device="meta"))
X = torch.empty(1, 2, 3, 3, 3)
W = torch.empty(2, 3, 2, 2, 2)
SHAPE = (1, 2, 3, 3, 3)
anything: Any = tconv3d  # arguments are wrong on purpose

Case = tuple[str, Callable[[], object], type[Exception], str]
CASES: list[Case] = []


def case(name: str, call: Callable[[], object], kind: type[Exception], words: str) -> None:
    CASES.append((name, call, kind, words))


for name in ("accelerate", "restore", "plan_swaps"):
    call = getattr(anything, name)
    expected = rf"{name}\(\) expected model to be an nn.Module, but got "
    case(name, lambda call=call: call(None), TypeError, expected + "an object of type NoneType")
    case(name, lambda call=call: call([LAYER]), TypeError, expected + "an object of type list")
    case(name, lambda call=call: call(nn.Conv3d), TypeError, expected + "the class Conv3d")
case("accelerate", lambda: anything.accelerate(SEQUENCE, report=True), TypeError, "report to be a function .* True")

OPERANDS = "expected a ConvTranspose3d layer, a fused block or an input tensor, but got "
for name in ("explain", "tune"):
    call = getattr(anything, name)
    case(name, lambda call=call: call(SEQUENCE, X), TypeError, OPERANDS + ".* Sequential: name one of its layers")
    case(name, lambda call=call: call(nn.Conv3d(1, 1, 1), X), TypeError, OPERANDS + "an object of type Conv3d")
    case(name, lambda call=call: call(None, X), TypeError, OPERANDS + "an object of type NoneType")
    case(name, lambda call=call: call(tconv3d.ConvTranspose3d, X), TypeError, OPERANDS + "the class ConvTranspose3d")
    case(name, lambda call=call: call(SHAPE), TypeError, OPERANDS + "an object of type tuple")
    case(name, lambda call=call: call(LAYER), TypeError, "after a layer, expected input, .*missing.*'input'")
    case(name, lambda call=call: call(LAYER, 5), TypeError, "input to be a Tensor or its shape .* but got 5")
    case(name, lambda call=call: call(LAYER, "12345"), TypeError, "input to be a Tensor or its shape .* '12345'")
    case(name, lambda call=call: call(LAYER, (1, 2)), RuntimeError, r"Expected 4D .* or 5D .* \[1, 2\]")
    case(name, lambda call=call: call(LAYER, X, colour=1), TypeError, "after a layer, .*'colour'")
    case(name, lambda call=call: call(BLOCK), TypeError, "after a layer, .*'input'")
    case(name, lambda call=call: call(X), TypeError, "after an input tensor, expected weight, .*'weight'")
    case(name, lambda call=call: call(X, None), TypeError, "weight to be a Tensor, but got .* NoneType")
    case(name, lambda call=call: call(X, W, stride="2"), TypeError, "stride to be an integer, but got stride='2'")
    case(name, lambda call=call: call(nn.LazyConvTranspose3d(2, 2), X), TypeError, "a lazy one: call it once")
case(
    "fuse",
    lambda: anything.fuse(nn.Linear(2, 2), torch.relu),
    TypeError,
    "expected an nn.ConvTranspose3d, got Linear",
)
case("fuse", lambda: anything.fuse(LAYER, 3), TypeError, "expected tail to be a function .* 3")
case("precompile", lambda: anything.precompile(None, SHAPE, path="a"), TypeError, "an nn.Module, but got .* NoneType")
case("precompile", lambda: anything.precompile(LAYER, path="a"), TypeError, "expected at least one input")
case("precompile", lambda: anything.precompile(LAYER, SHAPE, path="a", layouts=["x"]), ValueError, "layouts .* 'x'")
case("load_precompiled", lambda: anything.load_precompiled("/nowhere/at all"), ValueError, "/nowhere/at all")
case("explain", lambda: anything.explain(LAYER, SHAPE, gpu=9.0), TypeError, "gpu='9.0'.* but got 9.0 of type float")
case("explain", lambda: anything.explain(LAYER, SHAPE, gpu="9.9"), ValueError, "expected a GPU of .*12.0, got '9.9'")
case("tune", lambda: anything.tune(LAYER, X, candidates=-1), ValueError, "candidates to be at least 0, but got -1")
case("tune", lambda: anything.tune(LAYER, X, candidates=2.5), TypeError, r"tune\(\): .* got candidates=2.5")
case(
    "tune", lambda: anything.tune(LAYER, X, report="yes"), TypeError, "report to be a function or None, but got 'yes'"
)

BLOCKS = "expected a ConvTranspose3d layer or a fused block, but got an object of type "
case("compile_ahead", lambda: anything.compile_ahead(SEQUENCE, SHAPE), TypeError, BLOCKS + "Sequential: name one")
case("compile_ahead", lambda: anything.compile_ahead(None, SHAPE), TypeError, BLOCKS + "NoneType")
case("compile_ahead", lambda: anything.compile_ahead(X, W), TypeError, BLOCKS + "Tensor")
case("compile_ahead", lambda: anything.compile_ahead(LAYER), TypeError, "expected at least one input .* but got none")
case("compile_ahead", lambda: anything.compile_ahead(LAYER, 3, gpu="H200"), TypeError, "its shape .* but got 3")
case("compile_ahead", lambda: anything.compile_ahead(LAYER, SHAPE, gpu=9), TypeError, "but got 9 of type int")

case("keep_weights", lambda: anything.keep_weights("no"), TypeError, "expected True or False, but got 'no'")
case("measure_offers", lambda: anything.measure_offers("no"), ValueError, "expected 'auto', .* but got 'no'")
case("measure_offers", lambda: anything.measure_offers(False), ValueError, "expected 'auto', .* but got False")
case("allow_tf32_in_groups", lambda: anything.allow_tf32_in_groups("yes"), TypeError, "to be a bool, got 'yes'")
case("use_backend", lambda: anything.use_backend("gpu"), ValueError, "expected one of 'auto', .* got 'gpu'")
case("use_backend", lambda: anything.use_backend(None), ValueError, "expected one of 'auto', .* got None")

for name in ("conv_transpose3d", "conv_transpose3d_relu"):
    call = getattr(anything, name)
    case(name, lambda call=call: call(None, W), TypeError, "input to be a Tensor, but got input of type NoneType")
    case(name, lambda call=call: call(X, [1.0]), TypeError, "weight to be a Tensor, but got weight of type list")
    case(name, lambda call=call: call(X, W, 1.0), TypeError, "bias to be a Tensor, but got bias of type float")
norm: Callable[..., object] = anything.conv_transpose3d_relu_group_norm
case("conv_transpose3d_relu_group_norm", lambda: norm(None, W, None, 1), TypeError, "input to be a Tensor")
for layer in (tconv3d.ConvTranspose3d(2, 3, 2), tconv3d.ConvTranspose3dReLU(2, 3, 2), BLOCK):
    name = type(layer).__name__
    case(name, lambda layer=layer: layer(None), TypeError, "input to be a Tensor, but got input of type NoneType")
    kind = getattr(anything, name)
    case(name, lambda kind=kind: kind(2, 4, 2, 2, padding_mode="circular"), ValueError, 'Only "zeros"')


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [found[1:] for found in CASES],
    ids=[f"{i}-{found[0]}" for i, found in enumerate(CASES)],
)
def test_what_was_expected_and_what_came(call: Callable[[], object], kind: type[Exception], words: str) -> None:
    backend = tconv3d.current_backend()
    with pytest.raises(kind, match=words):
        call()
    assert tconv3d.current_backend() == backend
    assert type(SEQUENCE) is nn.Sequential and type(SEQUENCE[0]) is nn.ConvTranspose3d


def test_every_public_function_is_here() -> None:
    """What only holds results is made by the others, and two functions take no argument."""
    results = {"Explanation", "FuseReport", "FusedTail", "LayerSwap", "Precompiled", "SwapReport", "Tuned"}
    without = {"current_backend", "decompositions"}
    assert not any(inspect.signature(getattr(tconv3d, name)).parameters for name in without)
    assert {found[0] for found in CASES} == set(tconv3d.__all__) - results - without


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("64, 32, 2, size=0", "size to be at least 1, got size=0"),
        ("64, 32, 2, size=(4, -4, 4)", "size to be at least 1, got size=(4, -4, 4)"),
        ("64, 32, 2, size=8, batch=0", "batch to be at least 1, got batch=0"),
        ("64, 32, 2, size=8, batch=2.5", "batch to be at least 1, got batch=2.5"),
        ("0, 32, 2, size=8", "in_channels to be at least 1"),
        ("64, 32, 0, size=8", "kernel_size to be at least 1"),
        ("64, 32, 2, 0, size=8", "stride to be at least 1"),
        ("64, 32, 2, size=8, padding=-1", "padding to be at least 0"),
        ("64, 32, 2, size=8, norm_groups=-1", "norm_groups to be at least 0"),
    ],
)
def test_numbers_of_a_layer_in_words(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        layers.parse(text)


@pytest.mark.parametrize("eps", ["1e-5", None])
def test_an_eps_that_is_no_number(eps: Any, ours: str) -> None:
    x, w = torch.ones(SHAPE, device=ours), torch.ones(2, 4, 2, 2, 2, device=ours)
    with pytest.raises(TypeError, match=f"eps to be a number, but got eps={eps!r}"):
        tconv3d.conv_transpose3d_relu_group_norm(x, w, None, 2, eps=eps)
