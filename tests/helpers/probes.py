"""Makes kernels of a few lines, with which a test examines one behaviour of the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

Kernel: TypeAlias = Callable[..., None]


def probe_source(body: str, type: str = "int", before: str = "") -> str:
    return f"""
#pragma once
namespace tconv3d {{
struct Args {{
  {type} *a, *b, *c;
  long long unused;
}};
{before}
template <class Config>
__device__ void run(const Args& args) {{
  const int t = threadIdx.x;
  {body}
}}
}}  // namespace tconv3d
"""


def ints(*size: int) -> torch.Tensor:
    return torch.full(size, -7, dtype=torch.int32)
