"""Volumes of one layer in one process, in either order: a kernel that is compiled for one of them and used for
another must be able to read that one's tensors, wherever they begin and however long their lines are.

Layers are drawn at random, of kernel families that share a few builds among the volumes of a layer (`repertoire`).
Their volumes differ in what kernels are compiled for: lines of whole 16 bytes, channels as the fastest dimension, an
address that is a multiple of 16 bytes, so few columns that two lines are taken as one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from random import Random

import pytest
from fuzz.case import Case, Memory
from fuzz.workers import Worker
from layers import Layer, Triple

from tconv3d import emulator
from tconv3d.families.halo import planner as halo_planner
from tconv3d.families.halo.build import Input
from tconv3d.families.halo.job import job_of
from tconv3d.planning import aligning, planner
from tconv3d.planning.geometry import Geometry
from tconv3d.planning.launch import Launch
from tconv3d.planning.problem import Pass, Problem
from tconv3d.torch_ops import executor

CONTIGUOUS, LAST = Memory(), Memory("ndhwc")
Volume = tuple[Triple, Memory]
LINES: list[Volume] = [
    ((1, 2, 24), CONTIGUOUS),
    ((3, 2, 4), CONTIGUOUS),
    ((2, 2, 7), CONTIGUOUS),
    ((1, 2, 16), Memory(offset=1)),
    ((2, 4, 2), CONTIGUOUS),
    ((1, 3, 10), CONTIGUOUS),
]
ROWS: list[Volume] = [((2, 5, 17), LAST), ((2, 2, 17), Memory("ndhwc", offset=1)), ((2, 2, 8), CONTIGUOUS)]
ONE: Triple = (1, 1, 1)
Axes = tuple[Triple, Triple, Triple]  # kernel, stride, dilation
FEW_TAPS: list[Axes] = [
    (kernel, (1, h, w), ONE)
    for kernel in ((1, 1, 4), (2, 1, 3), (1, 2, 2), (1, 3, 1))
    for h in (1, 2)
    for w in (1, 2)
    if w <= kernel[2]
]
WITH_GAPS: list[Axes] = [((2, kernel, 1), (2, kernel, 1), (2, 2, 2)) for kernel in (2, 4)]  # outputs without taps


@dataclass(frozen=True)
class Family:
    """What is drawn. `seeds`: of draws that the emulator executes; most of them once had wrong results."""

    dtype: str
    wanted: tuple[str, ...]
    volumes: list[Volume]
    channels: int  # at least
    seeds: tuple[int, ...]
    axes: tuple[Axes, ...] = tuple(FEW_TAPS)
    favoured: str = ""

    def cases(self, seed: int) -> list[Case]:
        random = Random(f"{self.dtype} {self.wanted} {seed}")
        kernel, stride, dilation = random.choice(self.axes)
        ins, outs = (self.channels + 8 * random.randint(0, 2) for _ in range(2))
        layer = Layer(ins, outs, ONE, kernel, stride, dilation=dilation, batch=1, bias=False)
        return [
            Case(
                replace(layer, size=size),
                self.dtype,
                favoured=self.favoured,
                wanted=self.wanted,
                input=memory,
                grad=memory,
            )
            for size, memory in random.sample(self.volumes, len(self.volumes))
        ]


FAMILIES = {
    "weight gradient, TF32": Family("tf32", ("weight",), LINES, 8, (18, 19)),
    "weight gradient, 16 bits": Family("bfloat16", ("weight",), LINES, 24, (0,)),
    "halo, contiguous": Family("float16", ("input",), LINES[:4], 24, (0,)),
    "halo, channels last": Family("tf32", (), ROWS, 48, (0,), tuple(WITH_GAPS)),
    "unfold": Family("tf32", ("input", "weight"), LINES[:3], 8, (0,), favoured="unfold"),
}


# ---- what kernels read, as the emulator executes them


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker("cpu") as worker:
        yield worker


@pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")
@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name, each in FAMILIES.items() for seed in each.seeds])
def test_every_volume_after_others_has_the_right_result(name: str, seed: int, worker: Worker) -> None:
    cases = FAMILIES[name].cases(seed)
    for turn in (cases, cases[::-1]):
        outcome = worker.run(turn)
        assert outcome.failed is None, outcome.message


# ---- what kernels read, as far as their plans tell


def problem_of(case: Case, which: Pass) -> Problem:
    layer = case.layer
    geometry = Geometry.make(layer.in_channels, layer.out_channels, layer.kernel, *layer.settings)
    sizes = (1, layer.in_channels, *layer.size), (1, layer.out_channels, *geometry.output_size(layer.size))
    weight = (layer.in_channels, layer.out_channels, *layer.kernel)
    strides = case.input.strides(sizes[0]), case.weight.strides(weight), case.grad.strides(sizes[1])
    tf32 = case.dtype == "tf32"
    dtype, aligned = "float32" if tf32 else case.dtype, case.input.offset == 0
    return Problem(which, geometry, 1, layer.size, dtype, *strides, tf32=tf32, aligned=aligned)


def misread(problem: Problem, launch: Launch) -> str | None:
    """What a launch of a weight gradient takes for granted of x or dy, and is not so."""
    constants = dict(launch.constants)
    size = struct.unpack_from("3i", launch.scalars, 10 * 8)  # behind the strides of x and dy
    if prod(size) != prod(problem.input_size) or size[2] != problem.input_size[2] * constants["kLinesAtOnce"]:
        return f"{constants['kLinesAtOnce']} lines at once of {problem.input_size}, walked as {size}"
    if constants["kElementsY"]:
        return None
    items = constants["kVectorY"] * 4 // problem.item_bytes
    steps = (*problem.output[:4], problem.output_size[2], *constants["kPlaneOffsetW"])
    if items > 1 and (not problem.aligned or problem.output[4] != 1 or any(step % items for step in steps)):
        return f"{items} elements of dy at once, of lines that are no multiples of it"
    return None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", [name for name, each in FAMILIES.items() if each.wanted == ("weight",)])
def test_weight_gradients_take_nothing_for_granted_that_another_volume_had(name: str, seed: int) -> None:
    problems = [problem_of(case, Pass.WEIGHT_GRAD) for case in FAMILIES[name].cases(seed)]
    for turn in (problems, problems[::-1]):
        planner.forget()
        for problem in turn:
            found = planner.plan(problem, executor.EMULATED)
            copied = any(launch.kernel == aligning.KERNEL for launch in found.launches)  # dy with longer lines
            read = aligning.inner(problem) if copied else problem
            mains = [launch for launch in found.launches if launch.kernel == "hopper_weight_grad"]
            assert not [words for launch in mains if (words := misread(read, launch))]


def test_rows_that_a_launch_has_rounded_are_not_rounded_again_by_consumers() -> None:
    aligned, moved = (problem_of(case, Pass.FORWARD) for case in rows_of(FAMILIES["halo, channels last"]))
    job = job_of(aligned)
    build = halo_planner.choose(job, executor.EMULATED.shared_bytes, executor.EMULATED.multiprocessors)
    assert build is not None and build.input is Input.IN_REGISTERS, "the layer is one whose consumers round"
    assert halo_planner.plan_build(build, job, executor.EMULATED) is not None
    assert halo_planner.plan_build(build, job_of(moved), executor.EMULATED) is None


def rows_of(family: Family) -> list[Case]:
    """The two cases whose channels are the fastest dimension, the aligned one first."""
    return sorted((case for case in family.cases(0) if case.input.order == LAST.order), key=lambda c: c.input.offset)
