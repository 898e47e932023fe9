"""Computes the expected result and gradients of a case in float64, and the largest error that rounding may cause."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from layers import UNIT, allowed_error
from torch import Tensor

from .case import Case

EPS = 1e-3  # eps of the GroupNorm
FACTOR = "vector 0"  # the vector of a tail by which the convolution's result is multiplied
# Allowed roundings of one value from the convolution to the norm's result: the convolution's result, the
# statistics of rounded or unrounded values, the gradient of the ReLU's input, and the results.
NORM_ROUNDINGS = 6

REFERENCE_UNIT = 1e-14  # relative error of the reference itself, which counts where our results are float64 too
LONG_SUM_UNIT = 3e-5  # relative error of a sum of 1024 equal terms that float32 adds one by one
FAST_EXPONENTIAL = 2.0**-14  # relative error of the hardware's exponentials and their sum (expressions.cuh)
TF32_UNIT = 1e-3  # relative error of an operand that is rounded or truncated to TF32

Tensors = dict[str, Tensor]
Expected = dict[str, tuple[Tensor, Tensor]]  # keyed by tensor name: exact values and allowed errors


def expected(case: Case, operands: Tensors, grad: Tensor | None, result: Tensor) -> Expected:
    """Returns exact values and allowed errors by tensor name.

    `operands` and `grad` are float64. `result` is our output; its sign decides where a ReLU passes the gradient.
    """
    if case.epilogue == "norm":
        return _with_norm(case, operands, grad)
    tail = {name: operands.pop(name) for name in list(operands) if name.startswith(("vector", "residual"))}
    none = torch.zeros((), dtype=torch.float64)
    slope = with_operands(none + 1, {name: each if name == FACTOR else none for name, each in tail.items()})
    masked = None if grad is None else grad * (result > 0) if case.epilogue == "relu" else grad
    if masked is not None:
        masked = masked * slope
    exact = _passes(case, operands, masked)
    largest = _passes(case, _absolute(operands), None if masked is None else masked.abs())
    # PyTorch's float64 sums are the reference: hundreds of equal terms leave them 3e-15 away from the exact sum. In
    # TF32, kernels may add up to 1024 terms one by one: 243 equal terms left 3e-6.
    own = {"float64": REFERENCE_UNIT, "tf32": LONG_SUM_UNIT}.get(case.dtype, 0.0)
    found = {
        name: (exact[name], allowed_error(exact[name], largest[name], result_type(case)) + own * largest[name])
        for name in exact
    }
    if case.epilogue == "relu":
        found["result"] = found["result"][0].relu(), found["result"][1]
    if tail:
        value, allowed = found["result"]
        shifted, sizes = with_operands(value, tail), with_operands(value.abs(), _absolute(tail))
        # The convolution's result is rounded, unless the tail is computed in its kernel, and so is every sum.
        allowed = allowed * slope + (1 + len(tail)) * UNIT[result_type(case)] * sizes
        found["result"] = _behind_operands(case, shifted, allowed)
    return found


def with_operands(z: Tensor, tail: Tensors) -> Tensor:
    """Returns z with the operands of a tail: times the first vector, then halved or doubled and plus each other one.

    No operand is computed with before it meets z, so that a kernel reads it as it is.
    """
    result = z * tail[FACTOR] if FACTOR in tail else z
    for place, name in enumerate(name for name in tail if name != FACTOR):
        result = result * (0.5, 2.0)[place % 2] + tail[name]
    return result


def residual_shape(kind: str, result: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a whole tensor that a tail adds to its result of this shape (`case.RESIDUALS`)."""
    items, channels = kind not in ("item", "one"), kind not in ("channel", "one")
    return (result[0] if items else 1, result[1] if channels else 1, *result[2:])


