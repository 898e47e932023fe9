"""Lists layers for the halo kernel, makes their tensors, and finds the build of the kernel that a case asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tconv3d import emulator
from tconv3d.families.halo import candidates
from tconv3d.families.halo import planner as halo_planner
from tconv3d.families.halo.build import Build, Division, Input, Output, Weights
from tconv3d.families.halo.job import Job, job_of
from tconv3d.families.halo.launches import HaloPlan
from tconv3d.families.halo.tiling import Tiling, tilings
from tconv3d.planning.geometry import Geometry, Triple
from tconv3d.planning.problem import Device, Pass, Problem

# The device has few multiprocessors, so that blocks get several tiles and the rings of buffers wrap around.
DEVICE = Device("small Hopper", (9, 0), 3, 232448)
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 1e-6, "float16": 4e-4, "bfloat16": 3e-3}  # operands are exact, only the output is rounded
needs_compiler = pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
# Fields of `Case.build` by which a build is chosen among the planner's; all other fields are replaced in that build.
# A build has them itself, or its tile or its block has them.
CHOSEN = ("input", "output", "march", "split", "row_bytes", "slabs", "groups", "merged", "outputs")
MARCH: dict[str, object] = {"march": True}
LINES: dict[str, object] = {"march": True, "input": Input.LINES, "output": Output.DIRECT}
LONG_RUNS: dict[str, object] = {**LINES, "output": Output.LONG_RUNS}
FLAT: dict[str, object] = {"march": False, "split": (False, False, False)}
COPIED: dict[str, object] = {"input": Input.COPIED}
STREAMED: dict[str, object] = {"weights": Weights.STREAMED, "slots": 2}
DIVIDED: dict[str, object] = {"division": Division.CONSUMERS}
PORTIONED: dict[str, object] = {"division": Division.BLOCKS}
LAST_DIVIDED: dict[str, object] = {"march": False, **STREAMED, "slots": 4, "division": Division.LAST_TILES}
IMAGES: dict[str, object] = {"output": Output.IMAGES}
SMALL_PANELS: dict[str, object] = {"weights": Weights.SMALL_PANELS, "slots": 2}
APART: dict[str, object] = {"march": False, "split": (True, True, True)}
D_H_APART: dict[str, object] = {"march": False, "split": (True, True, False), **COPIED}


def triple(value: int | Triple) -> Triple:
    return (value, value, value) if isinstance(value, int) else value


@dataclass(frozen=True)
class Case:
    """Describes a layer, its input, and the build of the kernel that runs it."""

    in_channels: int
    out_channels: int
    size: Triple
    kernel: int | Triple
    stride: int | Triple = 1
    padding: int | Triple = 0
    output_padding: int | Triple = 0
    dilation: int | Triple = 1
    groups: int = 1
    batch: int = 2
    dtype: str = "float32"
    channels_last: bool = False
    bias: bool = True
    strict: bool = False  # float32 products as three TF32 products
    build: dict[str, object] = field(default_factory=dict)  # fields that the build must have, with their values

    @property
    def geometry(self) -> Geometry:
        return Geometry.make(
            self.in_channels, self.out_channels, triple(self.kernel), triple(self.stride), triple(self.padding),
            triple(self.output_padding), self.groups, triple(self.dilation),
        )  # fmt: skip


LAST_TILES_DIVIDED = Case(136, 9, (2, 4, 5), (3, 2, 1), dtype="bfloat16", channels_last=True, build=LAST_DIVIDED)
SETTINGS = {
    "one tap": Case(8, 8, (3, 5, 9), 1),
    "one position": Case(8, 8, (1, 1, 1), 3, 1, 1),
    "odd channels": Case(13, 9, (3, 4, 5), 3, 1, 1),
    "march": Case(16, 8, (4, 5, 9), 3, build=MARCH),
    "march, padded": Case(16, 8, (4, 13, 9), (3, 5, 4), 1, (1, 1, 3), build=MARCH, batch=5),
    "march, stride 2": Case(16, 8, (4, 5, 6), 3, 2, 1, 1, build=MARCH),
    "march, padding beyond the kernel": Case(
        8, 8, (9, 4, 5), (2, 3, 3), (3, 1, 1), (2, 0, 1), (1, 0, 0), build=MARCH
    ),
    "march, dilation": Case(8, 8, (5, 4, 5), 3, 1, 2, 0, 2, build=MARCH),
    "march, stride above the kernel": Case(8, 8, (4, 4, 4), 1, 2, 0, 1, build=MARCH),
    "kernel equals stride": Case(16, 24, (4, 5, 6), 2, 2, build=FLAT),
    "kernel equals stride, phases apart": Case(16, 24, (4, 5, 6), 2, 2, build=APART),
    "kernel 4, stride 2": Case(20, 8, (4, 4, 4), 4, 2, 1, build=FLAT),
    "kernel 4, stride 2, phases apart": Case(20, 40, (4, 4, 4), 4, 2, 1, build=APART),
    "kernel 3, stride 2": Case(12, 16, (3, 5, 9), 3, 2, 1, build=FLAT),
    "asymmetric": Case(16, 16, (3, 4, 5), (3, 5, 5), build=FLAT),
    "everything differs per dimension": Case(8, 12, (3, 4, 5), (4, 2, 3), (1, 2, 3), (2, 0, 1), (0, 1, 2), (2, 1, 1)),
    "empty phases": Case(8, 8, (3, 4, 3), 2, 2, 1, 1, 2, build=FLAT),
    "many phases": Case(16, 24, (3, 4, 5), 4, 4),
    "output padding": Case(8, 8, (3, 3, 3), 2, 3, 0, (2, 1, 2), build=FLAT),
    "crops to almost nothing": Case(8, 8, (2, 3, 2), 3, 1, (1, 2, 1)),
    "groups share a tile": Case(32, 32, (3, 4, 9), 3, 2, 1, groups=4, build=FLAT),
    "groups share a tile, odd channels": Case(20, 24, (3, 4, 5), 2, 1, groups=4, build=FLAT),
    "groups of their own": Case(80, 48, (3, 3, 4), 3, 1, 1, groups=2),
    "several chunks": Case(100, 8, (3, 3, 4), 2, build={**FLAT, "row_bytes": 128}),
    "several chunks, march": Case(44, 8, (3, 3, 4), 2, build={**MARCH, "row_bytes": 64}),
    "several column tiles": Case(8, 200, (2, 2, 3), 2, 2, build=FLAT),
    "batch in the rows": Case(16, 16, (2, 2, 2), 3, 2, 1, 1, batch=19, build=FLAT),
    "no bias": Case(8, 8, (3, 4, 5), 3, 2, 1, bias=False),
    "weights streamed": Case(72, 16, (3, 4, 5), 3, 1, 1, build={**FLAT, **STREAMED}),
    "weights streamed, march": Case(40, 16, (4, 4, 5), 3, 1, 1, build={**MARCH, **STREAMED, "slots": 3}),
    "several slabs": Case(16, 16, (6, 12, 17), 3, 1, 1, build={**FLAT, "slabs": 3}),
    "aligned rows": Case(8, 12, (3, 4, 32), 2, 2, build=FLAT),
    "aligned rows, march": Case(8, 12, (3, 4, 32), (4, 4, 2), 2, (1, 1, 0), build=MARCH),
    "aligned rows, stride 1, float16": Case(16, 12, (3, 4, 16), (3, 3, 1), 1, (1, 1, 0), dtype="float16", build=FLAT),
    "aligned rows, bfloat16": Case(16, 12, (2, 4, 32), 2, 2, dtype="bfloat16", build=FLAT),
    "rows begin anywhere": Case(8, 5, (3, 3, 70), 3, 2, 1, build={**MARCH, "slabs": 2, **IMAGES}),
    "rows begin anywhere, parts of a line, bfloat16": Case(
        16, 20, (2, 3, 70), 3, 2, 1, dtype="bfloat16", build={**MARCH, "slabs": 1, **IMAGES, "producers": 1}
    ),
    "rows begin anywhere, groups": Case(
        32, 20, (2, 5, 9), 3, (2, 2, 3), 1, groups=4, build={**FLAT, "slabs": 1, **IMAGES}
    ),
    "lines": Case(40, 16, (3, 5, 8), 3, 2, 1, 1, build={**LINES, "row_bytes": 128}),
    "lines, kernel 4": Case(24, 12, (3, 5, 12), 4, 2, 1, build={**LINES, "row_bytes": 64, "slabs": 1}),
    "lines, groups": Case(16, 24, (3, 5, 8), (3, 5, 4), (1, 1, 2), (1, 2, 1), groups=2, batch=3, build=LINES),
    "lines, bfloat16": Case(24, 20, (3, 3, 72), 3, 2, 1, 1, dtype="bfloat16", build=LINES),
    "lines, bfloat16, groups": Case(
        16, 16, (3, 5, 8), (3, 3, 4), (1, 2, 2), 1, 0, groups=2, dtype="bfloat16", batch=3, build=LINES
    ),
    "lines, long runs": Case(16, 20, (3, 3, 68), 3, 2, 1, build={**LONG_RUNS, "slabs": 1}),
    "lines, long runs, whole lines": Case(
        16, 16, (3, 5, 12), 3, 2, 1, groups=2, batch=3, build={**LONG_RUNS, "slabs": 2}
    ),
    "lines, long runs, six tiles of channels": Case(
        16, 96, (2, 3, 36), 3, 2, 1, build={**LONG_RUNS, "slabs": 1, "outputs": 16}
    ),
    "lines, long runs, bfloat16": Case(24, 20, (3, 3, 72), 3, 2, 1, dtype="bfloat16", build=LONG_RUNS),
    "lines, long runs, bfloat16, odd rows of even volumes": Case(
        16, 8, (2, 4, 72), 3, 2, 1, (1, 0, 0), batch=2, dtype="bfloat16", build=LONG_RUNS
    ),
    "lines, long runs, bfloat16, groups": Case(
        32, 32, (4, 5, 128), 3, 2, 1, groups=4, dtype="bfloat16", build=LONG_RUNS
    ),
    "lines, long runs, float16": Case(40, 8, (3, 5, 8), 3, 2, 1, 1, dtype="float16", build=LONG_RUNS),
    "lines, long runs, stride 1": Case(8, 8, (4, 7, 8), (4, 3, 3), (1, 1, 2), 1, build=LONG_RUNS),
    "lines, short runs": Case(
        8, 8, (3, 1, 8), (2, 1, 3), (1, 1, 2), (0, 0, 5), dtype="float16", batch=3, build=LONG_RUNS
    ),
    "lines, float16": Case(40, 8, (3, 5, 8), 3, 2, 1, 1, dtype="float16", build=LINES),
    "float16": Case(40, 16, (3, 4, 9), 3, 2, 1, 1, dtype="float16", build=FLAT),
    "float16, march": Case(40, 16, (3, 4, 9), 3, 1, 1, dtype="float16", build=MARCH),
    "bfloat16": Case(24, 20, (3, 4, 9), 4, 2, 1, dtype="bfloat16"),
    "bfloat16, groups": Case(64, 32, (3, 4, 5), 3, 2, 1, groups=4, dtype="bfloat16", build=FLAT),
    "channels last": Case(16, 24, (3, 4, 9), 3, 2, 1, 1, channels_last=True, build=FLAT),
    "channels last, march": Case(36, 9, (3, 4, 9), 3, 1, 1, channels_last=True, build=MARCH),
    "channels last, unaligned": Case(13, 9, (3, 4, 5), 3, 1, 1, channels_last=True),
    "channels last, float16": Case(40, 40, (3, 4, 9), 3, 1, 1, channels_last=True, dtype="float16", build=FLAT),
    "phases of different kernels apart": Case(12, 32, (3, 5, 9), 3, 2, 1, 1, batch=6, build={**APART, "slots": 3}),
    "phases of different kernels apart, those along w together": Case(
        40, 32, (3, 5, 6), (5, 3, 3), 2, (2, 1, 1), 1, build={"split": (True, True, False), **COPIED}
    ),
    "copied": Case(72, 24, (3, 4, 5), 4, 2, 1, build={**APART, **COPIED}),
    "copied, march": Case(36, 16, (4, 5, 9), 3, 1, 1, build={**MARCH, **COPIED}, batch=3),
    "copied, channels last": Case(
        36, 16, (3, 4, 9), 3, 2, 1, 1, channels_last=True, build={**FLAT, **COPIED, **STREAMED}
    ),
    "copied, channels last, rounded before": Case(
        36, 16, (3, 4, 9), 3, 1, 1, channels_last=True, build={**MARCH, "input": Input.REWRITTEN}
    ),
    "copied, channels last, rounded by consumers": Case(
        48, 16, (3, 4, 9), 3, 2, 1, 1, channels_last=True, build={**MARCH, "input": Input.IN_REGISTERS}
    ),
    "copied, channels last, rounded by consumers, short rows": Case(
        16,
        24,
        (4, 5, 6),
        (3, 2, 3),
        1,
        (1, 0, 2),
        batch=3,
        channels_last=True,
        build={**MARCH, "input": Input.IN_REGISTERS, "stages": 3},
    ),
    "copied, channels last, float16": Case(
        72, 24, (3, 4, 9), 2, channels_last=True, dtype="float16", build={**FLAT, **COPIED}
    ),
    "copied, bfloat16": Case(80, 40, (3, 4, 9), 2, dtype="bfloat16", build={**FLAT, **COPIED, **STREAMED}),
    "copied, float16, odd volume": Case(64, 32, (1, 3, 3), (1, 2, 2), dtype="float16", build={**FLAT, **COPIED}),
    "copied, batch in the rows": Case(
        40, 24, (2, 3, 3), 4, 2, 1, batch=5, build={**APART, **COPIED, **STREAMED, "slots": 3}
    ),
    "copied, lines of the batch in the rows": Case(
        40, 24, (2, 2, 4), 4, 2, 1, batch=17, build={"split": (True, True, False), **COPIED, **STREAMED}
    ),
    "small panels": Case(
        72,
        40,
        (4, 8, 8),
        4,
        2,
        1,
        dtype="bfloat16",
        build={"split": (True, True, False), **COPIED, **SMALL_PANELS, "slabs": 2},
    ),
    "small panels, two column tiles of channels": Case(
        72,
        40,
        (4, 8, 8),
        4,
        2,
        1,
        dtype="float16",
        build={"split": (True, True, False), **COPIED, **SMALL_PANELS, "outputs": 24},
    ),
    "copied, long rows stored as they are": Case(
        64, 20, (2, 4, 20), 4, 2, 1, dtype="bfloat16", build={"split": (True, True, False), **COPIED, **STREAMED}
    ),
    "copied, channels last, two column tiles of channels": Case(
        64,
        40,
        (4, 8, 8),
        4,
        2,
        1,
        dtype="bfloat16",
        channels_last=True,
        build={**APART, **COPIED, **STREAMED, "outputs": 24},
    ),
    "three stages, three consumers": Case(
        72, 40, (4, 9, 8), 3, 2, 1, 1, build={**D_H_APART, **SMALL_PANELS, "stages": 3, "consumers": 3}
    ),
    "divided": Case(72, 40, (3, 4, 9), 3, 2, 1, 1, build={**APART, "slots": 4, **DIVIDED}),
    "divided, copied": Case(
        200,
        40,
        (4, 8, 8),
        4,
        2,
        1,
        dtype="bfloat16",
        build={"split": (True, True, False), **COPIED, "weights": Weights.STREAMED, "slots": 4, **DIVIDED},
    ),
    "divided, resident": Case(80, 16, (3, 4, 5), 3, 1, 1, dtype="float16", build={**FLAT, **DIVIDED}),
    "strict": Case(40, 16, (3, 4, 9), 3, 2, 1, 1, strict=True, build=FLAT),
    "strict, march, vectors": Case(44, 8, (4, 5, 12), 3, build={**MARCH, "row_bytes": 64}, strict=True),
    "strict, march, groups": Case(
        32, 32, (3, 4, 9), (1, 4, 4), (1, 2, 2), (0, 1, 1), groups=4, build=MARCH, strict=True
    ),
    "strict, groups share a tile": Case(32, 16, (3, 4, 9), (1, 3, 3), groups=4, build=FLAT, strict=True),
    "strict, weights streamed": Case(72, 16, (5, 9, 9), 3, 1, 1, build={**FLAT, **STREAMED}, strict=True),
    "strict, channels last, groups": Case(
        32, 32, (3, 4, 5), 3, 2, 1, groups=4, channels_last=True, build=FLAT, strict=True
    ),
    "channels last, groups as one": Case(
        32, 32, (3, 4, 5), 3, 2, 1, groups=4, channels_last=True, build={**FLAT, **COPIED, "merged": 2}
    ),
    "channels last, groups as one, march": Case(
        48, 72, (3, 4, 5), 3, 2, 1, groups=6, channels_last=True, build={**MARCH, "merged": 2}, dtype="bfloat16"
    ),
}


def run_launches(plan: HaloPlan, places: Mapping[str, Tensor | int | None], order: str) -> None:
    """Runs all launches of a plan, given the operands (tensors or addresses) by name; all others are null."""
    launches = [each for each in (plan.pack, plan.rows, plan.main, plan.sum) if each]
    names = list(dict.fromkeys(name for each in launches for name in each.pointers))
    found = [places.get(name) for name in names]
    addresses = tuple(each.data_ptr() if isinstance(each, Tensor) else each or 0 for each in found)
    steps = [(each, tuple(map(names.index, each.pointers))) for each in launches]
    emulator.prepare_all(steps, order)(addresses)


class Tensors:
    """Holds the tensors of a case, runs the kernel on them, and computes its error."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(1)
        kind, g = TYPES[case.dtype], case.geometry

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(kind)

        self.case = case
        form = torch.channels_last_3d if case.channels_last else torch.contiguous_format
        self.x = draw(case.batch, case.in_channels, *case.size).contiguous(memory_format=form)
        self.weight = draw(case.in_channels, g.out_per_group, *g.kernel).contiguous(memory_format=form)
        self.bias = draw(case.out_channels) if case.bias else None
        output = (case.batch, case.out_channels, *g.output_size(case.size))
        self.y = torch.full(output, float("nan"), dtype=kind).contiguous(memory_format=form)

    @property
    def problem(self) -> Problem:
        c = self.case
        return Problem(
            Pass.FORWARD, c.geometry, c.batch, c.size, c.dtype, self.x.stride(), self.weight.stride(),
            self.y.stride(), c.bias, tf32=not c.strict,
        )  # fmt: skip

    def run(self, plan: HaloPlan, order: str = "forward", moments: int = 0, **further: int) -> None:
        """Runs all launches of a plan; `further` are addresses of the operands of a tail by name."""
        packed, rows, portions = (
            torch.full((size // 4,), float("nan"))
            for size in (plan.packed_bytes, plan.rows_bytes, plan.portions_bytes)
        )
        operands = {"x": self.x, "weight": self.weight, "bias": self.bias, "y": self.y}
        places = {**operands, "workspace": packed, "rows": rows, "portions": portions, "moments": moments, **further}
        run_launches(plan, places, order)

    def check(self, plan: HaloPlan, order: str = "forward") -> None:
        """Asserts that a plan computes all outputs, and right."""
        self.y.fill_(float("nan"))
        self.run(plan, order)
        assert self.error < TOLERANCE[self.case.dtype], (plan.build, plan.tiling)

    @property
    def error(self) -> float:
        c = self.case
        bias = None if self.bias is None else self.bias.double()
        x, weight = (self.x, self.weight) if c.strict else (operand(self.x), operand(self.weight))
        reference = F.conv_transpose3d(
            x.double(), weight.double(), bias, c.stride, c.padding, c.output_padding, c.groups, c.dilation
        )
        return float((self.y.double() - reference).norm() / reference.norm().clamp(min=1e-30))


def operand(tensor: Tensor) -> Tensor:
    """Returns a tensor as tensor cores read it: float32 rounded to the nearest TF32, ties away from zero."""
    if tensor.dtype != torch.float32:
        return tensor.double()
    return ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).double()


def all_tilings(case: Case) -> tuple[Tensors, Build, Job, list[Tiling]]:
    """Returns the tensors of a case, its build, its job, and all tilings that the build has of the job."""
    tensors, build = Tensors(case), build_for(case)
    job = job_of(tensors.problem)
    return tensors, build, job, list(tilings(build, case.batch, job.positions, job.read_size))


def build_for(case: Case) -> Build:
    """Returns the planner's build, or the first of its candidates that has what the case asks for."""
    job = job_of(Tensors(case).problem)
    if not case.build:
        build = halo_planner.choose(job, DEVICE.shared_bytes, 132)
        assert build is not None
        return build
    for build in candidates.builds_of(candidates.Nominal.of(job), DEVICE.shared_bytes):
        have = {**vars(build.tile), **vars(build.block), **vars(build)}
        if all(have[name] == value for name, value in case.build.items() if name in CHOSEN):
            return build.but(**{name: value for name, value in case.build.items() if name not in CHOSEN})
    raise AssertionError(f"no build has {case.build}")
