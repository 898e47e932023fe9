"""Failures that the fuzz has found, and the fuzz itself: cases from fixed seeds, and every part of it."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fuzz import draw, shrink
from fuzz.case import GRADIENTS, RESIDUALS, TAILS, Case, Memory, line, parse
from fuzz.families import FAVOURED
from fuzz.guards import PAGE, Guards
from fuzz.search import Search
from fuzz.workers import Worker
from layers import Layer
from sanitizing import sanitized

from tconv3d import emulator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = 18  # cases of each fixed seed, a minute and a half of two cores for both seeds
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not emulator.available(), reason="there is neither a GPU nor a C++ compiler"
)

# Cases that failed once, each a list that runs in one process. Lines that `make fuzz` prints are pasted here.
KEPT: dict[str, list[Case]] = {
    "loops of more than 200 steps at compile time": [
        Case(
            Layer(88, 80, (1, 1, 10), (7, 1, 7), (2, 2, 1), (5, 0, 3), (0, 1, 0), (2, 1, 1), batch=1),
            plans="H200",
            input=Memory("ndhwc"),
            weight=Memory("ndhwc"),
        )
    ],
    "pairs of dx stored as if every line were whole": [
        Case(Layer(32, 16, (4, 4, 31), (3, 3, 3), (2, 2, 2), output_padding=(1, 1, 1), batch=1), wanted=("input",))
    ],
    "a store of 16 bytes to lines of 4 mod 8 elements": [
        Case(Layer(32, 32, (3, 7, 9), (2, 3, 4), (2, 2, 1), output_padding=(0, 1, 0), batch=1), dtype="float16")
    ],
    "a store of 16 bytes to short lines": [
        Case(Layer(17, 16, (4, 7, 3), (1, 3, 2), (3, 3, 1), output_padding=(0, 1, 0)), dtype="float16")
    ],
    "a build of contiguous tensors for a channel of a channels-last gradient": [
        Case(
            Layer(16, 1, size, (1, 5, 5), (2, 2, 2), (2, 2, 2), (0, 0, 1), (3, 1, 3), bias=False),
            dtype="bfloat16",
            favoured="depthwise_tiles",
            wanted=("weight",),
            input=Memory("ndhwc"),
            grad=Memory("ndhwc", gaps=(0, 1, 16, 0, 0)),
        )
        for size in ((4, 2, 4), (4, 8, 15))
    ],
    "a block that begins in the middle of a job of channels": [
        Case(
            Layer(32, 32, (7, 5, 2), (3, 7, 1), (3, 2, 1), (5, 0, 0), (2, 2, 0), (2, 3, 2), batch=1, bias=False),
            plans="H200",
            favoured="cheapest",
            wanted=("weight",),
            input=Memory("ndhwc", gaps=(0, 2, 0, 0, 0)),
            grad=Memory("ndhwc", gaps=(0, 0, 8, 1, 0)),
        )
    ],
    "nothing to compute": [Case(Layer(8, 1, (1, 1, 1), (1, 1, 1), batch=0), dtype="float16", wanted=("input",))],
    "a weight at an odd address": [
        Case(
            Layer(40, 16, (1, 3, 7), (7, 3, 2), (1, 2, 2), output_padding=(0, 0, 1), batch=1, bias=False),
            weight=Memory("ndhwc", offset=1),
        )
    ],
    "a turn that passes before all lanes of a warp have seen it": [
        Case(Layer(64, 48, (8, 7, 7), (1, 1, 1), bias=False), input=Memory("ndhwc"), order="reversed"),
        Case(Layer(64, 8, (6, 9, 32), (1, 1, 1), batch=1, bias=False), dtype="float16", order="reversed"),
    ],
    "a weight gradient's build of another volume": [
        Case(
            Layer(8, 16, size, (5, 5, 2), (2, 3, 1), (0, 0, 0), (1, 2, 0), (1, 2, 1), batch=1, bias=False),
            wanted=("weight",),
        )
        for size in ((9, 7, 3), (1, 3, 56))
    ],
    "a 16-bit weight gradient of a volume after another": [
        Case(Layer(32, 37, size, (1, 1, 4), (1, 1, 2), batch=1, bias=False), dtype="bfloat16", wanted=("weight",))
        for size in ((1, 1, 26), (3, 2, 4))
    ],
    "bits of a mask that the compiler for GPUs lost": [
        Case(
            Layer(16, 79, (2, 3, 17), (4, 2, 3), (2, 1, 2), (3, 1, 3), dilation=(2, 1, 3), batch=1),
            dtype="float16",
            plans="H200",
            epilogue="norm",
        )
    ],
    "lanes of a warp that wait for products when none are unfinished": [
        Case(Layer(66, 40, size, (1, 1, 1), batch=1, bias=False), dtype="float32", epilogue="relu", order="reversed")
        for size in ((2, 3, 6), (3, 4, 55))
    ],
    "a bias gradient of equal values as one long sum": [
        Case(
            Layer(2, 16, (6, 20, 40), (3, 3, 3), (2, 2, 2), batch=1),
            dtype="float32",
            wanted=("bias",),
            short=True,
            grad=Memory("ndhwc", expanded="ncdhw"),
        )
    ],
    "a last tile of whole chunks of terms that is not full": [
        Case(
            Layer(48, 16, (1, 1, 64), (4, 4, 2), (4, 4, 2)),
            "float16",
            plans="H200",
            favoured="gather",
            wanted=("input", "weight", "bias"),
            input=Memory("ndhwc"),
            weight=Memory("ndhwc"),
            grad=Memory("ndhwc"),
        )
    ],
    "an input at an odd address after one that was aligned": [
        Case(
            Layer(80, 80, size, (2, 4, 1), (2, 4, 1), (0, 3, 0), (0, 3, 1), (2, 2, 2), batch=1, bias=False),
            input=Memory("ndhwc", offset=offset),
        )
        for size, offset in (((2, 5, 17), 0), ((2, 2, 17), 1))
    ],
    "threads beyond the rows of a slab whose lines are copied as they lie": [
        Case(
            Layer(3, 3, (16, 1, 3), (4, 5, 1), (5, 2, 3), (3, 1, 1), (3, 0, 0), (1, 1, 3), batch=1, bias=False),
            dtype="bfloat16",
            plans="B200",
            wanted=("weight",),
        )
    ],
    "a pass of the last block behind the last channel": [
        Case(Layer(2, 384, (2, 8, 8), (3, 3, 3), padding=(1, 1, 1), batch=1), epilogue=epilogue, at_end=True)
        for epilogue in ("", "norm")
    ],
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(DEVICE) as worker:
        yield worker


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_what_failed_once_passes(name: str, worker: Worker) -> None:
    cases = KEPT[name] if DEVICE == "cpu" else [replace(case, plans="") for case in KEPT[name]]
    outcome = worker.run(cases)
    assert outcome.failed is None, outcome.message


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_cases_from_a_fixed_seed_pass(seed: int) -> None:
    plans = ("", *draw.PLANS) if DEVICE == "cpu" else ("",)
    search = Search(seed, DEVICE, plans, cases=CASES, workers=1)
    search.run()
    assert not search.failures, "\n".join(failure.text for failure in search.failures)
    assert search.run_cases >= CASES


@pytest.mark.slow
@pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")
@pytest.mark.thorough
def test_cases_pass_under_sanitizers() -> None:
    with Worker("cpu", sanitized()) as worker:
        outcome = worker.run(draw.cases(1, 11)[:3])
    assert outcome.failed is None, outcome.message


# ---- the parts of the fuzz


def test_a_line_repeats_its_case() -> None:
    for case in draw.cases(5, 0):
        assert parse(line(case)) == case


def test_a_seed_and_a_number_give_the_same_cases_and_another_number_others() -> None:
    assert draw.cases(3, 1) == draw.cases(3, 1)
    assert draw.cases(3, 1) != draw.cases(3, 2) != draw.cases(4, 2)


def test_draws_reach_what_they_are_for() -> None:
    cases = [case for number in range(400) for case in draw.cases(0, number)]
    assert all(draw.fits(case) for case in cases)
    forced = sum(case.plans != "" for case in cases) / len(cases)
    assert 0.3 < forced < 0.4
    assert {case.plans for case in cases} == {"", *draw.PLANS}
    assert {case.dtype for case in cases} == set(draw.DTYPES)
    assert {case.favoured for case in cases} == set(FAVOURED)
    dense = [case.layer for case in cases if case.input == case.grad == Memory("ndhwc") and case.weight.offset == 0]
    assert {"up", "groups"} == {
        kind
        for layer in dense
        for kind, met in (
            ("up", layer.kernel == layer.stride and layer.in_channels % 8 == layer.out_channels % 8 == 0),
            ("groups", layer.groups > 1 and layer.in_channels // layer.groups in range(2, 9) and layer.size[2] >= 12),
        )
        if met
    }
    assert {case.epilogue for case in cases} == set(draw.EPILOGUES)
    tails = [case for case in cases if case.epilogue in TAILS]
    assert {case.vector_count for case in tails} == {0, 1, 2, 3, 5, 8}
    assert {len(case.residuals) for case in tails} == set(range(5))
    assert {kind for case in tails for kind in case.residuals} == set(RESIDUALS)
    assert {case.residual_type for case in tails} == {"", "bfloat16", "float16"}
    assert {case.layer.batch for case in cases} == {0, 1, 2, 3, 5}
    assert {name for case in cases for name in case.wanted} == set(GRADIENTS)
    assert {case.input.offset for case in cases if case.dtype == "float16"} == set(range(8))
    for at in range(3):
        assert {case.layer.kernel[at] for case in cases} == {1, 2, 3, 4, 5, 6, 7}
        assert {case.layer.stride[at] for case in cases} == {1, 2, 3, 4}
        assert {case.layer.dilation[at] for case in cases} == {1, 2, 3, 4}
        assert {case.layer.output_padding[at] for case in cases} == {0, 1, 2, 3}
    assert {case.layer.size[2] for case in cases} == set(range(1, 71))


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("offset", [0, 3])
def test_a_tensor_lies_against_a_page_that_faults(at_end: bool, offset: int) -> None:
    tensor = Guards("cpu", at_end).place("a tensor", (5, 7), (7, 1), torch.float16, offset)
    start, end = tensor.data_ptr(), tensor.data_ptr() + 70
    assert start % 16 == 2 * offset
    outside = -(-end // PAGE) * PAGE if at_end else start // PAGE * PAGE - 1
    assert outside - end < 16 if at_end else start - outside <= 16
    assert tensor.isnan().all()
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        ctypes.string_at(outside, 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (-signal.SIGSEGV, -signal.SIGBUS)


@pytest.mark.parametrize("sealed", [True, False])
def test_bytes_outside_a_tensor_are_found(sealed: bool) -> None:
    guards = Guards(DEVICE, at_end=True)
    tensor = guards.place("a tensor", (5,), (1,), torch.float32, offset=1)
    if sealed:
        guards.seal()
        tensor[4] = 1.0
    else:
        tensor.fill_(1.0)
        assert guards.damage() is None
        tensor.as_strided((1,), (1,), tensor.storage_offset() + 5).fill_(1.0)
    assert "first 16 bytes from the start of a tensor of 20 bytes" in str(guards.damage()).replace(
        "20 b", "16 b", not sealed
    )


def test_a_gap_between_rows_belongs_to_nobody() -> None:
    memory = Memory("ndhwc", gaps=(0, 2, 0, 0, 0), expanded="h")
    assert memory.strides((2, 3, 4, 5, 6)) == (120, 1, 30, 0, 5)


BROKEN = {  # what is done instead of a case's call, and the words of the finding
    "crash": ("os.kill(os.getpid(), 11)", "the process ended with signal SIGSEGV"),
    "exit": ("sys.stderr.write('a report'); sys.stderr.flush(); os._exit(3)", "exit status 3: a report"),
    "hang": ("time.sleep(60)", "no result after 2 s"),
    "wrong value": ("result = call(leaves); result.data[0, 0, 0, 0, 0] += 1; return result", "result: 1 of .* wrong"),
    "not written": (
        "return torch.empty_strided((1, 2, 1, 1, 2), (4, 2, 2, 2, 1), dtype=dtype, device='cpu')",
        "result: 4 of",
    ),
    "input written": ("leaves['input'].data[:] = 0; return call(leaves)", "from the start of input"),
    "written behind": (
        "y = call(leaves); y.data.as_strided((1,), (1,), y.storage_offset() + y.numel())[0] = 0; return y",
        "from the start of a result",
    ),
}


@pytest.mark.skipif(DEVICE == "cuda", reason="the emulator's guards are looked at")
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_call_is_a_finding(name: str, tmp_path: Path) -> None:
    code, words = BROKEN[name]
    (tmp_path / "broken.py").write_text(
        f"import os, sys, time, torch\nfrom fuzz import run, workers\nusual, dtype = run._function, torch.float32\n"
        f"def function(case):\n    call = usual(case)\n    def broken(leaves):\n        {code}\n    return broken\n"
        "run._function = function\nworkers.main()\n"
    )
    case = Case(Layer(2, 2, (1, 1, 2), (1, 1, 1), batch=1, bias=False), at_end=False)
    with Worker("cpu", {"PYTHONPATH": str(tmp_path)}, module="broken") as worker:
        outcome = worker.run([case], timeout=2.0 if name == "hang" else 60.0)
    assert outcome.failed == case and re.search(words, outcome.message), outcome.message


def test_shrinking_leaves_what_the_failure_needs() -> None:
    """A failure that needs 8 input channels, an odd width and the input's gradient, after another volume."""

    def fails(cases: list[Case]) -> str | None:
        last = cases[-1]
        needed = last.layer.in_channels >= 8 and last.layer.size[2] % 2 == 1 and "input" in last.wanted
        return "RuntimeError: it fails" if needed and len(cases) > 1 else None

    cases = [
        replace(case, wanted=("input",)).with_layer(in_channels=24, out_channels=6, groups=2, size=(5, 4, 9), batch=2)
        for case in draw.cases(11, 4)
    ]
    found, message = shrink.shrink(cases, "RuntimeError: it fails", fails)
    layer = Layer(8, 1, (1, 1, 1), (1, 1, 1), batch=1, bias=False)
    assert message == "RuntimeError: it fails"
    assert found == [Case(layer, dtype=cases[0].dtype, wanted=("input",))] * 2


def test_a_failure_that_is_not_repeated_is_reported_as_it_was() -> None:
    cases = draw.cases(11, 4)
    assert shrink.shrink(cases, "RuntimeError: once", lambda _: None) == (cases, "RuntimeError: once")
