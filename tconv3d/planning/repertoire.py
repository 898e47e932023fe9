"""Chooses among a few builds of a layer's kernel, the layer's repertoire, for volumes of all sizes.

The first volume of a layer in a process gets the best build for itself. Every other volume gets the build with the
least predicted time out of three: the first volume's build, and the builds of the two typical volumes nearest in
size. A choice therefore depends on the layer, the first volume and the present volume alone, and not on the order of
other calls or on what is already compiled. Builds are few, so that they can be compiled in the background before they
are needed (`background`).

This module knows nothing of what a build is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from math import inf, prod
from typing import Any, Generic, TypeVar

from ..runtime import cache, plain, sources
from .problem import Problem, Strides, channels_last_strides, contiguous_strides, is_channels_last

# Typical volumes are cubes, given as (batch size, edge in positions). By the planners' models, volumes of 100 to
# 3 million positions take 2% longer with the builds of these volumes than with their own best builds.
TYPICAL = ((1, 4), (8, 4), (1, 8), (1, 12), (1, 16), (2, 16), (8, 16), (1, 64), (16, 32), (1, 96))
NEAREST = 2  # number of typical volumes to choose from: by the models, one takes 16% longer, three are no better
AS_GOOD = 1.03  # ratio of predicted times up to which two builds count as equally fast

Layer = TypeVar("Layer", bound=Hashable)
Volume = TypeVar("Volume")
Choice = TypeVar("Choice", bound=Hashable)
Found = TypeVar("Found")


_remembered: list[dict[Any, Any]] = []  # all tables that depend on which volume came first


class Repertoire(Generic[Layer, Volume, Choice]):
    """Remembers, for every layer of a kernel family, the first volume and its build."""

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
        """Returns the build for a volume of a layer, or None if there is none.

        `own` returns the best build for this volume; `typical` the builds of typical volumes, the nearest first.
        `cost(choice, least)` is the predicted time for this volume, or infinite if the build does not fit the volume
        or takes longer than `least`.
        """
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
        """Forgets all first volumes, so that the next volume of every layer counts as the first."""
        self._first.clear()


# First volume of each layer, whichever family took it. A family may get its own first volume of the layer later;
# `_another` then tells it that this volume is not the first of the layer.
_met: dict[Hashable, object] = {}
_remembered.append(_met)
_another: ContextVar[bool] = ContextVar("another volume than the first of its layer", default=False)

_alone: ContextVar[bool] = ContextVar("the nearest typical volume alone", default=False)


@contextmanager
def meeting(layer: Hashable, volume: object) -> Iterator[None]:
    """Tells planners, while a call is planned, whether its volume is the first of its layer."""
    token = _another.set(_alone.get() or _met.setdefault(layer, volume) != volume)
    try:
        yield
    finally:
        _another.reset(token)


@contextmanager
def typical_builds() -> Iterator[None]:
    """Gives every volume the build of the nearest typical volume, for callers that want to see all typical builds.

    Callers must call `planner.forget` afterwards.
    """
    tokens = _another.set(True), _alone.set(True)
    try:
        yield
    finally:
        _another.reset(tokens[0])
        _alone.reset(tokens[1])


@contextmanager
def aside() -> Iterator[None]:
    """Restores all first volumes at the end, so that plans made only for information have no effect."""
    before = [dict(each) for each in _remembered]
    try:
        yield
    finally:
        for each, was in zip(_remembered, before, strict=False):
            each.clear()
            each.update(was)


def forget() -> None:
    """Forgets the first volume of every layer; `Repertoire.forget` forgets the builds."""
    _met.clear()


def nearest(positions: int, volumes: Iterable[tuple[int, Found]]) -> list[Found]:
    """Returns volumes, each given with its number of positions, sorted by the ratio of this number to `positions`."""
    near = sorted(volumes, key=lambda each: max(each[0], positions) / max(1, min(each[0], positions)))
    return [volume for _, volume in near]


def typical_problems(problem: Problem) -> list[Problem]:
    """Returns a layer's pass over typical volumes in the same memory layouts, the nearest in size first."""
    g, found = problem.geometry, []
    for batch, edge in TYPICAL:
        size = (edge, edge, edge)
        if min(g.output_size(size)) < 1:
            continue
        x, y = (batch, g.in_channels, *size), (batch, g.out_channels, *g.output_size(size))
        input, output = _strides_like(problem.input, x), _strides_like(problem.output, y)
        found.append(replace(problem, batch=batch, input_size=size, input=input, output=output))
    positions = problem.batch * prod(problem.input_size)
    return nearest(positions, ((each.batch * prod(each.input_size), each) for each in found))


def _strides_like(given: Strides, shape: tuple[int, ...]) -> Strides:
    """Returns strides of a dense tensor, with channels as neighbours in memory if they are in `given`.

    A single channel may be one of a channels-last tensor, with neighbours along w apart: so it is in the result.
    """
    if given[1] != 1:
        return contiguous_strides(shape)
    batch, channels, *size = shape
    return channels_last_strides((batch, max(channels, 2) if is_channels_last(given) else channels, *size))


def searched(planner: str, settings: object, kind: Any, search: Callable[[], Choice]) -> Choice:
    """Returns the result of a planner's search, and stores it in the disk cache: a search takes up to 0.1 s.

    `planner` is the name of the module that searches, `settings` has everything else that the result depends on, and
    `kind` is the type of the result.
    """
    key = cache.key("choice", sources.program(planner), repr(settings))

    def build() -> bytes:
        return plain.dumps(search()).encode()

    try:
        found: Choice = plain.loads(cache.get(key, ".json", build), kind)
    except ValueError:  # the entry does not describe a value of type `kind`
        cache.put(key, ".json", build())
        found = plain.loads(cache.get(key, ".json", build), kind)
    return found