def _behind_operands(case: Case, values: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what follows the operands of a tail, and its allowed errors, out of those of the values."""
    unit = UNIT[result_type(case)]
    if case.epilogue == "silu":
        exact = values * values.sigmoid()
        rounded = 2 * unit + (FAST_EXPONENTIAL if case.dtype not in ("float32", "float64") else 0.0)
        # The slope of SiLU is below 1.1.
        return exact, 1.1 * allowed + rounded * exact.abs() + torch.finfo(torch.float32).tiny
    if case.epilogue == "softmax":
        exact = values.softmax(1)
        spread = allowed + (exact * allowed).sum(1, keepdim=True)
        rounded = 2 * unit + (FAST_EXPONENTIAL if case.dtype not in ("float32", "float64") else 0.0)
        # An error d of a number changes its share by a factor of exp(d).
        return exact, exact * (torch.expm1(spread * (1 + allowed)) + rounded) + torch.finfo(torch.float16).tiny * unit
    if case.epilogue == "largest":
        exact = values.amax(1, keepdim=True)
        return exact, allowed.amax(1, keepdim=True) + unit * exact.abs()
    return values, allowed


def result_type(case: Case) -> torch.dtype:
    return torch.float32 if case.dtype == "tf32" else getattr(torch, case.dtype)


def _absolute(operands: Tensors) -> Tensors:
    return {name: tensor.abs() for name, tensor in operands.items()}


def _passes(case: Case, operands: Tensors, grad: Tensor | None) -> Tensors:
    """Returns the result of the convolution, and the wanted gradients of its operands."""
    wanted = [name for name in case.wanted if name in ("input", "weight", "bias")] if grad is not None else []
    leaves = {name: tensor.detach().requires_grad_(name in wanted) for name, tensor in operands.items()}
    result = F.conv_transpose3d(leaves["input"], leaves["weight"], leaves.get("bias"), *case.layer.settings)
    grads = torch.autograd.grad(result, [leaves[name] for name in wanted], grad) if wanted else ()
    return {"result": result.detach(), **dict(zip(wanted, grads, strict=True))}


def _with_norm(case: Case, operands: Tensors, grad: Tensor | None) -> Expected:
    """Returns exact values and allowed errors of a case with ReLU and GroupNorm.

    The values of such a case make every sum of the convolution exact, and so the ReLU's mask. Bounds follow the
    roundings through the formulas of GroupNorm: `near` bounds the change of a normalized value, in units of one
    rounding, by rounding the convolution's result or its group's statistics.
    """
    unit = NORM_ROUNDINGS * (UNIT[result_type(case)] + UNIT[torch.float32] * (case.dtype != "float64"))
    sums = _passes(case, operands, None)["result"]
    z, ones = sums.relu(), torch.ones(case.layer.out_channels, dtype=torch.float64)
    weight, bias = operands.get("norm_weight", ones), operands.get("norm_bias", 0 * ones)
    mean, variance = (_of_groups(case, each) for each in (z, z * z))
    variance = variance - mean * mean
    rstd = (variance + EPS).rsqrt()
    normal = (z - mean) * rstd
    near = rstd * (z + mean) + normal.abs() * _of_groups(case, z * z) * rstd * rstd
    w, b = (each[:, None, None, None] for each in (weight, bias))
    exact = {"result": normal * w + b}
    bounds = {"result": near * w.abs() + exact["result"].abs() + b.abs()}
    if grad is not None:
        flow = grad * w
        pull = _of_groups(case, flow), _of_groups(case, flow * normal)
        dz = rstd * (flow - pull[0] - normal * pull[1]) * (sums > 0)
        size = flow.abs(), (normal.abs() + near)
        pulled = _of_groups(case, size[0]), _of_groups(case, size[0] * size[1])
        spread = 1 + _of_groups(case, z * z) * rstd * rstd
        largest = rstd * spread * (size[0] + pulled[0] + size[1] * pulled[1]) * (sums > 0)
        exact |= {name: value for name, value in _passes(case, operands, dz).items() if name != "result"}
        limits = _passes(case, _absolute(operands), largest)
        bounds |= {name: value for name, value in limits.items() if name != "result"}
        over = (0, 2, 3, 4)
        parameters = {"norm_weight": (grad * normal, grad.abs() * size[1]), "norm_bias": (grad, grad.abs())}
        for name in set(case.wanted) & parameters.keys():
            exact[name], bounds[name] = (each.sum(over) for each in parameters[name])
    # TF32 products round the gradient of the ReLU's input once more.
    products = unit + (TF32_UNIT if case.dtype == "tf32" else 0)
    units = {"input": products, "weight": products}
    return {name: (exact[name], units.get(name, unit) * bounds[name] + 1e-6) for name in exact}


def _of_groups(case: Case, tensor: Tensor) -> Tensor:
    """Returns the mean of every norm group of every sample, expanded to the shape of the tensor."""
    batch, channels, *size = tensor.shape
    per_group = channels // case.norm_groups
    means = tensor.reshape(batch, case.norm_groups, per_group * prod(size)).mean(2)
    return means.repeat_interleave(per_group, 1)[:, :, None, None, None].expand(tensor.shape)
