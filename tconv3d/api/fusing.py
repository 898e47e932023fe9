"""Runs ConvTranspose3d -> ReLU -> GroupNorm inside `nn.Sequential` as the fused block.

The three layers (a triple) stay in the model with their names, parameters, `state_dict` and hooks; only the class of
the sequence changes. Every call checks the triple again: if one of the layers has a hook, a replaced `forward` or
another class, the three layers are called one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn.modules import module as module_hooks

from .modules import ConvTranspose3d, convolve_relu_group_norm


def triples(sequence: nn.Module, kinds: tuple[type[nn.Module], ...] = (ConvTranspose3d,)) -> list[nn.Module]:
    """Returns the convolutions of a sequence with a class in `kinds` which a plain ReLU and GroupNorm follow."""
    if type(sequence) not in _SEQUENCES or not has_own_forward(sequence):
        return []  # a subclass, or a replaced forward, may do anything between the layers
    layers: list[Any] = list(sequence._modules.values())
    found = (layers[i : i + 3] for i, layer in enumerate(layers) if type(layer) in kinds)
    return [triple[0] for triple in found if _fit(triple) and all(map(has_own_forward, triple))]


def fuse(sequence: nn.Sequential) -> None:
    """Makes the sequence run its triples as fused blocks, and does nothing if it has no triple."""
    if triples(sequence):
        sequence.__class__ = FusedSequential


class FusedSequential(nn.Sequential):
    """Runs every plain triple of layers in a sequence as one fused block."""

    def forward(self, input: Tensor) -> Tensor:
        if is_scripting():  # TorchScript compiles this branch alone, in which the layers run one by one
            for module in self:
                input = module(input)
        else:
            input = _run(self, input)
        return input


def _run(sequence: FusedSequential, input: Tensor) -> Tensor:
    if forward_is_replaced(nn.Sequential):
        return nn.Sequential.forward(sequence, input)
    layers: list[Any] = list(sequence._modules.values())
    index = 0
    while index < len(layers):
        if type(layers[index]) is ConvTranspose3d and _runs_fused(layers[index : index + 3]):
            input = convolve_relu_group_norm(layers[index], layers[index + 2], input)
            index += 3
        else:
            input = layers[index](input)
            index += 1
    return input


def as_defined(kind: type[nn.Module], name: str) -> Callable[..., Any] | None:
    """Returns a method as the source file of the class defines it, or None if it has been replaced on the class."""
    method: Callable[..., Any] = getattr(kind, name)
    return method if getattr(method, "__globals__", None) is vars(sys.modules[kind.__module__]) else None


# Classes that take part in fusing, with their original `forward`, and the methods that calling a layer runs. Layers
# run unfused while one of these methods is replaced: torch.fx, for example, replaces `__call__` to trace every layer.
_KINDS: tuple[type[nn.Module], ...] = (nn.ConvTranspose3d, ConvTranspose3d, nn.ReLU, nn.GroupNorm)
_SEQUENCES: tuple[type[nn.Module], ...] = (nn.Sequential, FusedSequential)
_FORWARDS = {kind: as_defined(kind, "forward") for kind in _KINDS + _SEQUENCES}
_CALL, _CALL_IMPL = as_defined(nn.Module, "_wrapped_call_impl"), as_defined(nn.Module, "_call_impl")


def _runs_fused(layers: Sequence[Any]) -> bool:
    """Tells whether three layers form a triple that has no hooks and no replaced methods."""
    return _fit(layers) and not module_hooks._has_any_global_hook() and all(map(_is_plain, layers))


def _is_plain(layer: nn.Module) -> bool:
    """Tells whether calling the layer runs the `forward` of its class and nothing else."""
    kind, own = type(layer), layer.__dict__
    return (
        has_own_forward(layer)
        and kind.__call__ is _CALL
        and kind._call_impl is _CALL_IMPL
        and "_call_impl" not in own
        and own.get("_compiled_call_impl") is None
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
        and not layer._backward_hooks
        and not layer._backward_pre_hooks
    )


def has_own_forward(layer: nn.Module) -> bool:
    """Tells whether a layer's `forward` is replaced neither on the object nor on its class."""
    return "forward" not in layer.__dict__ and not forward_is_replaced(type(layer))


def forward_is_replaced(kind: type[nn.Module]) -> bool:
    """Tells whether the `forward` of one of the classes in `_FORWARDS` has been replaced."""
    return kind.forward is not _FORWARDS[kind]


def _fit(layers: Sequence[Any]) -> bool:
    """Tells whether a ReLU and a GroupNorm over the convolution's output channels follow the convolution."""
    if len(layers) != 3:
        return False
    convolution, relu, norm = layers
    return type(relu) is nn.ReLU and type(norm) is nn.GroupNorm and norm.num_channels == convolution.out_channels
