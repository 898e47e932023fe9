"""Tensors whose elements are not what lies at their address, and calls whose tensors stand for others.

PyTorch leaves minus signs and zeros out of memory, batches gradients, traces calls, and has tensors without strides.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from layers import Layer
from torch import Tensor, nn

import tconv3d
from tconv3d.torch_ops import executor

LAYER = Layer(2, 4, (2, 3, 2), (2, 2, 2), (2, 1, 2), batch=2)
NORM = torch.tensor([0.5, -2.0, 1.0, 3.0]), torch.tensor([1.0, 0.0, -1.0, 0.5])


def norm_of(x: Tensor) -> tuple[Tensor, Tensor]:
    return NORM[0].to(x), NORM[1].to(x)


Function = Callable[[Tensor, Tensor, Tensor], Tensor]
OURS: dict[str, Function] = {
    "plain": lambda x, w, b: tconv3d.conv_transpose3d(x, w, b, *LAYER.settings),
    "relu": lambda x, w, b: tconv3d.conv_transpose3d_relu(x, w, b, *LAYER.settings),
    "norm": lambda x, w, b: tconv3d.conv_transpose3d_relu_group_norm(x, w, b, 2, *norm_of(x), 1e-5, *LAYER.settings),
    "operator": lambda x, w, b: torch.ops.tconv3d.conv_transpose3d(x, w, b, *LAYER.settings),
}


def theirs(name: str) -> Function:
    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        result = F.conv_transpose3d(x, w, b, *LAYER.settings)
        if name in ("plain", "operator"):
            return result
        return result.relu() if name == "relu" else F.group_norm(result.relu(), 2, *norm_of(x))

    return run


def negative(tensor: Tensor) -> Tensor:
    """The tensor as the imaginary part of a conjugate: memory has the opposite signs."""
    found = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert found.is_neg() and torch.equal(found, tensor)
    return found


def zeros(tensor: Tensor) -> Tensor:
    """Zeros that take no memory, as PyTorch's derivatives make them."""
    return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype, device=tensor.device)


PENDING = {"negative bit": negative, "zero tensor": zeros}


