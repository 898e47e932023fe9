"""ConvTranspose3d -> ReLU -> GroupNorm inside `nn.Sequential`, run as the fused block.

The three layers stay where they are: names, parameters, `state_dict` and hooks keep their place, and only the
sequence's class changes. At every call a triple runs fused only while its layers do nothing but what their classes
say: a layer with a hook, a replaced `forward` or a class of its own is called as itself, as before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from .modules import ConvTranspose3d, convolve_relu_group_norm


def triples(sequence: nn.Module, kinds: tuple[type[nn.Module], ...] = (ConvTranspose3d,)) -> list[nn.Module]:
    """The convolutions of a sequence, of these very classes, that a plain ReLU and a plain GroupNorm follow."""
    if type(sequence) not in _SEQUENCES or not has_own_forward(sequence):
        return []  # a subclass, or another forward, may do anything in between
    layers: list[Any] = list(sequence._modules.values())
    found = (layers[i : i + 3] for i, layer in enumerate(layers) if type(layer) in kinds)
    return [triple[0] for triple in found if _fit(triple) and all(map(has_own_forward, triple))]


def fuse(sequence: nn.Sequential) -> None:
    """Makes the sequence run its triples as fused blocks. Does nothing where there are none."""
    if triples(sequence):
        sequence.__class__ = FusedSequential


class FusedSequential(nn.Sequential):
    """A sequence that runs plain triples of layers as one block each."""

    def forward(self, input: Tensor) -> Tensor:
        if forward_is_replaced(nn.Sequential):
            return super().forward(input)
        layers: list[Any] = list(self._modules.values())
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
    """A method as the class's own source file defines it; None if somebody has replaced it on the class."""
    method: Callable[..., Any] = getattr(kind, name)
    return method if getattr(method, "__globals__", None) is vars(sys.modules[kind.__module__]) else None


# The layers that take part, and what calling one runs. Who replaces `__call__` (torch.fx, while it traces) listens
# to every layer.
_KINDS: tuple[type[nn.Module], ...] = (nn.ConvTranspose3d, ConvTranspose3d, nn.ReLU, nn.GroupNorm)
_SEQUENCES: tuple[type[nn.Module], ...] = (nn.Sequential, FusedSequential)
_FORWARDS = {kind: as_defined(kind, "forward") for kind in _KINDS + _SEQUENCES}
_CALL, _CALL_IMPL = as_defined(nn.Module, "_wrapped_call_impl"), as_defined(nn.Module, "_call_impl")


def _runs_fused(layers: Sequence[Any]) -> bool:
    """Whether these are three layers that do nothing but what their classes say, and nobody listens to them."""
    return _fit(layers) and not module_hooks._has_any_global_hook() and all(map(_is_plain, layers))


def _is_plain(layer: nn.Module) -> bool:
    """Whether calling the layer runs its class's `forward` and nothing else."""
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
    """Whether a layer's `forward` is the one of its class, and its class's the one of its source file."""
    return "forward" not in layer.__dict__ and not forward_is_replaced(type(layer))


def forward_is_replaced(kind: type[nn.Module]) -> bool:
    """Whether somebody has replaced the `forward` of one of the classes here."""
    return kind.forward is not _FORWARDS[kind]


def _fit(layers: Sequence[Any]) -> bool:
    """Whether these are a convolution, a ReLU and a GroupNorm for as many channels."""
    if len(layers) != 3:
        return False
    convolution, relu, norm = layers
    return type(relu) is nn.ReLU and type(norm) is nn.GroupNorm and norm.num_channels == convolution.out_channels
