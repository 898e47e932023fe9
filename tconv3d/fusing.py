"""ConvTranspose3d -> ReLU -> GroupNorm inside `nn.Sequential`, run as the fused block.

The three layers stay where they are: names, parameters, `state_dict` and hooks keep their place, and only the
sequence's `forward` changes. A layer that somebody listens to through a hook is called as itself again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from .modules import ConvTranspose3d, ConvTranspose3dReLUGroupNorm


def triples(sequence: nn.Module, kinds: tuple[type[nn.Module], ...] = (ConvTranspose3d,)) -> dict[int, nn.Module]:
    """The convolutions of a sequence, of these very classes, that ReLU and GroupNorm follow, by index."""
    if type(sequence) not in (nn.Sequential, FusedSequential):  # a subclass may do anything in between
        return {}
    layers = [layer for layer in sequence._modules.values() if layer is not None]
    return {i: layers[i] for i in range(len(layers) - 2) if type(layers[i]) in kinds and _fits(layers[i : i + 3])}


def fuse(sequence: nn.Sequential) -> None:
    """Makes the sequence run its triples as fused blocks. Does nothing where there are none."""
    found = triples(sequence)
    if found:
        layers = list(sequence._modules.values())
        sequence.__class__ = FusedSequential
        blocks = {i: _block(layers[i], layers[i + 2]) for i in found}
        sequence._fused_blocks = blocks  # type: ignore[assignment]  # FusedSequential's, in a plain dictionary


def unfuse(sequence: nn.Module) -> None:
    """Undoes `fuse`."""
    if type(sequence) is FusedSequential:
        sequence.__dict__.pop("_fused_blocks", None)
        sequence.__class__ = nn.Sequential  # type: ignore[assignment]  # its base


class FusedSequential(nn.Sequential):
    """A sequence some of whose triples of layers run as one block each.

    The blocks stand in a plain dictionary, not among the children: they only lead to the children's parameters.
    """

    _fused_blocks: dict[int, ConvTranspose3dReLUGroupNorm] = {}  # noqa: RUF012  # replaced, never changed

    def forward(self, input: Tensor) -> Tensor:
        layers = list(self._modules.values())
        index = 0
        while index < len(layers):
            block = self._fused_blocks.get(index)
            if block is not None and _unchanged(block, layers[index : index + 3]):
                input = block(input)
                index += 3
            else:
                input = layers[index](input)
                index += 1
        return input


def _fits(layers: Sequence[nn.Module]) -> bool:
    convolution, relu, norm = layers
    return (
        isinstance(convolution, nn.ConvTranspose3d)
        and type(relu) is nn.ReLU
        and type(norm) is nn.GroupNorm
        and norm.num_channels == convolution.out_channels
        and not parametrize.is_parametrized(norm)
    )


def _unchanged(block: ConvTranspose3dReLUGroupNorm, layers: Sequence[nn.Module | None]) -> bool:
    """Whether these are still the layers that the block was made of, and nobody listens to them."""
    return (
        len(layers) == 3
        and layers[0] is block.conv_transpose
        and type(layers[1]) is nn.ReLU
        and layers[2] is block.group_norm
        and not any(_has_hooks(layer) for layer in layers if layer is not None)
    )


def _has_hooks(layer: nn.Module) -> bool:
    return bool(
        layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    )


def _block(convolution: nn.Module, norm: nn.Module) -> ConvTranspose3dReLUGroupNorm:
    """The fused block over the layers themselves: built empty, then given them."""
    assert isinstance(convolution, ConvTranspose3d) and isinstance(norm, nn.GroupNorm)
    padding: Any = convolution.padding  # declared for all convolutions; "same" is for others
    block = ConvTranspose3dReLUGroupNorm(
        convolution.in_channels,
        convolution.out_channels,
        convolution.kernel_size,
        norm.num_groups,
        stride=convolution.stride,
        padding=padding,
        output_padding=convolution.output_padding,
        groups=convolution.groups,
        bias=convolution.bias is not None,
        dilation=convolution.dilation,
        eps=norm.eps,
        affine=norm.affine,
        device="meta",
    )
    block.conv_transpose, block.group_norm = convolution, norm
    return block
