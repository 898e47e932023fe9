"""Places tensors between guards, which detect stores outside of tensors and, in the emulator, loads too.

On the CPU a tensor lies in pages of its own between two pages without access rights, as close to one of them as its
offset from a multiple of 16 bytes allows. On a GPU it lies in the middle of a larger buffer. All bytes outside of
tensors are 255, which is NaN in every type, so that a value loaded there shows in the result.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _len_torch_dispatch_stack

PAGE = mmap.PAGESIZE
GPU_GUARD_BYTES = 1 << 16  # bytes on either side of a tensor
ALIGNMENT = 16  # bytes; kernels and planners rely on this alignment of tensors that PyTorch allocates
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class _Block:
    name: str
    raw: Tensor  # bytes of the tensor and of the memory around it that is checked
    start: int
    stop: int
    before: Tensor | None = None  # bytes that must stay as they are; None if the tensor may be written


class Guards:
    """Holds all tensors of one case."""

    def __init__(self, device: str, at_end: bool) -> None:
        self._device, self._at_end = device, at_end
        self._blocks: list[_Block] = []

    def place(
        self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, offset: int = 0
    ) -> Tensor:
        """Returns a new tensor full of NaN, `offset` elements after a multiple of 16 bytes."""
        empty = 0 in shape
        extent = 0 if empty else 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        size, shift = extent * dtype.itemsize, offset * dtype.itemsize % ALIGNMENT
        if self._device == "cpu":
            raw = _guarded_pages(size + ALIGNMENT)
            room = raw.numel() - size
            start = (room - shift) // ALIGNMENT * ALIGNMENT + shift if self._at_end else shift
        else:
            start = GPU_GUARD_BYTES + shift
            total = -(-(size + shift) // ALIGNMENT) * ALIGNMENT + 2 * GPU_GUARD_BYTES
            raw = torch.full((total,), 255, dtype=torch.uint8, device=self._device)
        self._blocks.append(_Block(name, raw, start, start + size))
        return raw.view(dtype).as_strided(shape, strides, start // dtype.itemsize)

    def seal(self) -> None:
        """Makes all tensors placed so far read-only for `damage`."""
        for block in self._blocks:
            block.before = block.raw.clone()

    def damage(self) -> str | None:
        """Describes the bytes that were written although they must not be, or returns None if there are none."""
        for block in self._blocks:
            if block.before is None:
                changed = block.raw != 255
                changed[block.start : block.stop] = False
            else:
                changed = block.raw != block.before
            if changed.any():
                first = int(changed.nonzero()[0])
                return (
                    f"{int(changed.sum())} bytes changed outside of what may be written: first {first - block.start} "
                    f"bytes from the start of {block.name} of {block.stop - block.start} bytes"
                )
        return None

    @contextlib.contextmanager
    def around_results(self, short: bool = False) -> Iterator[None]:
        """Places results, statistics and workspaces that the package allocates between guards.

        `short` makes the allocation of the first workspace fail for lack of memory. Tensors without data, by which
        tails are traced, are allocated as usual.
        """
        refusals = [torch.OutOfMemoryError("the fuzz refuses the first workspace")] if short else []
        usual = torch.empty_strided, torch.empty

        def empty_strided(size: Any, stride: Any, *, dtype: torch.dtype, device: Any, **others: Any) -> Tensor:
            if _len_torch_dispatch_stack() or others or torch.device(device).type == "meta":
                return usual[0](size, stride, dtype=dtype, device=device, **others)
            return self.place("a result", tuple(size), tuple(stride), dtype)

        def empty(size: Any, *, dtype: torch.dtype | None, device: Any, **others: Any) -> Tensor:
            if _len_torch_dispatch_stack() or dtype is None or others or torch.device(device).type == "meta":
                return usual[1](size, dtype=dtype, device=device, **others)
            if refusals:
                raise refusals.pop()
            return self._dense("a workspace", size, dtype)

        def new_empty(like: Tensor, size: Any, dtype: torch.dtype | None = None) -> Tensor:
            return self._dense("a result", size, dtype or like.dtype)

        with (
            patch.object(torch, "empty_strided", empty_strided),
            patch.object(torch, "empty", empty),
            patch.object(torch.Tensor, "new_empty", new_empty),
        ):
            yield

    def _dense(self, name: str, size: Any, dtype: torch.dtype) -> Tensor:
        shape = (size,) if isinstance(size, int) else tuple(size)
        return self.place(name, shape, torch.zeros(1).expand(shape).contiguous().stride(), dtype)


def _guarded_pages(size: int) -> Tensor:
    """Returns whole pages of at least `size` bytes, all 255, between two pages that fault when accessed."""
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (address, address + (pages + 1) * PAGE):
        if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect of a guard page failed")
    return torch.frombuffer(memory, dtype=torch.uint8, offset=PAGE, count=pages * PAGE).fill_(255)
