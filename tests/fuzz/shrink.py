"""Reduces a failing case to the simplest one that still fails.

Every simpler case runs in a process of its own (`workers`), so that crashes and hangs shrink like wrong results. A
failure may need the cases before it, because the first volume of a layer decides which kernels later volumes get.
Therefore a list of cases is shrunk, of which the last one fails.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from layers import Layer, Triple

from .case import PLAIN, Case, Memory
from .draw import fits, has

SECONDS = 90.0  # seconds for one failure
CASE_TIMEOUT = 40.0  # seconds for one case while shrinking

Cases = list[Case]
Fails = Callable[[Cases], str | None]  # returns the message of a failure


def shrink(cases: Cases, message: str, fails: Fails, seconds: float = SECONDS) -> tuple[Cases, str]:
    """Returns the simplest cases found within `seconds` that fail in the same way, and their message."""
    end, kind = time.monotonic() + seconds, kind_of(message)

    def still(candidate: Cases) -> str | None:
        found = fails(candidate)
        return found if found is not None and kind_of(found) == kind else None

    *before, last = cases
    for needed in ([], *([each] for each in before), before):  # alone, after one other case, after all
        if (found := still([*needed, last])) is not None:
            return _simplest([*needed, last], found, still, end)
    return cases, message


def _simplest(cases: Cases, message: str, fails: Fails, end: float) -> tuple[Cases, str]:
    tried = set()
    improved = True
    while improved:
        improved = False
        for change in changes(cases[-1]):
            simpler = [changed for case in cases if (changed := change(case)) is not None]
            if len(simpler) < len(cases) or simpler == cases or tuple(simpler) in tried:
                continue
            if time.monotonic() > end:
                return cases, message
            tried.add(tuple(simpler))
            if (found := fails(simpler)) is not None:
                cases, message, improved = simpler, found, True
                break
    return cases, message


def kind_of(message: str) -> str:
    """Returns the kind of a failure: its exception, and the kernel if one was running, without numbers."""
    kernel = re.search(r"in kernel (\w+)", message)
    return message.partition(":")[0] + (f" in {kernel[1]}" if kernel else "")


# ---- simplifying changes

Change = Callable[[Case], Case | None]


def changes(case: Case) -> Iterator[Change]:
    """Yields changes that make a case simpler, large ones first; a change returns None if its case is illegal."""
    for values in _case_changes(case):
        yield _legal(lambda each, values=values: replace(each, **values))
    for values in _layer_changes(case.layer):
        yield _legal(lambda each, values=values: each.with_layer(**values))


def _legal(change: Callable[[Case], Case]) -> Change:
    def checked(case: Case) -> Case | None:
        changed = change(case)
        changed = replace(changed, wanted=tuple(name for name in changed.wanted if has(changed, name)))
        layer = changed.layer
        rows = zip(layer.output_padding, layer.stride, layer.dilation, strict=True)
        legal = (
            layer.in_channels % layer.groups == 0
            and layer.out_channels % layer.groups == 0
            and layer.out_channels % changed.norm_groups == 0
            and all(extra < max(stride, dilation) for extra, stride, dilation in rows)
            and fits(changed)
        )
        return changed if legal else None

    return checked


def _case_changes(case: Case) -> Iterator[dict[str, Any]]:
    if case.wanted:
        yield {"wanted": ()}
    for name in case.wanted:
        yield {"wanted": (name,)}
    for field in fields(Case):
        if field.name not in ("layer", "dtype", "wanted"):
            yield {field.name: field.default}
    if case.epilogue == "norm":
        yield {"epilogue": "relu", "norm_groups": 1, "affine": True}
    if case.epilogue:
        yield {"epilogue": ""}
    for name in case.wanted:
        yield {"wanted": tuple(other for other in case.wanted if other != name)}
    for name in ("input", "weight", "grad", "vectors"):
        memory: Memory = getattr(case, name)
        for field in fields(Memory):
            yield {name: replace(memory, **{field.name: getattr(PLAIN, field.name)})}
    if case.calls > 2:
        yield {"calls": 2}


def _layer_changes(layer: Layer) -> Iterator[dict[str, Any]]:
    yield {"bias": False}
    yield from ({"batch": batch} for batch in (1, 2) if batch < layer.batch)
    if layer.groups > 1:
        ins, outs = layer.in_channels // layer.groups, layer.out_channels // layer.groups
        yield from (
            {"groups": n, "in_channels": n * ins, "out_channels": n * outs} for n in (1, 2) if n < layer.groups
        )
    for name in ("dilation", "padding", "output_padding", "stride", "kernel", "size"):
        yield from ({name: values} for values in _smaller(getattr(layer, name), 0 if "padding" in name else 1))
    for name in ("in_channels", "out_channels"):
        channels = getattr(layer, name)
        yield from ({name: n} for n in (1, 2, 4, 8, 16, 32, 64, channels // 2, channels - 1) if 0 < n < channels)


def _smaller(values: Triple, least: int) -> Iterator[Triple]:
    for at, value in enumerate(values):
        for new in sorted({least, value // 2, value - 2, value - 1}):
            if least <= new < value:
                yield (*values[:at], new, *values[at + 1 :])  # type: ignore[misc]
