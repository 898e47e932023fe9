"""Training as frameworks do it: loss scaling, Lightning's loop, and tensors that carry metadata."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tconv3d


def model(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.ConvTranspose3d(4, 6, 2, stride=2), nn.Tanh(), nn.ConvTranspose3d(6, 2, 3)).to(device)


def batches(device: str, count: int = 3) -> list[Tensor]:
    return list(torch.randn(count, 2, 4, 2, 2, 3, generator=torch.Generator().manual_seed(1)).to(device))


# ---- loss scaling


def scaled_steps(network: nn.Module, inputs: list[Tensor], device: str) -> tuple[list[Tensor], list[float]]:
    """Trains with a scale that is too large at first, and returns the parameters and the scale after each step."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**60, backoff_factor=2.0**-50)
    scales = []
    for x in inputs:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = network(x).float().square().mean() * 2.0**70  # gradients overflow until the scale is smaller
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for parameter in network.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2.0**-70)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [parameter.detach() for parameter in network.parameters()], scales


def test_gradient_scaling(ours: str, counted: dict[str, int]) -> None:
    theirs = model(ours)
    mine = tconv3d.accelerate(copy.deepcopy(theirs))
    first = [parameter.detach().clone() for parameter in theirs.parameters()]
    got, scales = scaled_steps(mine, batches(ours), ours)
    assert counted["weight_grad"] == 2 * 3
    expected, their_scales = scaled_steps(theirs, batches(ours), ours)
    assert scales == their_scales and scales[0] < 2.0**60, "the first step must overflow, and be left out"
    assert not torch.equal(got[0], first[0]), "a later step must be taken"
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


# ---- Lightning


def test_lightning(ours: str, counted: dict[str, int], tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning")
    network = tconv3d.accelerate(model(ours))
    reference = copy.deepcopy(network)

    class Task(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.network(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Tensor:
            return batches("cpu")[index]

    trainer = lightning.Trainer(
        max_epochs=1, accelerator="gpu" if ours == "cuda" else "cpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    task = Task()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(task, torch.utils.data.DataLoader(Data(), batch_size=None))
    assert counted["forward"] == counted["weight_grad"] == 2 * 3
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    with tconv3d.use_backend("torch"):
        for batch in batches(ours):
            optimizer.zero_grad()
            reference(batch).square().mean().backward()
            optimizer.step()
    for got, expected in zip(task.network.to(ours).parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


# ---- MONAI's tensors


def test_tensors_with_metadata(ours: str, counted: dict[str, int]) -> None:
    meta_tensor = pytest.importorskip("monai.data").MetaTensor
    layer = tconv3d.ConvTranspose3d(4, 6, 2, stride=2, device=ours)
    x = meta_tensor(batches(ours)[0], meta={"name": "a scan"}).requires_grad_()
    y = layer(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert counted["forward"] == counted["input_grad"] == 1
    with tconv3d.use_backend("torch"):
        expected = layer(x)
        (expected_dx,) = torch.autograd.grad(expected.square().sum(), x)
    assert type(y) is type(expected) is meta_tensor and y.meta["name"] == "a scan"
    torch.testing.assert_close(y.as_tensor(), expected.as_tensor(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.Tensor(dx), torch.Tensor(expected_dx), rtol=1e-5, atol=1e-4)
