"""The test of the tests: kernels broken on purpose, each of which the checks must catch.

A mutant is a copy of the kernels' sources with one piece of text replaced. Only the mutated kernel is taken from the
copy, and it runs in the emulator, on machines with a GPU too: what it does out of bounds stays in one process.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from layers import TABLE, TRAPS, Layer, check
from mutants import copy_headers, kernel_from, mutate
from preferred import only
from sanitizing import sanitized
from torch import Tensor

import tconv3d
from tconv3d import emulator

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")]

GUARD = 1 << 14  # elements before and after a result
ZONES = (slice(0, GUARD), slice(-GUARD, None))
SENTINEL = -12345.0
DIRECT, WEIGHT_GRAD = "direct", "direct_weight_grad"


@dataclass(frozen=True)
class Mutant:
    """`text` of a kernel replaced by `replacement`: the layer that shows it, and the words of the finding."""

    kernel: str
    text: str
    replacement: str
    layer: Layer
    finding: str


# Output sizes that strides do not divide: the planes of the last phases are shorter.
TWO_PHASES = Layer(2, 3, (2, 2, 3), (3, 3, 3), (2, 2, 2), (1, 1, 1))
THREE_PHASES = Layer(2, 3, (2, 2, 3), (2, 2, 4), (2, 1, 3))

MUTANTS = {
    "a wrong shift": Mutant(
        DIRECT,
        "qw[p] * C::kInputStepW + (kUnrollW ? 0 : C::kFirstOffsetW(phase_w)",
        "qw[p] * C::kInputStepW + (kUnrollW ? 1 : 1 + C::kFirstOffsetW(phase_w)",
        TABLE["gan"],
        "result: .* elements wrong",
    ),
    "a wrong shift of the weight gradient": Mutant(
        WEIGHT_GRAD,
        "tap_w * C::kDilationW - C::kPaddingW",
        "tap_w * C::kDilationW + C::kPaddingW",
        TABLE["gan"],
        "weight gradient: .* elements wrong",
    ),
    "no lower bound of a load": Mutant(
        DIRECT,
        "h + kH < args.x_size.h && w + kW >= 0 &&",
        "h + kH < args.x_size.h &&",
        TABLE["plain, no bias"],
        "result: .* elements wrong",
    ),
    "no upper bound of a load": Mutant(
        DIRECT, "&& w + kW < args.x_size.w;", ";", TABLE["plain, no bias"], "result: .* elements wrong"
    ),
    "no upper bound of a load of the weight gradient": Mutant(
        WEIGHT_GRAD, "w >= 0 && w < args.dy_size.w", "w >= 0", TABLE["gan"], "weight gradient: .* elements wrong"
    ),
    "no bound of a store along w": Mutant(
        DIRECT, " || w >= args.y_size.w) return;", ") return;", THREE_PHASES, "written outside the result"
    ),
    "no bound of the second store of a pair": Mutant(
        DIRECT, "if (w + 1 < args.y_size.w) y[step", "y[step", TWO_PHASES, "written outside the result"
    ),
    "no bound of a store along h": Mutant(
        DIRECT, "h >= args.y_size.h || w >=", "w >=", TWO_PHASES, "written outside the result"
    ),
    "no bound of the stored positions": Mutant(
        DIRECT, "if (n[p] < 0 || d >= ", "if (d >= ", TWO_PHASES, "written outside the result"
    ),
    "no bound of the stored channels": Mutant(
        DIRECT, "if (out + o >= C::kOutPerGroup) continue;", "", TWO_PHASES, "written outside the result"
    ),
    "phases without taps are not written": Mutant(
        DIRECT,
        "store_phase<kPair>(p, f);",
        """{
        bool fed = false;
        for (int j = 0; j < C::kTaps; ++j) fed |= C::kTapPhase(j) / kPair == f / kPair;
        if (fed) store_phase<kPair>(p, f);
      }""",
        TRAPS["empty phases"],
        "result: .* elements wrong",
    ),
    "a missing barrier": Mutant(
        DIRECT,
        "__syncthreads();  // all threads have read the previous stage",
        "",
        Layer(64, 4, (2, 2, 2), (5, 5, 5), bias=False, batch=1),
        "result: .* elements wrong",
    ),
}


@contextlib.contextmanager
def kernels_from(directory: Path, kernel: str) -> Iterator[None]:
    """The emulator takes one kernel from another directory, and the direct kernels take every layer."""
    with only("direct"), kernel_from(directory, kernel):
        yield


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Results lie between guard zones; what was written there is an error at the end."""
    empty_strided, buffers = torch.empty_strided, []

    def between_guards(size: tuple[int, ...], stride: tuple[int, ...], **kind: object) -> Tensor:
        extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        buffer = torch.full((extent + 2 * GUARD,), SENTINEL, **kind)  # type: ignore[call-overload]
        buffers.append(buffer)
        buffer[GUARD:-GUARD] = float("nan")
        return buffer.as_strided(size, stride, GUARD)

    torch.empty_strided = between_guards  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty_strided = empty_strided
    outside = sum(int((buffer[zone] != SENTINEL).sum()) for buffer in buffers for zone in ZONES)
    assert not outside, f"{outside} elements written outside the result"


