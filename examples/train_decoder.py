"""Trains a small 3D decoder that turns a code of eight numbers into a volume with a ball.

    python examples/train_decoder.py

The decoder upsamples by tconv3d's transposed convolutions. The training loop is PyTorch's: an optimizer, a loss,
`backward`. Runs on the CPU too, with PyTorch's operator.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tconv3d


def balls(count: int, edge: int, device: str) -> tuple[Tensor, Tensor]:
    """Codes [N, 8], whose first three numbers are the centre of a ball, and volumes [N, 1, D, H, W] that show it."""
    codes = torch.rand(count, 8, device=device)
    axis = torch.linspace(0, 1, edge, device=device)
    grid = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"))  # [3, D, H, W]
    distance = (grid - codes[:, :3, None, None, None]).norm(dim=1, keepdim=True)
    return codes, (distance < 0.3).float()


def decoder() -> nn.Module:
    """From a code [N, 8, 1, 1, 1] to a volume [N, 1, 8, 8, 8]."""
    return nn.Sequential(
        tconv3d.ConvTranspose3dReLU(8, 16, kernel_size=2),
        tconv3d.ConvTranspose3dReLU(16, 8, kernel_size=4, stride=2, padding=1),
        tconv3d.ConvTranspose3d(8, 1, kernel_size=4, stride=2, padding=1),
    )


def main(steps: int = 60) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = decoder().to(device)
    codes, volumes = balls(16, 8, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(codes[:, :, None, None, None]), volumes)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss after {steps} steps: {losses[-1]:.3f}, at the start: {losses[0]:.3f}")
    if losses[-1] >= losses[0]:
        raise SystemExit("the decoder has learnt nothing")


if __name__ == "__main__":
    main()