def passes(function: Function, operands: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The result without and with gradients recorded, and the gradients."""
    leaves = [operand.detach().requires_grad_() for operand in operands]
    with torch.no_grad():
        alone = function(*operands)
    result = function(*leaves)
    return [alone, result, *torch.autograd.grad(result, leaves, grad)]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("kind", PENDING)
@pytest.mark.parametrize("which", ["input", "weight", "bias", "grad_output", "all"])
def test_elements_that_are_not_in_memory(name: str, kind: str, which: str, ours: str) -> None:
    operands = LAYER.operands(torch.float64, ours)
    grad = torch.randn_like(theirs(name)(*operands))
    given = [*operands, grad]
    chosen = range(4) if which == "all" else [("input", "weight", "bias", "grad_output").index(which)]
    for place in chosen:
        given[place] = PENDING[kind](given[place])
    expected = passes(theirs(name), [each.clone() for each in given[:3]], given[3].clone())
    torch.testing.assert_close(passes(OURS[name], given[:3], given[3]), expected)


@pytest.mark.parametrize("kind", PENDING)
def test_norm_parameters_that_are_not_in_memory(kind: str, ours: str) -> None:
    x, w, b = LAYER.operands(torch.float64, ours)
    norm = [PENDING[kind](each) for each in norm_of(x)]
    both = []
    for parameters in (norm, [each.clone() for each in norm]):
        leaves = [each.detach().requires_grad_() for each in (x, w, b, *parameters)]
        settings = (*leaves[3:], 1e-5, *LAYER.settings)
        with torch.no_grad():
            alone = tconv3d.conv_transpose3d_relu_group_norm(*leaves[:3], 2, *settings)
        result = tconv3d.conv_transpose3d_relu_group_norm(*leaves[:3], 2, *settings)
        both.append([alone, result, *torch.autograd.grad(result.pow(2).sum(), leaves)])
    torch.testing.assert_close(*both)


# ---- several gradients at once


@pytest.mark.parametrize("name", OURS)
def test_batched_gradients(name: str, ours: str) -> None:
    operands = LAYER.operands(torch.float64, ours)
    grads = torch.randn(3, *theirs(name)(*operands).shape, dtype=torch.float64, device=ours)
    both = []
    for function in (OURS[name], theirs(name)):
        leaves = [operand.detach().requires_grad_() for operand in operands]
        both.append(torch.autograd.grad(function(*leaves), leaves, grads, is_grads_batched=True))
    torch.testing.assert_close(*both)


@pytest.mark.parametrize("name", OURS)
def test_vectorized_jacobian_and_hessian(name: str, ours: str) -> None:
    layer = Layer(2, 4, (1, 1, 2), (2, 2, 2), (2, 1, 2), batch=1)
    operands = tuple(layer.operands(torch.float64, ours))
    jacobian, hessian = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
    torch.testing.assert_close(
        jacobian(OURS[name], operands, vectorize=True), jacobian(theirs(name), operands, vectorize=False)
    )
    if name == "norm":
        return  # PyTorch's own group_norm has no vectorized second derivative either
    found = hessian(lambda x: OURS[name](x, *operands[1:]).pow(3).sum(), operands[0], vectorize=True)
    expected = hessian(lambda x: theirs(name)(x, *operands[1:]).pow(3).sum(), operands[0])
    torch.testing.assert_close(found, expected)


def test_vmap_over_the_operator(ours: str) -> None:
    x, w, b = LAYER.operands(torch.float64, ours)
    several = torch.stack([x, 2 * x, -x])
    torch.testing.assert_close(
        torch.vmap(lambda each: OURS["operator"](each, w, b))(several),
        torch.stack([theirs("plain")(each, w, b) for each in several]),
    )


# ---- traces


class Chain(nn.Module):
    """All three functions, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = tconv3d.ConvTranspose3d(2, 4, 2, stride=2)
        self.relu = tconv3d.ConvTranspose3dReLU(4, 4, 2)
        self.block = tconv3d.ConvTranspose3dReLUGroupNorm(4, 4, 2, num_groups=2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(self.relu(self.plain(x)))
        return result


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced_modules_run_the_kernels(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace records our operators, not the sizes of its example: other volumes work, saved and loaded too."""
    model = Chain().to(ours)
    traced = torch.jit.trace(model, torch.randn(1, 2, 3, 3, 3, device=ours))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    calls: list[int] = []
    forward = executor.forward
    monkeypatch.setattr(executor, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))  # type: ignore[func-returns-value]
    x = torch.randn(2, 2, 2, 4, 3, device=ours)
    expected = model(x)
    assert len(calls) == 2  # the third has statistics
    torch.testing.assert_close(traced(x), expected)
    torch.testing.assert_close(torch.jit.load(file)(x), expected)
    assert len(calls) == 6
    parameters = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(traced(x).pow(2).sum(), parameters),
        torch.autograd.grad(model(x).pow(2).sum(), parameters),
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced_volumes_without_a_batch(ours: str) -> None:
    x, w, b = LAYER.operands(torch.float64, ours)
    traced = torch.jit.trace(lambda x: OURS["plain"](x, w, b), (x[0],))
    torch.testing.assert_close(traced(x[1]), theirs("plain")(x[1], w, b))


# ---- tensors without strides


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda tensor: tensor.to_sparse(),
    "mkldnn": lambda tensor: tensor.to_mkldnn(),
    "nested": lambda tensor: torch.nested.nested_tensor([tensor[0], tensor[0]]),
    "jagged": lambda tensor: torch.nested.nested_tensor([tensor[0], tensor[0]], layout=torch.jagged),
}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("place", [0, 1, 2], ids=["input", "weight", "bias"])
def test_layouts_without_kernels(
    name: str, kind: str, place: int, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is launched, and the error does not speak of data pointers."""
    if kind == "mkldnn" and ours == "cuda":
        pytest.skip("mkldnn tensors are on the CPU")
    monkeypatch.setattr(executor.Task, "launch", lambda *_: pytest.fail("a kernel was launched"))
    operands = LAYER.operands(torch.float32, ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        source = operands[place][None].expand(2, -1) if operands[place].dim() == 1 else operands[place]
        operands[place] = LAYOUTS[kind](source if kind in ("nested", "jagged") else operands[place])
        with pytest.raises((NotImplementedError, RuntimeError)) as caught:
            OURS[name](*operands)
    assert "data pointer" not in str(caught.value)


def test_nested_and_mkldnn_input_is_left_to_pytorch(device: str) -> None:
    if device == "cuda":
        pytest.skip("mkldnn tensors are on the CPU")
    x, w, b = LAYER.operands(torch.float32, device)
    torch.testing.assert_close(OURS["plain"](x.to_mkldnn(), w, b).to_dense(), theirs("plain")(x, w, b))
    with tconv3d.use_backend("emulator"), pytest.raises(NotImplementedError, match="nested tensors"):
        OURS["plain"](torch.nested.nested_tensor([x[0], x[0]]), w, b)
