"""What is compiled of a layer for volumes of all sizes: a few builds, its repertoire.

The first volume of a layer that a process meets is planned for itself. Every other one gets, of the first one's build
and those of the two typical volumes that are nearest in size, the one that the model likes best. So a build follows
from the layer, the first volume and the volume at hand, and from nothing else: not from the order of other calls, not
from what happens to be compiled. And builds are few, so that they can be compiled before they are needed
(`background`).

Knows nothing of what a build is.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any, Generic, TypeVar

from . import cache

# Batches and edges of typical volumes. By the models, volumes of 100 to 3 million positions take 2% longer with what
# is best for these than with what is best for themselves.
TYPICAL = ((1, 4), (8, 4), (1, 8), (1, 12), (1, 16), (2, 16), (8, 16), (1, 64), (16, 32), (1, 96))
NEAREST = 2  # of them that a volume chooses from: one takes 16% longer, three are no better
AS_GOOD = 1.03  # times the predicted time of the best: as good, as far as models can tell

Layer = TypeVar("Layer", bound=Hashable)
Volume = TypeVar("Volume")
Choice = TypeVar("Choice", bound=Hashable)
Found = TypeVar("Found")


_remembered: list[dict[Any, Any]] = []  # all that depends on which volume came first


class Repertoire(Generic[Layer, Volume, Choice]):
    """Of all layers of a kernel family."""

    def __init__(self) -> None:
        self._first: dict[Layer, tuple[Volume, Choice]] = {}
        _remembered.append(self._first)

    def choose(
        self,
        layer: Layer,
        volume: Volume,
        own: Callable[[], Choice | None],
        typical: Callable[[], Iterable[Choice]],
        cost: Callable[[Choice, float], float],
    ) -> Choice | None:
        """`own`: the best for this volume; `typical`: those of typical volumes, the nearest first; `cost`: for this
        volume, or infinite, where a choice does not fit it or takes longer than the least so far."""
        first = None if _alone.get() else self._first.get(layer)
        if first is None and not _another.get():
            found = own()
            if found is not None:
                self._first.setdefault(layer, (volume, found))
            return found
        if first is not None and first[0] == volume and cost(first[1], inf) < inf:
            return first[1]
        costs = {first[1]: cost(first[1], inf)} if first else {}
        least = min(costs.values(), default=inf)
        for number, choice in enumerate(typical()):
            if number >= (1 if _alone.get() else NEAREST) and least < inf:
                break
            if choice not in costs:
                costs[choice] = cost(choice, least)
                least = min(least, costs[choice])
        if least == inf:
            return own()
        return next(choice for choice in costs if costs[choice] <= AS_GOOD * least)

    def forget(self) -> None:
        """The next volume of every layer is its first."""
        self._first.clear()


# Of a layer another family may have had the first volume: then this one's first is another volume.
_met: dict[Hashable, object] = {}
_remembered.append(_met)
_another: ContextVar[bool] = ContextVar("another volume than the first of its layer", default=False)

_alone: ContextVar[bool] = ContextVar("the nearest typical volume alone", default=False)


@contextmanager
def meeting(layer: Hashable, volume: object) -> Iterator[None]:
    """While a call is planned."""
    token = _another.set(_alone.get() or _met.setdefault(layer, volume) != volume)
    try:
        yield
    finally:
        _another.reset(token)


@contextmanager
def typical_builds() -> Iterator[None]:
    """While every volume gets the build of the nearest typical one. For those who want to see all builds; to be
    forgotten afterwards."""
    tokens = _another.set(True), _alone.set(True)
    try:
        yield
    finally:
        _another.reset(tokens[0])
        _alone.reset(tokens[1])


@contextmanager
def aside() -> Iterator[None]:
    """While somebody only asks: a volume that is met meanwhile is no layer's first."""
    before = [dict(each) for each in _remembered]
    try:
        yield
    finally:
        for each, was in zip(_remembered, before, strict=False):
            each.clear()
            each.update(was)


def forget() -> None:
    """The next volume of every layer is the first that planners meet."""
    _met.clear()


def nearest(positions: int, volumes: Iterable[tuple[int, Found]]) -> list[Found]:
    """Volumes, each given with its number of positions, in the order of how near that is to so many."""
    near = sorted(volumes, key=lambda each: max(each[0], positions) / max(1, min(each[0], positions)))
    return [volume for _, volume in near]


def searched(name: str, settings: object, search: Callable[[], Choice]) -> Choice:
    """What a search found, kept in the disk cache: it takes a tenth of a second and more."""
    key = cache.key(name, _sources(), repr(settings))
    found: Choice = pickle.loads(cache.get(key, ".choice", lambda: pickle.dumps(search())))
    return found


@lru_cache(maxsize=1)
def _sources() -> bytes:
    """What a search depends on beside its arguments: the programs that make it."""
    here = Path(__file__).parent
    programs = (here / "geometry.py", *sorted(here.glob("*_planner.py")), *sorted(here.glob("*_model.py")))
    return b"".join(path.read_bytes() for path in programs)
