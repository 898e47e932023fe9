"""Switches the transposed convolutions of an existing 3D U-Net to tconv3d, and back.

    python examples/swap_unet.py

The U-Net is written with PyTorch's layers alone. `tconv3d.accelerate` changes the class of its two transposed
convolutions in place, so parameters, hooks and optimizers stay valid. Runs on the CPU too, with PyTorch's operator.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tconv3d


class UNet(nn.Module):
    """A 3D U-Net of three resolutions for volumes whose edges are multiples of four."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.down_1 = nn.Conv3d(1, channels, 3, padding=1)
        self.down_2 = nn.Conv3d(channels, 2 * channels, 3, stride=2, padding=1)
        self.bottom = nn.Conv3d(2 * channels, 4 * channels, 3, stride=2, padding=1)
        self.up_2 = nn.ConvTranspose3d(4 * channels, 2 * channels, 2, stride=2)
        self.up_1 = nn.ConvTranspose3d(4 * channels, channels, 2, stride=2)
        self.head = nn.Conv3d(2 * channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = torch.relu(self.down_1(x))  # [N, C, D, H, W]
        middle = torch.relu(self.down_2(fine))  # [N, 2C, D/2, H/2, W/2]
        coarse = torch.relu(self.bottom(middle))  # [N, 4C, D/4, H/4, W/4]
        middle = torch.cat([middle, torch.relu(self.up_2(coarse))], dim=1)
        fine = torch.cat([fine, torch.relu(self.up_1(middle))], dim=1)
        return self.head(fine)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = UNet().to(device).eval()
    x = torch.randn(1, 1, 8, 8, 8, device=device)
    with torch.no_grad():
        before = model(x)
        tconv3d.accelerate(model, example_input=x, report=print)
        after = model(x)
        tconv3d.restore(model)
    difference = float((after - before).norm() / before.norm())
    print(f"relative difference of the outputs before and after: {difference:.1e}")
    if difference > 1e-3:
        raise SystemExit("the outputs differ by more than TF32 explains")


if __name__ == "__main__":
    main()
