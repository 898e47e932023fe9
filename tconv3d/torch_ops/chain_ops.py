"""Records a convolution with its tail as one node of autograd's graph.

Saved are the convolution's result z, and what its own gradients need. The gradients of the tail come first, as passes
over z; then the convolution's gradients, as without a tail. Second derivatives run convolution and tail one after the
other in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from .backend import current_backend
from .checks import Convolution
from .ops import gradients_of


class Passes(Protocol):
    """Describes a tail that runs in passes, forward and backward (`tails.running.Differentiable`)."""

    def run(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution
    ) -> tuple[Tensor, ...]: ...

    def gradients(self, z: Tensor, grad: Tensor, saved: list[Tensor]) -> list[Tensor | None]: ...


class Chain(torch.autograd.Function):
    """Computes a convolution and its tail; `captured` are the tensors of the tail whose gradients are wanted."""

    @staticmethod
    def forward(
        ctx: Any,
        passes: Passes,
        unfused: Callable[..., Tensor],
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        convolution: Convolution,
        *captured: Tensor,
    ) -> Tensor:
        result, *saved = passes.run(input, weight, bias, convolution)
        ctx.save_for_backward(input, weight, bias, *saved)
        ctx.passes, ctx.unfused, ctx.captured = passes, unfused, captured
        ctx.call = input.shape, weight.shape, convolution, current_backend()
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, z, *reduced = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():
            operands = [input, weight, *([] if bias is None else [bias]), *ctx.captured]
            some = [each for each in operands if each.requires_grad]
            found = dict(
                zip(
                    map(id, some), torch.autograd.grad(ctx.unfused(input), some, grad, create_graph=True), strict=True
                )
            )
            all_three = [None if each is None else found.get(id(each)) for each in (input, weight, bias)]
            return None, None, *all_three, None, *[found.get(id(each)) for each in ctx.captured]
        dz, *others = ctx.passes.gradients(z, grad, reduced)
        del z, grad, reduced
        own = gradients_of(dz, input, weight, needs[2:5], *ctx.call)
        return None, None, *own, None, *others
