"""Batching rules of the operators: one call under `torch.vmap` is one call of the same operator on larger tensors.

A mapped dimension of size B folds into a dimension that the operator has anyway:

- into the batch, if only tensors with a batch dimension are mapped;
- into the channels of each group, if only the other operand is mapped (one input and B weights, for example);
- into the groups, if both are mapped: B convolutions with G groups are one convolution with B * G groups.

This module knows the shapes that operators take, and nothing of how they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .pytorch_ops import suggests_channels_last

Dims = Sequence[int | None]  # for each argument the dimension that is mapped, None if the argument is not
Rule = Callable[..., tuple[Any, Any]]  # (batch size, dims, *arguments) -> results and their mapped dimensions


# ---- folding


def _front(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """Returns [B, ...]: the mapped dimension first, or the same tensor B times if none is mapped."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _front_or_none(tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    return None if tensor is None else _front(tensor, dim, size)


def _channels_last(mapped: Tensor) -> bool:
    """Tells whether the tensors of which [B, N, C, D, H, W] consists are channels-last."""
    return mapped.shape[0] > 0 and suggests_channels_last(mapped[0])


def _through_batch(tensor: Tensor, dim: int | None, size: int, call: Callable[[Tensor], Tensor]) -> Tensor:
    """Folds B into the batch, [N, C, D, H, W] with one more dimension -> [B*N, C, D, H, W], and the result back."""
    mapped = _front(tensor, dim, size)
    last = _channels_last(mapped)
    folded = mapped.movedim(2, -1).flatten(0, 1).movedim(-1, 1) if last else mapped.flatten(0, 1)
    return call(folded).unflatten(0, (size, mapped.shape[1]))


