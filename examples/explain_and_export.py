"""Asks which kernels would run a layer on an H200, and writes them as one Python file. Needs no GPU.

    python examples/explain_and_export.py [FILE]

The file imports PyTorch and the standard library alone, and can be used in a project that does not have tconv3d.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

import tconv3d
from tconv3d.tools.export import export


def main(target: Path) -> None:
    layer = tconv3d.ConvTranspose3d(64, 32, kernel_size=2, stride=2)
    x = torch.empty(1, 64, 32, 32, 32)
    print(tconv3d.explain(layer, x, gpu="H200"))
    words = "64, 32, kernel_size=2, stride=2, size=32"
    target.write_text(export(words, dtypes=["bfloat16"], layouts=["contiguous"], gpus=["H200"]), encoding="utf-8")
    print(f"wrote {target.name}: {len(target.read_text().splitlines())} lines with the layer's kernels and gradients")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder) / "layer.py")
