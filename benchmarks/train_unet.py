"""Trains a small 3D U-Net with this library's layers and with PyTorch's, and compares losses and step times.

    python benchmarks/train_unet.py --json benchmarks/results/h200-train.json

All runs have equal seeds, parameters and data (generated spheres in noise). Two runs with this library's layers must
agree in every bit, with cuDNN's deterministic algorithms for all other layers. Losses of ours and PyTorch's may
differ by the noise of TF32, which is the difference between PyTorch's runs in TF32 and in strict float32.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS deterministic, if set before CUDA starts

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tconv3d
from tconv3d.tools.bench.precision import precision
from tconv3d.tools.bench.results import describe_machine, write_json
from tconv3d.tools.bench.rivals import cudnn_benchmark

KINDS = {"ours": tconv3d.ConvTranspose3d, "torch": nn.ConvTranspose3d}
NOISE = 3.0  # largest accepted difference of the losses, as a multiple of the noise of TF32


@dataclass(frozen=True)
class Settings:
    """Holds the settings of a training run."""

    size: int = 64
    batch: int = 2
    channels: tuple[int, ...] = (32, 64, 128)
    steps: int = 200
    samples: int = 16
    learning_rate: float = 2e-3
    seed: int = 0


class UNet(nn.Module):
    """Runs a U-Net whose decoder has transposed convolutions of stride 2, with kernel 2 and kernel 3 alternately."""

    def __init__(self, channels: tuple[int, ...], up: type[nn.ConvTranspose3d]) -> None:
        super().__init__()
        levels = list(pairwise(channels))
        self.first = block(1, channels[0])
        self.down = nn.ModuleList(block(a, b, stride=2) for a, b in levels)
        self.up = nn.ModuleList(
            up(b, a, 3, stride=2, padding=1, output_padding=1) if level % 2 else up(b, a, 2, stride=2)
            for level, (a, b) in enumerate(levels)
        )
        self.join = nn.ModuleList(block(2 * a, a) for a, _ in levels)
        self.last = nn.Conv3d(channels[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.first(x)]
        for down in self.down:
            skips.append(down(skips[-1]))
        y = skips.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            y = join(torch.cat([up(y), skips.pop()], dim=1))
        return self.last(y)


def block(in_channels: int, out_channels: int, stride: int = 1) -> nn.Module:
    convolution = nn.Conv3d(in_channels, out_channels, 3, stride, padding=1)
    return nn.Sequential(convolution, nn.GroupNorm(min(8, out_channels), out_channels), nn.ReLU())


def spheres(settings: Settings, device: str) -> tuple[Tensor, Tensor]:
    """Returns volumes of noise with four brighter balls each, and masks of the balls, as [samples, 1, D, H, W]."""
    draw = torch.Generator().manual_seed(settings.seed)
    axis = torch.arange(settings.size) / settings.size
    grid = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"), dim=-1)
    centres = torch.rand(settings.samples, 4, 3, generator=draw)
    radii = 0.08 + 0.12 * torch.rand(settings.samples, 4, generator=draw)
    masks = torch.zeros(settings.samples, 1, *grid.shape[:-1])
    for sample in range(settings.samples):
        for centre, radius in zip(centres[sample], radii[sample], strict=True):
            masks[sample, 0][(grid - centre).norm(dim=-1) < radius] = 1
    volumes = masks + torch.randn(masks.shape, generator=draw)
    return volumes.to(device), masks.to(device)


def batches(settings: Settings, device: str) -> list[tuple[Tensor, Tensor]]:
    volumes, masks = spheres(settings, device)
    return list(zip(volumes.split(settings.batch), masks.split(settings.batch), strict=True))


class Training:
    """Trains a network with its optimizer and its data, one step at a time."""

    def __init__(self, kind: str, settings: Settings, device: str) -> None:
        torch.manual_seed(settings.seed)
        self.network = UNet(settings.channels, KINDS[kind]).to(device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), settings.learning_rate)
        self.batches = batches(settings, device)
        self.count = 0

    def step(self) -> Tensor:
        x, target = self.batches[self.count % len(self.batches)]
        self.count += 1
        self.optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(self.network(x), target)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def losses(kind: str, settings: Settings, device: str, dtype: str) -> list[float]:
    """Returns the loss of every step of a training run with deterministic algorithms."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with precision(dtype):
            training = Training(kind, settings, device)
            return torch.stack([training.step() for _ in range(settings.steps)]).tolist()
    finally:
        torch.use_deterministic_algorithms(before)


