"""Caches packed weights ("kept" packs) and casts of parameters between calls without gradients.

They are used as long as the weight does not change: tensor object, address, storage and version counter are the same.
PyTorch increments the counter with every write. The first call with a version packs the weight into the workspace and
is noted. The second call packs into memory that is kept, so that a weight used once costs no memory. A kept pack is
used only on the stream that packed it.

PyTorch does not count some writes: writes through `.data`, by fused optimizers, by `fully_shard`, by CUDA graphs and
by other libraries. Therefore all packs are dropped when an optimizer steps or a layer switches between `train` and
`eval`, the packs of one weight when a call with gradients uses it, and neither a weight that was used during graph
capture nor one that `fully_shard` gathers is ever kept.

This module knows tensors and addresses, but neither the kernels that pack nor their layouts.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

MOST_PACKS = 4  # kept packs per weight: one for each stream and packed layout, which depends on the volume
MOST_NOTES = 4096  # entries of `_noted`, limited because some programs never use a weight twice

Place = tuple[int, int]  # the stream handle, and the number of the packed layout (`executor.Packing`)
State = tuple[int, int, int]  # a weight's version counter, address, and storage identity
Pack = tuple[int, Tensor]  # the address of the packed weight, and the tensor that owns the memory


class _Weight:
    """Holds the packs of one state of a weight. The reference to the storage keeps its identity unique."""

    __slots__ = ("key", "packs", "reference", "state", "storage")

    def __init__(self, weight: Tensor, state: State) -> None:
        self.key = id(weight)
        self.reference = weakref.ref(weight, partial(_died, id(weight)))
        self.storage = StorageWeakRef(weight.untyped_storage())
        self.state = state
        self.packs: dict[Place, Pack] = {}


_kept: dict[int, _Weight] = {}  # the key is the weight's id()
_noted: dict[tuple[int, Place], State] = {}
_captured: dict[int, StorageWeakRef] = {}  # storages that CUDA graphs may write; the key is the storage identity
_lock = threading.RLock()  # held while packs are added or dropped; `find` needs no lock
_forgotten = 0  # number of calls of `forget`
_enabled = True


def keep_weights(enabled: bool) -> None:
    """Sets whether calls without gradients keep packed weights, in all threads. The default is True.

    Both values drop all kept packs, so a call of this function is also the remedy after a write that PyTorch does not
    count, such as a write through `weight.data`.
    """
    global _enabled
    if not isinstance(enabled, bool):
        raise TypeError(f"keep_weights() expected True or False, but got {enabled!r}")
    _enabled = enabled
    forget()


def forget() -> None:
    """Drops all kept packs, so that the next call with any weight packs again."""
    global _forgotten
    with _lock:
        _forgotten += 1
        _kept.clear()
        _noted.clear()


def forgotten() -> int:
    """Returns how often packs were dropped: what else was computed from weights is then out of date as well."""
    return _forgotten


def find(weight: Tensor, address: int, place: Place) -> Pack | None:
    """Returns the kept pack of the weight's present state, or None. Not for calls with gradients or under capture."""
    found = _kept.get(id(weight))
    if found is None or found.reference() is not weight:
        return None
    if found.state != (weight._version, address, weight.untyped_storage()._cdata):
        _drop(found)
        return None
    return found.packs.get(place)


class Promise:
    """Holds the memory of a pack; the caller calls `keep` after it has launched the packing kernel."""

    __slots__ = ("forgotten", "pack", "place", "state", "weight")

    def __init__(self, weight: Tensor, state: State, place: Place, pack: Pack) -> None:
        self.weight, self.state, self.place, self.pack = weight, state, place, pack
        self.forgotten = _forgotten

    def keep(self) -> None:
        with _lock:
            if self.forgotten != _forgotten or self.state[2] in _captured:
                return
            found = _kept.get(id(self.weight))
            if found is None or found.reference() is not self.weight or found.state != self.state:
                watch_optimizers()
                found = _kept[id(self.weight)] = _Weight(self.weight, self.state)
            newest = list(found.packs.items())[1 - MOST_PACKS :]
            found.packs = {**dict(newest), self.place: self.pack}


