"""Runs ConvTranspose3d, ReLU and GroupNorm as one block, with the parameters of PyTorch's three layers.

    python examples/fused_block.py

The block computes the ReLU and the norm's statistics in the convolution's kernel. Its `state_dict` is that of a model
with the children `conv_transpose` and `group_norm`, so a checkpoint of PyTorch's layers loads unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tconv3d


class ThreeLayers(nn.Module):
    """PyTorch's layers, as a network would have them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(16, 8, kernel_size=2, stride=2)
        self.group_norm = nn.GroupNorm(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.group_norm(torch.relu(self.conv_transpose(x)))


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = ThreeLayers().to(device)
    block = tconv3d.ConvTranspose3dReLUGroupNorm(16, 8, kernel_size=2, num_groups=4, stride=2).to(device)
    block.load_state_dict(layers.state_dict())
    x = torch.randn(2, 16, 4, 4, 4, device=device)
    results, gradients = [], []
    for model in (layers, block):
        input = x.clone().requires_grad_()
        result = model(input)
        result.square().mean().backward()
        assert input.grad is not None
        results.append(result.detach())
        gradients.append(input.grad)
    for name, (theirs, ours) in (("output", results), ("gradient of the input", gradients)):
        difference = float((ours - theirs).norm() / theirs.norm())
        print(f"{name}: relative difference {difference:.1e}")
        if difference > 2e-3:
            raise SystemExit(f"the block's {name} differs by more than TF32 explains")


if __name__ == "__main__":
    main()
