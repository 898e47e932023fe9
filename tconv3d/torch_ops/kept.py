"""Packed weights, kept between calls that want no gradient for as long as the weight is the same.

The same weight is the same tensor, over the same memory, in the same version: PyTorch counts what is written to a
tensor. The first call with a version packs it for itself and is noted; the second packs into memory that is kept, so
that a weight which is used once costs nothing. What is kept is used on the stream that packed it, and no other.

Some writes PyTorch does not count: those through `.data`, those of fused optimizers, of CUDA graphs and of other
libraries. So all is forgotten when an optimizer steps or a layer is switched between `train` and `eval`, a weight's
when it is trained, and a weight that a graph was captured with is never kept.

Knows tensors and addresses, not what packs or why.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

MOST_PACKS = 4  # of a weight: one for each stream, and for each layout that volumes of different sizes want
MOST_NOTES = 4096  # a program whose weights are always new must not fill the memory

Place = tuple[int, int]  # the stream, and what packs
State = tuple[int, int, int]  # of a weight: version, address, identity of its storage
Pack = tuple[int, Tensor]  # its address, and what owns it


class _Weight:
    """What is kept of one state of a weight. The reference to its storage makes the identity unique."""

    __slots__ = ("key", "packs", "reference", "state", "storage")

    def __init__(self, weight: Tensor, state: State) -> None:
        self.key = id(weight)
        self.reference = weakref.ref(weight, partial(_died, id(weight)))
        self.storage = StorageWeakRef(weight.untyped_storage())
        self.state = state
        self.packs: dict[Place, Pack] = {}


_kept: dict[int, _Weight] = {}  # by the weight's id
_noted: dict[tuple[int, Place], State] = {}
_captured: dict[int, StorageWeakRef] = {}  # storages that graphs may write, by identity
_lock = threading.RLock()  # of what adds and what forgets; a call that finds needs none
_forgotten = 0  # how often
_enabled = True


def keep_weights(enabled: bool) -> None:
    """Whether calls that want no gradient keep their packed weights, in all threads; they do unless told otherwise.

    What has been kept is forgotten either way: also the remedy after a write that PyTorch does not count, such as
    one through `weight.data`.
    """
    global _enabled
    if not isinstance(enabled, bool):
        raise TypeError(f"keep_weights() expected True or False, but got {enabled!r}")
    _enabled = enabled
    forget()


def forget() -> None:
    """The next call with any weight packs it."""
    global _forgotten
    with _lock:
        _forgotten += 1
        _kept.clear()
        _noted.clear()


def find(weight: Tensor, address: int, place: Place) -> Pack | None:
    """What is kept of the weight as it is now, for a call that wants no gradient and is not captured."""
    found = _kept.get(id(weight))
    if found is None or found.reference() is not weight:
        return None
    if found.state != (weight._version, address, weight.untyped_storage()._cdata):
        _drop(found)
        return None
    return found.packs.get(place)


class Promise:
    """Room for a pack that will be kept, once what packs it has been launched."""

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
                _watch_optimizers()
                found = _kept[id(self.weight)] = _Weight(self.weight, self.state)
            newest = list(found.packs.items())[1 - MOST_PACKS :]
            found.packs = {**dict(newest), self.place: self.pack}


def promise(weight: Tensor, address: int, place: Place, size: int) -> Promise | None:
    """Room for a call's pack, if it is to be kept: of the second call with the same state, and if that may be."""
    if not _enabled or weight.is_inference():  # which has no version
        return None
    storage = weight.untyped_storage()
    state = weight._version, address, storage._cdata
    note = id(weight), place
    if _noted.get(note) != state:
        if len(_noted) >= MOST_NOTES:
            _noted.clear()
        _noted[note] = state
        return None
    # A part of a larger buffer is written through that, which has versions of its own. And where PyTorch swaps
    # parameters on conversion, it insists that nobody has a reference to them, not even a weak one.
    apart = storage.nbytes() == weight.numel() * weight.element_size()
    if not apart or storage._cdata in _captured or torch.__future__.get_swap_module_params_on_conversion():
        return None
    try:
        pack = _allocate(size, weight.device)
    except torch.OutOfMemoryError:
        return None
    return Promise(weight, state, place, (pack.data_ptr(), pack))


def _allocate(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def captured(weight: Tensor, stream: int) -> bool:
    """Whether a graph is being captured: then what is kept of the weight is forgotten for good."""
    if _capturing(weight, stream):
        _give_up(weight)
        return True
    return False


def packed_for_itself(weight: Tensor) -> None:
    """In a call that keeps nothing, because a gradient is wanted: what trains a weight may not count versions."""
    if _kept:
        _kept.pop(id(weight), None)


def _capturing(weight: Tensor, stream: int) -> bool:
    if not stream:  # the default stream captures nothing
        return False
    if torch._C._cuda_isCurrentStreamCapturing():
        return True
    device = weight.get_device()
    if device == torch._C._cuda_getDevice():
        return False
    with torch.cuda.device(device):
        return torch._C._cuda_isCurrentStreamCapturing()


def _give_up(weight: Tensor) -> None:
    storage = weight.untyped_storage()
    if storage._cdata in _captured:
        return
    with _lock:
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
    if found is not None and found.reference is reference:  # not another tensor's, with the same id by now
        kept.pop(key, None)


_watching: list[Any] = []


def _watch_optimizers() -> None:
    if not _watching:
        _watching.append(register_optimizer_step_post_hook(lambda *_: forget()))
