"""Builds MONAI's 3D networks with transposed convolutions, each with an input, for `tconv3d bench --model`.

    tconv3d bench --model benchmarks.monai_networks:dynunet

The sizes are those of the networks' papers or tutorials; `tiny` networks have every kind of layer and are for tests
in the emulator. The networks need `pip install monai einops`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

try:
    from monai.networks.nets import DynUNet, MedNeXt, SwinUNETR, UNet, VNet
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"MONAI's networks need `pip install monai einops`: {error}", name=error.name) from None

Network = tuple[nn.Module, Tensor]


def unet(tiny: bool = False) -> Network:
    """Builds a residual U-Net as in MONAI's spleen segmentation tutorial."""
    channels, strides = ((4, 6, 8), (2, 2)) if tiny else ((16, 32, 64, 128, 256), (2, 2, 2, 2))
    network = UNet(3, 1, 2, channels, strides, num_res_units=2)
    return network, volume(1, 1, 8, 8, 8) if tiny else volume(4, 1, 96, 96, 96)


def vnet(tiny: bool = False) -> Network:
    """Builds a V-Net, whose channels are fixed."""
    return VNet(), volume(1, 1, 16, 16, 16) if tiny else volume(2, 1, 128, 128, 64)


def dynunet(tiny: bool = False) -> Network:
    """Builds nnU-Net's architecture with its plan for brain tumours."""
    strides = [1, 2, 2] if tiny else [1, 2, 2, 2, 2, 2]
    filters = [4, 6, 8] if tiny else [32, 64, 128, 256, 320, 320]
    channels = (1, 2) if tiny else (4, 3)
    network = DynUNet(3, *channels, [3] * len(strides), strides, strides[1:], filters=filters)
    return network, volume(1, 1, 8, 8, 8) if tiny else volume(2, 4, 128, 128, 128)


def swin_unetr(tiny: bool = False) -> Network:
    """Builds a Swin UNETR as in its paper on brain tumours (feature size 48)."""
    if tiny:
        network = SwinUNETR(in_channels=1, out_channels=2, feature_size=12, depths=(1,) * 4, num_heads=(1,) * 4)
        return network, volume(1, 1, 64, 32, 32)
    return SwinUNETR(in_channels=4, out_channels=3, feature_size=48), volume(1, 4, 96, 96, 96)


def mednext(tiny: bool = False) -> Network:
    """Builds MedNeXt-S, which has depthwise transposed convolutions."""
    if tiny:
        network = MedNeXt(3, 4, 1, 2, kernel_size=3, blocks_down=(1, 1), blocks_bottleneck=1, blocks_up=(1, 1))
        return network, volume(1, 1, 8, 8, 8)
    return MedNeXt(3, 32, 4, 3, kernel_size=3), volume(1, 4, 128, 128, 128)


NETWORKS = {"UNet": unet, "VNet": vnet, "DynUNet": dynunet, "SwinUNETR": swin_unetr, "MedNeXt": mednext}


def volume(*shape: int) -> Tensor:
    return torch.randn(shape)