def run_checks(layer: Layer) -> None:
    """Every pass against float64 between guard zones. The guards speak first: a wild store also hits inside."""
    before = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    try:
        with tconv3d.use_backend("emulator"), guarded():
            failure = None
            try:
                check(layer, torch.float32, "cpu")
            except AssertionError as error:
                failure = error
        if failure is not None:
            raise failure
    finally:
        torch.backends.cudnn.conv.fp32_precision = before  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    mutate(mutant.kernel, mutant.text, mutant.replacement, tmp_path / "kernels")
    with kernels_from(tmp_path / "kernels", mutant.kernel), pytest.raises(AssertionError, match=mutant.finding):
        run_checks(mutant.layer)


def test_the_kernels_themselves_pass(tmp_path: Path) -> None:
    """Without a mutation, the layers and guards that catch mutants find nothing."""
    copy_headers(tmp_path / "kernels")
    with kernels_from(tmp_path / "kernels", DIRECT):
        for layer in dict.fromkeys(mutant.layer for mutant in MUTANTS.values()):
            run_checks(layer)


# ---- AddressSanitizer finds what leaves no trace in the result

UNSEEN = Mutant(  # a value that is loaded out of bounds, and then not used
    DIRECT,
    "if (lines.inside[p] >> i & 1) loaded = load_vector<C::kVector>(lines.at[p] + offset);",
    "loaded = load_vector<C::kVector>(lines.at[p] + offset); if (!(lines.inside[p] >> i & 1)) loaded = {};",
    TABLE["plain, no bias"],
    "heap-buffer-overflow",
)


def test_address_sanitizer_sees_a_load_whose_value_is_not_used(tmp_path: Path) -> None:
    environment = sanitized("address")
    mutate(UNSEEN.kernel, UNSEEN.text, UNSEEN.replacement, tmp_path / "kernels")
    with kernels_from(tmp_path / "kernels", UNSEEN.kernel):
        run_checks(UNSEEN.layer)  # without it nothing is found
    command = [sys.executable, __file__, str(tmp_path / "kernels")]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode != 0
    assert UNSEEN.finding in child.stderr and "direct.cuh" in child.stderr


def main() -> None:
    """The forward pass of the mutant, in a process with AddressSanitizer."""
    x, w = UNSEEN.layer.operands(torch.float32, "cpu")
    with kernels_from(Path(sys.argv[1]), UNSEEN.kernel), tconv3d.use_backend("emulator"):
        tconv3d.conv_transpose3d(x, w, None, *UNSEEN.layer.settings)


if __name__ == "__main__":
    main()