def _into_channels(tensor: Tensor, dim: int | None, size: int, groups: int = 1) -> Tensor:
    """Folds B into the channels of each group: [N, G*C, D, H, W] with one more dimension -> [N, G*B*C, D, H, W]."""
    mapped = _front(tensor, dim, size)
    split = mapped.unflatten(2, (groups, mapped.shape[2] // groups))  # [B, N, G, C, D, H, W]
    if _channels_last(mapped):
        return split.permute(1, 4, 5, 6, 2, 0, 3).flatten(4, 6).movedim(-1, 1)
    return split.permute(1, 2, 0, 3, 4, 5, 6).flatten(1, 3)


def _out_of_channels(tensor: Tensor, size: int, groups: int = 1) -> Tensor:
    """Returns [N, B, G*C, D, H, W] from [N, G*B*C, D, H, W]."""
    split = tensor.unflatten(1, (groups, size, tensor.shape[1] // (groups * size)))
    return split.movedim(2, 1).flatten(2, 3)


def _into_rows(tensor: Tensor, groups: int = 1) -> Tensor:
    """Folds B into the first dimension of each group: [B, G*C, ...] -> [G*B*C, ...]."""
    return tensor.unflatten(1, (groups, tensor.shape[1] // groups)).movedim(0, 1).flatten(0, 2)


def _out_of_rows(tensor: Tensor, size: int, groups: int = 1) -> Tensor:
    """Returns [B, G*C, ...] from [G*B*C, ...]."""
    split = tensor.unflatten(0, (groups, size, tensor.shape[0] // (groups * size)))
    return split.movedim(1, 0).flatten(1, 2)


def _more_groups(settings: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    stride, padding, output_padding, groups, dilation = settings
    return stride, padding, output_padding, groups * size, dilation


# ---- rules


def _forward(operator: Any) -> Rule:
    def rule(
        size: int, dims: Dims, input: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any
    ) -> tuple[Any, Any]:
        of_input, of_weight, of_bias = dims[:3]
        groups = settings[3]
        if of_weight is None and of_bias is None:
            return _through_batch(input, of_input, size, lambda x: operator(x, weight, bias, *settings)), 0
        weights, biases = _front(weight, of_weight, size), _front_or_none(bias, of_bias, size)
        if of_input is None:
            columns = weights.movedim(0, 1).flatten(1, 2)  # [C_in, B * C_out / groups, ...]
            y = operator(input, columns, None if biases is None else _into_rows(biases, groups), *settings)
            return _out_of_channels(y, size, groups), 1
        y = operator(
            _into_channels(input, of_input, size),
            weights.flatten(0, 1),
            None if biases is None else biases.flatten(),
            *_more_groups(settings, size),
        )
        return _out_of_channels(y, size), 1

    return rule


def _input_grad(operator: Any) -> Rule:
    def rule(size: int, dims: Dims, grad: Tensor, weight: Tensor, input_size: Any, *settings: Any) -> tuple[Any, Any]:
        of_grad, of_weight = dims[:2]
        groups = settings[3]
        if of_weight is None:
            return _through_batch(grad, of_grad, size, lambda dy: operator(dy, weight, input_size, *settings)), 0
        weights = _front(weight, of_weight, size)
        if of_grad is None:
            dx = operator(grad, _into_rows(weights, groups), input_size, *settings)
            return _out_of_channels(dx, size, groups), 1
        folded = _into_channels(grad, of_grad, size)
        dx = operator(folded, weights.flatten(0, 1), input_size, *_more_groups(settings, size))
        return _out_of_channels(dx, size), 1

    return rule


def _weight_grad(operator: Any) -> Rule:
    def rule(size: int, dims: Dims, grad: Tensor, input: Tensor, kernel: Any, *settings: Any) -> tuple[Any, Any]:
        of_grad, of_input = dims[:2]
        groups = settings[3]
        if of_input is None:
            dw = operator(_into_channels(grad, of_grad, size, groups), input, kernel, *settings)
            return dw.unflatten(1, (size, dw.shape[1] // size)), 1
        if of_grad is None:
            dw = operator(grad, _into_channels(input, of_input, size, groups), kernel, *settings)
            return _out_of_rows(dw, size, groups), 0
        folded = _into_channels(grad, of_grad, size), _into_channels(input, of_input, size)
        dw = operator(*folded, kernel, *_more_groups(settings, size))
        return dw.unflatten(0, (size, dw.shape[0] // size)), 0

    return rule


def _bias_grad(operator: Any) -> Rule:
    def rule(size: int, dims: Dims, grad: Tensor) -> tuple[Any, Any]:
        return operator(_into_channels(grad, dims[0], size)).view(size, -1), 0

    return rule


def _block(operator: Any) -> Rule:
    """Folds the convolution, the ReLU and the norm together: a group of the norm never mixes two mapped calls."""

    def rule(
        size: int,
        dims: Dims,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        num_groups: int,
        eps: float,
        dtype: torch.dtype,
        *settings: Any,
    ) -> tuple[Any, Any]:
        parameters = weight, bias, norm_weight, norm_bias
        if all(dim is None for dim in dims[1:5]):
            rest = *parameters, num_groups, eps, dtype, *settings
            return _through_batch(input, dims[0], size, lambda x: operator(x, *rest)), 0
        folded = [
            None if tensor is None else _front(tensor, dim, size).flatten(0, 1)
            for tensor, dim in zip(parameters, dims[1:5], strict=True)
        ]
        x = _into_channels(input, dims[0], size)
        y = operator(x, *folded, num_groups * size, eps, dtype, *_more_groups(settings, size))
        return _out_of_channels(y, size), 1

    return rule


def _norm_grad(operator: Any) -> Rule:
    def rule(
        size: int,
        dims: Dims,
        grad: Tensor,
        input: Tensor,
        statistics: Tensor,
        weight: Tensor | None,
        parameters: torch.dtype,
        wanted: Sequence[bool],
    ) -> tuple[Any, Any]:
        dz, dparameters, db = operator(
            _into_channels(grad, dims[0], size),
            _into_channels(input, dims[1], size),
            _front(statistics, dims[2], size).movedim(0, 2).flatten(2, 3),  # [2, N, B * groups]
            None if weight is None else _front(weight, dims[3], size).flatten(),
            parameters,
            wanted,
        )
        needs_input, needs_parameters, needs_bias = wanted
        found = (
            (_out_of_channels(dz, size), 1) if needs_input or needs_bias else (dz, None),
            (dparameters.view(2, size, -1), 1) if needs_parameters else (dparameters, None),
            (db.view(size, -1), 0) if needs_bias else (db, None),
        )
        results, out_dims = zip(*found, strict=True)
        return results, out_dims

    return rule


_RULES: dict[str, Callable[[Any], Rule]] = {
    "conv_transpose3d": _forward,
    "conv_transpose3d_relu": _forward,
    "conv_transpose3d_input_grad": _input_grad,
    "conv_transpose3d_weight_grad": _weight_grad,
    "conv_transpose3d_bias_grad": _bias_grad,
    "conv_transpose3d_relu_group_norm": _block,
    "relu_group_norm_grad": _norm_grad,
}


# ---- registrations


def register(library: torch.library.Library) -> None:
    """Registers the rules of all operators, which must be defined."""
    for name, make in _RULES.items():
        operator = getattr(torch.ops.tconv3d, name).default
        rule = make(operator)
        torch.library.register_vmap(f"tconv3d::{name}", _for_vmap(rule), lib=library)
        library.impl(name, _for_batched_gradients(operator, rule), "Batched")


def _for_vmap(rule: Rule) -> Callable[..., Any]:
    return lambda info, dims, *arguments: rule(info.batch_size, dims, *arguments)


def _for_batched_gradients(operator: Any, rule: Rule) -> Callable[..., Any]:
    """Returns the operator for `is_grads_batched`, which maps by an older mechanism than `torch.vmap`.

    That mechanism numbers nested maps from 1, and takes a tensor that a level does not map for a map of size 1.
    """

    def call(*arguments: Any) -> Any:
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        while level > 0:
            exposed = [torch._remove_batch_dim(a, level, 1, 0) if isinstance(a, Tensor) else a for a in arguments]
            size = max(a.shape[0] for a in exposed if isinstance(a, Tensor))
            dims = [0 if isinstance(a, Tensor) and a.shape[0] == size else None for a in exposed]
            mapped = size > 1
            arguments = tuple(
                a[0] if isinstance(a, Tensor) and not (mapped and dim == 0) else a
                for a, dim in zip(exposed, dims, strict=True)
            )
            if mapped:
                return _wrapped(*rule(size, dims, *arguments), level)
            level -= 1
        return operator(*arguments)

    return call


def _wrapped(results: Any, dims: Any, level: int) -> Any:
    """Maps results again. The mapped dimension must be the first in memory too, or PyTorch refuses to take views."""
    if isinstance(results, Tensor):
        if dims is None:
            return results
        front = results if dims == 0 else results.movedim(dims, 0).contiguous()
        return torch._add_batch_dim(front, 0, level)
    return tuple(_wrapped(result, dim, level) for result, dim in zip(results, dims, strict=True))