def promise(weight: Tensor, address: int, place: Place, size: int) -> Promise | None:
    """Allocates memory for a pack from the second call with the same state on; None if it must not be kept."""
    return promise_of(weight, address, place, lambda: _allocate(size, weight.device))


def promise_of(weight: Tensor, address: int, place: Place, make: Callable[[], Tensor]) -> Promise | None:
    """Calls `make` for the pack from the second call with the same state on; None if it must not be kept."""
    if not _enabled or weight.is_inference():  # inference tensors have no version counter
        return None
    storage = weight.untyped_storage()
    state = weight._version, address, storage._cdata
    note = id(weight), place
    if _noted.get(note) != state:
        if len(_noted) >= MOST_NOTES:
            _noted.clear()
        _noted[note] = state
        return None
    if not _counts_writes(weight, storage):
        return None
    try:
        pack = make()
    except torch.OutOfMemoryError:
        return None
    return Promise(weight, state, place, (pack.data_ptr(), pack))


def may_be_kept(tensor: Tensor, stream: int) -> bool:
    """Tells whether what is computed from a tensor may be kept while its version counter and `forgotten` stay."""
    if not _enabled or tensor.is_inference() or captured(tensor, stream):
        return False
    return _counts_writes(tensor, tensor.untyped_storage())


def _counts_writes(weight: Tensor, storage: torch.UntypedStorage) -> bool:
    """Tells whether the version counter of a weight counts all writes that can be expected, as far as is known.

    A weight that is part of a larger buffer may be written through other tensors, which have version counters of
    their own. If PyTorch swaps parameters on conversion, it forbids weak references to them.
    """
    apart = storage.nbytes() == weight.numel() * weight.element_size() and not _may_be_gathered(storage)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    return apart and storage._cdata not in _captured and not swaps


def _may_be_gathered(storage: torch.UntypedStorage) -> bool:
    """Tells whether `fully_shard` may gather a parameter into this storage, which PyTorch does not count as a write.

    PyTorch gathers through a second tensor over the storage, in programs that have a process group. The storage of
    other weights has two references: the weight's and the one that `storage` is.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return torch._C._storage_Use_Count(storage._cdata) > 2


def _allocate(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def captured(weight: Tensor, stream: int) -> bool:
    """Tells whether a graph is being captured on the stream; if so, the weight is never kept again."""
    if _capturing(weight, stream):
        _give_up(weight)
        return True
    return False


def packed_for_itself(weight: Tensor) -> None:
    """Drops the weight's packs when a call with gradients uses it: the optimizer's writes may not be counted."""
    if _kept:
        _kept.pop(id(weight), None)


def _capturing(weight: Tensor, stream: int) -> bool:
    if not stream:  # the default stream cannot be captured
        return False
    if torch._C._cuda_isCurrentStreamCapturing():
        return True
    device = weight.get_device()
    if device == torch._C._cuda_getDevice():
        return False
    with torch.cuda.device(device):
        return torch._C._cuda_isCurrentStreamCapturing()


def _give_up(weight: Tensor) -> None:
    global _forgotten
    storage = weight.untyped_storage()
    if storage._cdata in _captured:
        return
    with _lock:
        _forgotten += 1
        for key in [key for key, reference in _captured.items() if reference.expired()]:
            del _captured[key]
        _captured[storage._cdata] = StorageWeakRef(storage)
        for found in [found for found in _kept.values() if found.state[2] == storage._cdata]:
            _drop(found)


def _drop(found: _Weight) -> None:
    if _kept.get(found.key) is found:
        _kept.pop(found.key, None)


def _died(key: int, reference: weakref.ref[Tensor], kept: dict[int, _Weight] = _kept) -> None:
    found = kept.get(key)
    if found is not None and found.reference is reference:  # a new tensor may have got the same id()
        kept.pop(key, None)


_watching: list[Any] = []


def watch_optimizers() -> None:
    """Makes every step of an optimizer drop all packs; whoever asks for `forgotten` must have called this before."""
    if not _watching:
        _watching.append(register_optimizer_step_post_hook(lambda *_: forget()))
