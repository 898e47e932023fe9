"""Derivatives as PyTorch's machinery asks for them: of any order, only those needed, from any thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers import Layer
from torch import Tensor

import tconv3d
from tconv3d.torch_ops import executor
from tconv3d.torch_ops.backend import current_backend

# The package's function takes a short cut past the dispatcher; the operator is what others reach.
PATHS: dict[str, Callable[..., Tensor]] = {
    "function": tconv3d.conv_transpose3d,
    "operator": torch.ops.tconv3d.conv_transpose3d,
}
PASSES = ("forward", "input_grad", "weight_grad", "bias_grad")

TINY = {
    "plain": Layer(2, 3, (2, 2, 2), (2, 2, 2), batch=1),
    "no bias": Layer(1, 2, (2, 1, 2), (2, 2, 1), bias=False, batch=2),
    "groups": Layer(4, 2, (1, 2, 2), (1, 2, 2), groups=2, batch=1),
    "strided": Layer(2, 1, (1, 2, 2), (2, 3, 3), (2, 2, 2), (0, 1, 1), (1, 1, 0), batch=1),
    "dilated": Layer(1, 2, (2, 1, 2), (2, 2, 2), (1, 2, 1), (1, 0, 1), (0, 0, 0), (2, 3, 1), batch=1),
}


def leaves_of(layer: Layer, device: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [operand.requires_grad_() for operand in layer.operands(dtype, device)]


def call(layer: Layer, function: Callable[..., Tensor] = tconv3d.conv_transpose3d) -> Callable[..., Tensor]:
    """The layer as a function of its operands alone."""
    return lambda x, w, b=None: function(x, w, b, *layer.settings)


@contextlib.contextmanager
def recording() -> Iterator[list[int]]:
    """The addresses of the tensors that are kept for a backward pass."""
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def test_a_profiler_sees_the_gradients_that_run_without_it(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    backward = executor.backward
    monkeypatch.setattr(executor, "backward", lambda *arguments: calls.append(arguments[3]) or backward(*arguments))
    leaves = leaves_of(TINY["plain"], ours)
    with torch.profiler.profile():
        y = call(TINY["plain"])(*leaves)
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert calls == [(True, True, True)]


# ---- against finite differences, and of higher order


@pytest.mark.parametrize("name", TINY)
def test_first_derivatives(name: str, ours: str) -> None:
    assert torch.autograd.gradcheck(call(TINY[name]), leaves_of(TINY[name], ours))


@pytest.mark.parametrize("name", TINY)
def test_second_derivatives(name: str, ours: str) -> None:
    assert torch.autograd.gradgradcheck(call(TINY[name]), leaves_of(TINY[name], ours))


def test_derivatives_unbatched(ours: str) -> None:
    layer = TINY["strided"]
    x, w, b = leaves_of(layer, ours)
    single = x.detach()[0].requires_grad_()
    assert torch.autograd.gradcheck(call(layer), (single, w, b))
    assert torch.autograd.gradgradcheck(call(layer), (single, w, b))


def test_derivatives_through_the_dispatcher(ours: str) -> None:
    layer, operator = TINY["groups"], PATHS["operator"]
    assert torch.autograd.gradcheck(call(layer, operator), leaves_of(layer, ours))
    assert torch.autograd.gradgradcheck(call(layer, operator), leaves_of(layer, ours))


def third_order(function: Callable[..., Tensor], x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    (first,) = torch.autograd.grad(function(x, w).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), w, create_graph=True)
    return torch.autograd.grad(second.pow(2).sum(), (x, w))


def test_third_derivatives(ours: str, counted: dict[str, int]) -> None:
    layer = TINY["no bias"]
    x, w = leaves_of(layer, ours)
    got = third_order(call(layer), x, w)
    assert all(counted[name] > 1 for name in ("forward", "input_grad", "weight_grad"))
    expected = third_order(call(layer, F.conv_transpose3d), x, w)
    torch.testing.assert_close(got, expected)


# ---- only what is needed

NEEDS: dict[
    tuple[bool, ...], tuple[set[str], set[str]]
] = {  # which operands want a gradient -> the passes that run, the tensors that are kept for it
    (True, False, False): ({"input_grad"}, {"weight"}),
    (False, True, False): ({"weight_grad"}, {"input"}),
    (False, False, True): ({"bias_grad"}, set()),
    (True, False, True): ({"input_grad", "bias_grad"}, {"weight"}),
    (True, True, True): ({"input_grad", "weight_grad", "bias_grad"}, {"input", "weight"}),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_only_the_gradients_that_are_needed(
    needs: tuple[bool, ...], path: str, ours: str, counted: dict[str, int]
) -> None:
    layer = TINY["plain"]
    function = call(layer, PATHS[path])
    operands = layer.operands(torch.float64, ours)
    for operand, needed in zip(operands, needs, strict=True):
        operand.requires_grad_(needed)
    with recording() as kept:
        result = function(*operands)
    names = {operand.data_ptr(): name for operand, name in zip(operands, ("input", "weight", "bias"), strict=True)}
    passes, tensors = NEEDS[needs]
    assert sorted(names[pointer] for pointer in kept) == sorted(tensors)
    assert counted == {name: int(name == "forward") for name in PASSES}
    result.sum().backward()
    assert counted == {name: int(name == "forward" or name in passes) for name in PASSES}
    assert [operand.grad is not None for operand in operands] == list(needs)


def test_only_the_gradients_that_are_asked_for(ours: str, counted: dict[str, int]) -> None:
    """All operands require a gradient, but `autograd.grad` asks for one. The bias's may come with the weight's."""
    layer = TINY["plain"]
    operands = leaves_of(layer, ours)
    for operand, name in zip(operands, PASSES[1:], strict=True):
        result = call(layer)(*operands)
        before = dict(counted)
        torch.autograd.grad(result.sum(), operand)
        expected = {"weight_grad", "bias_grad"} if name == "weight_grad" else {name}
        assert {n for n in PASSES if counted[n] > before[n]} == expected


def test_second_derivatives_keep_only_what_they_need(ours: str, counted: dict[str, int]) -> None:
    """A frozen weight: the second derivative with respect to the gradient needs the weight alone, and one pass."""
    layer = TINY["no bias"]
    x, w = layer.operands(torch.float64, ours)
    x.requires_grad_()
    result = call(layer)(x, w)
    grad_output = torch.randn_like(result).requires_grad_()
    with recording() as kept:
        (dx,) = torch.autograd.grad(result, x, grad_output, create_graph=True)
    assert kept == [w.data_ptr()]
    before = dict(counted)
    torch.autograd.grad(dx.sum(), grad_output)
    assert {n: counted[n] - before[n] for n in PASSES} == {n: int(n == "forward") for n in PASSES}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("path", PATHS)
def test_without_gradients_nothing_is_kept(mode: Callable[[], Any], path: str, ours: str) -> None:
    layer = TINY["strided"]
    function = call(layer, PATHS[path])
    operands = leaves_of(layer, ours)
    with mode(), recording() as kept:
        result = function(*operands)
    assert not kept and not result.requires_grad and result.grad_fn is None
    assert result.is_inference() == (mode is torch.inference_mode)
    torch.testing.assert_close(result, call(layer, F.conv_transpose3d)(*operands).detach())


def test_inference_tensors_are_not_kept_for_a_gradient(ours: str) -> None:
    layer = TINY["plain"]
    x, w, b = leaves_of(layer, ours)
    with torch.inference_mode():
        inference = x.detach().clone()
    for function in (F.conv_transpose3d, tconv3d.conv_transpose3d):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            function(inference, w, b, *layer.settings)


# ---- the backend of the forward pass


@pytest.mark.parametrize("where", ["after the block", "in another thread", "under another backend"])
def test_a_backward_pass_runs_on_the_backend_of_its_forward_pass(
    where: str, device: str, counted: dict[str, int]
) -> None:
    layer = TINY["plain"]
    operands = leaves_of(layer, device)
    seen: list[str] = []
    with tconv3d.use_backend("cuda" if device == "cuda" else "emulator"):
        result = call(layer)(*operands)
        operands[0].register_hook(lambda _: seen.append(current_backend()))
    if where == "in another thread":
        thread = threading.Thread(target=lambda: result.sum().backward())
        thread.start()
        thread.join()
    elif where == "under another backend":
        with tconv3d.use_backend("torch"):
            result.sum().backward()
    else:
        result.sum().backward()
    assert counted == dict.fromkeys(PASSES, 1)
    # Only our backward pass runs under it; what comes after is the caller's again.
    assert seen == ["torch" if where == "under another backend" and device == "cpu" else "auto"]
    assert current_backend() == "auto"


def test_a_second_derivative_runs_on_the_backend_of_the_forward_pass(device: str, counted: dict[str, int]) -> None:
    layer = TINY["no bias"]
    x, w = leaves_of(layer, device)
    with tconv3d.use_backend("cuda" if device == "cuda" else "emulator"):
        result = call(layer)(x, w)
    (dx,) = torch.autograd.grad(result.pow(2).sum(), x, create_graph=True)
    before = dict(counted)
    dx.pow(2).sum().backward()
    assert counted["forward"] > before["forward"] and counted["weight_grad"] > before["weight_grad"]
    ours = x.grad, w.grad
    x.grad = w.grad = None
    (dx,) = torch.autograd.grad(call(layer, F.conv_transpose3d)(x, w).pow(2).sum(), x, create_graph=True)
    dx.pow(2).sum().backward()
    torch.testing.assert_close(ours, (x.grad, w.grad))


def test_pytorchs_backend_has_pytorchs_derivatives(device: str, counted: dict[str, int]) -> None:
    layer = TINY["strided"]
    operands = leaves_of(layer, device)
    for path in PATHS.values():
        with tconv3d.use_backend("torch"):
            result = call(layer, path)(*operands)
        grads = torch.autograd.grad(result.pow(2).sum(), operands)
        theirs = call(layer, F.conv_transpose3d)(*operands)
        torch.testing.assert_close(grads, torch.autograd.grad(theirs.pow(2).sum(), operands))
    with tconv3d.use_backend("torch"):
        assert torch.autograd.gradgradcheck(call(layer, PATHS["operator"]), operands, fast_mode=True)
    assert counted == dict.fromkeys(PASSES, 0)


# ---- a graph that is used again, changed tensors, gradients of any layout


def test_a_retained_graph_gives_the_same_gradients_again(ours: str) -> None:
    layer = TINY["groups"]
    operands = leaves_of(layer, ours)
    result = call(layer)(*operands)
    first = torch.autograd.grad(result.sum(), operands, retain_graph=True)
    second = torch.autograd.grad(result.sum(), operands)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(result.sum(), operands)


def test_one_weight_used_twice_gets_both_gradients(ours: str) -> None:
    layer = Layer(2, 2, (2, 2, 2), (2, 2, 2), batch=1)
    both = []
    for function in (tconv3d.conv_transpose3d, F.conv_transpose3d):
        x, w, b = leaves_of(layer, ours)
        again = call(layer, function)(call(layer, function)(x, w, b), w, b)
        both.append((again, *torch.autograd.grad(again.pow(2).sum(), (x, w, b))))
    torch.testing.assert_close(both[0], both[1])


@pytest.mark.parametrize("which", [0, 1, 2], ids=["input", "weight", "bias"])
def test_a_kept_tensor_changed_in_place_is_an_error(which: int, ours: str) -> None:
    layer = TINY["plain"]
    outcomes = []
    for function in (tconv3d.conv_transpose3d, F.conv_transpose3d):
        operands = leaves_of(layer, ours)
        result = call(layer, function)(*operands)
        with torch.no_grad():
            operands[which].add_(1)
        try:
            result.sum().backward()
            outcomes.append("")
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            outcomes.append(type(error).__name__)
    assert outcomes == ["", ""] if which == 2 else outcomes == ["RuntimeError"] * 2


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda g: g[:, :, :1].expand_as(g),
    "one value": lambda g: g[0, 0, 0, 0, 0].expand_as(g),
    "transposed": lambda g: g.transpose(2, 4).contiguous().transpose(2, 4),
    "channels last": lambda g: g.contiguous(memory_format=torch.channels_last_3d),
    "sliced": lambda g: torch.stack([g, torch.full_like(g, float("nan"))], dim=5)[..., 0],
    "of an odd address": lambda g: torch.cat([g.new_zeros(1), g.flatten()])[1:].view(g.shape),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_of_any_layout(name: str, ours: str) -> None:
    layer = Layer(2, 4, (2, 3, 2), (3, 2, 3), (2, 1, 2), (1, 0, 1))
    operands = leaves_of(layer, ours, torch.float32)
    exact = [operand.detach().double().requires_grad_() for operand in operands]
    result, reference = call(layer)(*operands), call(layer, F.conv_transpose3d)(*exact)
    assert result.shape[4] > 1
    random = torch.randn(result.shape, generator=torch.Generator().manual_seed(2)).to(ours)
    grad = LAYOUTS[name](random)
    got = torch.autograd.grad(result, operands, grad)
    expected = torch.autograd.grad(reference, exact, grad.double())
    for one, exact_one in zip(got, expected, strict=True):
        torch.testing.assert_close(one.double(), exact_one, rtol=1e-5, atol=1e-5)


def test_gradients_accumulate_into_a_channels_last_parameter(ours: str) -> None:
    grads = []
    for kind in (torch.nn.ConvTranspose3d, tconv3d.ConvTranspose3d):
        torch.manual_seed(0)
        layer = kind(3, 4, 2, stride=2, device=ours, dtype=torch.float64)
        layer.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        x = torch.randn(2, 3, 2, 3, 2, device=ours, dtype=torch.float64)
        for _ in range(2):
            layer(x).pow(2).sum().backward()
        assert layer.weight.is_contiguous(memory_format=torch.channels_last_3d)
        grads.append(layer.weight.grad)
    assert grads[0] is not None and grads[1] is not None and grads[0].stride() == grads[1].stride()
    torch.testing.assert_close(grads[1], grads[0])


def test_checkpointing(ours: str, counted: dict[str, int]) -> None:
    from torch.utils.checkpoint import checkpoint

    layer = TINY["plain"]
    operands = leaves_of(layer, ours)
    result = checkpoint(call(layer), *operands, use_reentrant=False)
    got = torch.autograd.grad(result.pow(2).sum(), operands)
    assert counted["forward"] == 2
    expected = torch.autograd.grad(call(layer, F.conv_transpose3d)(*operands).pow(2).sum(), operands)
    torch.testing.assert_close(got, expected)
