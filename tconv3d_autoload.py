"""Is called by `import torch`, so that programs saved with tconv3d's operators say what they need.

PyTorch calls the entry points of the group `torch.backends` when it is imported. This one declares the operators of
tconv3d (`tconv3d/torch_ops/operators.py`), so that a process which loads such a program without `import tconv3d` is
told to import it. It loads that file alone, in a millisecond, because importing the package takes a thousand times as
long. Nothing that goes wrong here may stop `import torch`: the process then gets PyTorch's own message.
TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches all such entry points off.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path

NAME = "tconv3d_announced_operators"  # the name that tconv3d/torch_ops/operators.py looks for


def announce() -> None:
    """Declares the operators, unless the package is imported already."""
    if "tconv3d" in sys.modules or NAME in sys.modules:
        return
    with contextlib.suppress(Exception):
        path = Path(__file__).with_name("tconv3d") / "torch_ops" / "operators.py"
        spec = importlib.util.spec_from_file_location(NAME, path)
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            module.announce()
            sys.modules[NAME] = module
