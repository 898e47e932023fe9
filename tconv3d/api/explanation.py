"""Holds what `explain` finds out, and says it in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..families.pytorch.planner import KERNEL as PYTORCH


@dataclass(frozen=True)
class PassExplanation:
    """Explains one pass: its kernel, the reason for the choice, and the least time that the pass can take."""

    name: str
    kernel: str
    why: str
    passed_over: dict[str, str]  # for each kernel not taken: the predicted time of its offer, or its refusal
    tile: str
    launches: int  # number of launches; 0 if the launches of another pass compute this pass too
    workspace_bytes: int
    bytes: int
    flops: int
    floor_ms: float | None  # least time in milliseconds; None if the GPU's ceilings are not known
    bound_by: str | None
    kept_bytes: int = 0  # bytes of the packed weight that calls without gradients keep
    together: tuple[str, ...] = ()  # all passes that these launches compute, if there are several
    predicted_us: float | None = None  # predicted microseconds of the launches, for all passes that they compute
    pytorch_us: float | None = None  # predicted microseconds of PyTorch's offer, if it makes one
    measured: str = ""  # who won, and by what, if offers were timed; empty if the prediction decided
    measured_us: dict[str, float] = field(default_factory=dict)  # the timed offers with their microseconds
    packed: str = ""  # which of the kernels come from loaded packs, and from which; empty if none is loaded


@dataclass(frozen=True)
class AxisExplanation:
    """Lists the taps of one dimension as (tap, shift) pairs for each phase."""

    name: str
    phases: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class Explanation:
    """Holds the result of `explain`: `str()` of it is for people, `as_dict()` for programs."""

    layer: str
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    dtype: str
    precision: str
    layout: str
    gpu: str
    ceilings: str
    here: str  # what runs if the call is made now on this machine
    taps: int
    phases: int
    empty_phases: int
    axes: tuple[AxisExplanation, ...]
    passes: tuple[PassExplanation, ...]
    tail: tuple[str, ...] = ()  # what becomes of the operations that follow the convolution in a fused block

    @property
    def kernel(self) -> str:
        """The name of the forward pass's kernel."""
        return self.passes[0].kernel

    @property
    def choices(self) -> tuple[str, ...]:
        """Says in a line for the forward pass, and in one for the backward pass, who computes it and why."""
        groups = {"forward": self.passes[:1], "backward": self.passes[1:]}
        return tuple(f"{name}: {_choice(passes)}" for name, passes in groups.items() if passes)

    @property
    def text(self) -> str:
        return "\n".join(_lines(self))

    def __str__(self) -> str:
        return self.text

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def in_microseconds(time: float) -> str:
    """Writes a time with three digits, and one of a millisecond or more without an exponent."""
    return f"{time:.3g} us" if time < 999.5 else f"{time:.0f} us"


def _how_launched(p: PassExplanation) -> str:
    if p.kernel == PYTORCH:
        return "PyTorch launches its own kernels"
    together = f" of {', '.join(p.together)} together" if p.together else ""
    launches = f"{p.launches} launch{'' if p.launches == 1 else 'es'}"
    text = f"{launches}{together}, workspace {p.workspace_bytes / 1e6:.3g} MB"
    if not p.kept_bytes:
        return text
    less = ": one launch less" if p.launches > 1 else ""
    return f"{text}; without gradients {p.kept_bytes / 1e6:.3g} MB of packed weight are kept{less}"


def _predicted(p: PassExplanation) -> str:
    """Says the predicted time of a pass's launches, once for all passes that they compute."""
    if p.together and not p.launches:
        return f", comes with {p.together[0]}"
    others = [name for name in p.together if name != p.name]
    together = f" together with {' and '.join(others)}" if others else ""
    return "" if p.predicted_us is None else f", predicted to take {in_microseconds(p.predicted_us)}{together}"


def _choice(passes: Sequence[PassExplanation]) -> str:
    """Says who computes the passes of a call: by measurement, or by prediction beside PyTorch's."""
    first = passes[-1]  # the last passes of a fused block are the convolution's own
    names = " + ".join(dict.fromkeys(each.kernel for each in passes))
    if first.measured_us:
        return f"{names}, {first.measured}"
    predicted = {each.together or each.name: each.predicted_us for each in passes if each.predicted_us is not None}
    text = f"{names}, predicted to take {in_microseconds(sum(predicted.values()))}" if predicted else names
    if first.pytorch_us is None or first.kernel == PYTORCH:
        return text
    return f"{text}, PyTorch's operator {in_microseconds(first.pytorch_us)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _lines(e: Explanation) -> list[str]:
    def shape(values: tuple[int, ...]) -> str:
        return " x ".join(map(str, values))

    lines = [
        e.layer,
        f"  input {shape(e.input_shape)} -> output {shape(e.output_shape)}, {e.dtype}, {e.layout} ({e.precision})",
        f"  {_count(e.taps, 'tap')} in {_count(e.phases, 'phase')}"
        + (f", {e.empty_phases} of them empty: the bias alone" if e.empty_phases else ""),
    ]
    for axis in e.axes:
        phases = (
            f"phase {f}: " + (", ".join(f"tap {t} shift {s:+d}" for t, s in taps) or "none")
            for f, taps in enumerate(axis.phases)
        )
        lines.append(f"    {axis.name}: " + "; ".join(phases))
    lines += [f"  planned for {e.gpu}, ceilings {e.ceilings}", f"  this call, now: {e.here}"]
    told: set[tuple[tuple[str, ...], str, str]] = set()  # what was passed over for passes that run together
    for p in e.passes:
        passed_over = [(name, why) for name, why in p.passed_over.items() if (p.together, name, why) not in told]
        told |= {(p.together, name, why) for name, why in passed_over if p.together}
        floor = "" if p.floor_ms is None else f", floor {p.floor_ms:.3g} ms ({p.bound_by})"
        lines += [
            f"  {p.name}: {p.kernel} ({p.why}){_predicted(p)}",
            *([f"    {p.measured}"] if p.measured else []),
            *(f"    not {name}: {reason}" for name, reason in passed_over),
            *([f"    {p.tile}; {_how_launched(p)}"] if p.launches or not p.together else []),
            *([f"    {p.packed}"] if p.packed else []),
            f"    {p.bytes / 1e6:.4g} MB, {p.flops / 1e9:.4g} GFLOP{floor}",
        ]
    return [*lines, *(f"  tail, {text}" for text in e.tail)]