def step_ms(settings: Settings, device: str, dtype: str, steps: int = 30) -> dict[str, float]:
    """Returns median milliseconds of a step with `cudnn.benchmark`; steps of ours and PyTorch's alternate."""
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with precision(dtype), cudnn_benchmark(True):
        trainings = {kind: Training(kind, settings, device) for kind in KINDS}
        for number in range(steps + 3):
            for kind, training in trainings.items():
                synchronize(device)
                started = time.perf_counter()
                training.step()
                synchronize(device)
                if number >= 3:  # the first three steps warm up: they compile and choose algorithms
                    times[kind].append(1e3 * (time.perf_counter() - started))
    return {kind: statistics.median(found) for kind, found in times.items()}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def difference(a: list[float], b: list[float]) -> float:
    """Returns the mean over the steps of the absolute differences."""
    return statistics.mean(abs(x - y) for x, y in zip(a, b, strict=True))


def compare(settings: Settings, device: str, dtype: str = "tf32", timed: bool = True) -> dict[str, Any]:
    """Runs all trainings, and compares their losses and step times."""
    runs = {
        "ours": losses("ours", settings, device, dtype),
        "ours again": losses("ours", settings, device, dtype),
        "torch": losses("torch", settings, device, dtype),
        "torch, strict float32": losses("torch", settings, device, "float32"),
    }
    noise = difference(runs["torch"], runs["torch, strict float32"])
    apart = difference(runs["ours"], runs["torch"])
    return {
        "machine": describe_machine(),
        "settings": asdict(settings) | {"dtype": dtype, "device": device},
        "losses": runs,
        "bitwise": runs["ours"] == runs["ours again"],
        "difference": apart,
        "noise": noise,
        "agree": apart <= NOISE * noise,
        "step_ms": step_ms(settings, device, dtype) if timed else {},
    }


def show(found: dict[str, Any], console: Console) -> None:
    table = Table(title=f"A 3D U-Net, {found['settings']['steps']} steps, {found['settings']['dtype']}")
    for heading in ("layers", "first loss", "last loss", "ms per step"):
        table.add_column(heading, justify="left" if heading == "layers" else "right")
    for name, run in found["losses"].items():
        ms = found["step_ms"].get(name)
        table.add_row(name, f"{run[0]:.6f}", f"{run[-1]:.6f}", "" if ms is None else f"{ms:.2f}")
    console.print(table)
    console.print(f"two runs of ours are {'' if found['bitwise'] else 'NOT '}the same in every bit")
    verdict = "within" if found["agree"] else "NOT within"
    console.print(
        f"losses of ours and PyTorch's differ by {found['difference']:.2e} on average, PyTorch's TF32 and float32 by "
        f"{found['noise']:.2e}: {verdict} the noise"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--size", type=int, default=Settings.size, help="edge of the volumes")
    parser.add_argument("--batch", type=int, default=Settings.batch)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("training is compared on a GPU, and none is visible")
    settings = Settings(steps=arguments.steps, size=arguments.size, batch=arguments.batch)
    with tconv3d.use_backend("cuda"):
        found = compare(settings, "cuda")
    if arguments.json is not None:
        write_json(found, arguments.json)
    show(found, Console())
    return 0 if found["bitwise"] and found["agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
