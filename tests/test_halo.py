"""The halo kernel in the emulator against float64: settings, builds, layouts, types; and its planner's promises."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F
from generated import axis
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tconv3d import emulator
from tconv3d.api.explain import call_of, problems_of
from tconv3d.families.halo import build as halo_build
from tconv3d.families.halo import model as halo_model
from tconv3d.families.halo import planner as halo_planner
from tconv3d.families.halo.build import Build, tilings
from tconv3d.families.halo.job import job_of
from tconv3d.families.halo.planner import HaloPlan
from tconv3d.planning.geometry import Geometry, Triple
from tconv3d.planning.problem import Device, Pass, Problem
from tconv3d.planning.repertoire import TYPICAL
from tconv3d.runtime import compiler
from tconv3d.tools.bench.layers import LAYERS, layer

# Few multiprocessors, so that blocks get several tiles and the rings wrap around.
DEVICE = Device("small Hopper", (9, 0), 3, 232448)
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 1e-6, "float16": 4e-4, "bfloat16": 3e-3}  # operands are exact: the output's rounding

needs_compiler = pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")


def triple(value: int | Triple) -> Triple:
    return (value, value, value) if isinstance(value, int) else value


@dataclass(frozen=True)
class Case:
    """A layer with its input."""

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
    strict: bool = False  # three TF32 products
    build: dict[str, object] = field(default_factory=dict)  # what the build must have

    @property
    def geometry(self) -> Geometry:
        return Geometry.make(
            self.in_channels, self.out_channels, triple(self.kernel), triple(self.stride), triple(self.padding),
            triple(self.output_padding), self.groups, triple(self.dilation),
        )  # fmt: skip


class Tensors:
    """A case's tensors, and what the kernel makes of them."""

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

    def run(self, plan: HaloPlan, order: str = "forward", moments: int = 0) -> None:
        packed = torch.full((plan.packed_bytes // 4,), float("nan"))
        emulator.prepare(plan.pack, order)((self.weight.data_ptr(), packed.data_ptr()))
        bias = 0 if self.bias is None else self.bias.data_ptr()
        x, rows = self.x.data_ptr(), torch.full((plan.rows_bytes // 4,), float("nan"))
        if plan.rows:
            emulator.prepare(plan.rows, order)((x, rows.data_ptr()))
            x = rows.data_ptr()
        portions = torch.full((plan.portions_bytes // 4,), float("nan"))
        places = {"y": self.y.data_ptr(), "portions": portions.data_ptr(), "moments": moments, "null": 0}
        y, left = (places[name] for name in plan.main.pointers[3:])
        emulator.prepare(plan.main, order)((x, packed.data_ptr(), bias, y, left))
        if plan.sum:
            emulator.prepare(plan.sum, order)(tuple(places[name] for name in plan.sum.pointers))

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
    """What tensor cores see of a tensor: TF32 to nearest, ties away from zero."""
    if tensor.dtype != torch.float32:
        return tensor.double()
    return ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).double()


def build_for(case: Case) -> Build:
    """The planner's build, or the first of its candidates that has what the case wants."""
    job = job_of(Tensors(case).problem)
    if not case.build:
        build = halo_planner.choose(job, DEVICE.shared_bytes, 132)
        assert build is not None
        return build
    for build in halo_planner.builds_of(halo_planner.Nominal.of(job), DEVICE.shared_bytes):
        if all(getattr(build, name) == value for name, value in case.build.items() if name in CHOSEN):
            return replace(build, **{n: v for n, v in case.build.items() if n not in CHOSEN})  # type: ignore[arg-type]
    raise AssertionError(f"no build has {case.build}")


# What a build must have of what a case wants; the rest is replaced.
CHOSEN = (
    "copied", "in_registers", "lines", "joint", "march", "split", "row_bytes", "slabs", "groups_per_tile",
    "merged", "out_tile",
)  # fmt: skip


def check(case: Case, order: str = "forward") -> None:
    tensors = Tensors(case)
    plan = halo_planner.plan_build(build_for(case), job_of(tensors.problem), DEVICE)
    assert plan is not None
    tensors.run(plan, order)
    assert tensors.error < TOLERANCE[case.dtype], (plan.build, plan.tiling)


MARCH: dict[str, object] = {"march": True}
LINES: dict[str, object] = {"march": True, "lines": True, "joint": False}
JOINT: dict[str, object] = {**LINES, "joint": True}
FLAT: dict[str, object] = {"march": False, "split": (False, False, False)}
STREAMED: dict[str, object] = {"resident": False, "slots": 2}
APART: dict[str, object] = {"march": False, "split": (True, True, True)}
D_H_APART: dict[str, object] = {"march": False, "split": (True, True, False), "copied": True}

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
    "weights streamed": Case(72, 16, (3, 4, 5), 3, 1, 1, build={**FLAT, "resident": False, "slots": 2}),
    "weights streamed, march": Case(40, 16, (4, 4, 5), 3, 1, 1, build={**MARCH, "resident": False, "slots": 3}),
    "several slabs": Case(16, 16, (6, 12, 17), 3, 1, 1, build={**FLAT, "slabs": 3}),
    "aligned rows": Case(8, 12, (3, 4, 32), 2, 2, build=FLAT),
    "aligned rows, march": Case(8, 12, (3, 4, 32), (4, 4, 2), 2, (1, 1, 0), build=MARCH),
    "aligned rows, stride 1, float16": Case(16, 12, (3, 4, 16), (3, 3, 1), 1, (1, 1, 0), dtype="float16", build=FLAT),
    "aligned rows, bfloat16": Case(16, 12, (2, 4, 32), 2, 2, dtype="bfloat16", build=FLAT),
    "rows begin anywhere": Case(8, 5, (3, 3, 70), 3, 2, 1, build={**MARCH, "slabs": 2, "buffers": 2}),
    "rows begin anywhere, parts of a line, bfloat16": Case(
        16, 20, (2, 3, 70), 3, 2, 1, dtype="bfloat16", build={**MARCH, "slabs": 1, "buffers": 2, "producers": 1}
    ),
    "rows begin anywhere, groups": Case(
        32, 20, (2, 5, 9), 3, (2, 2, 3), 1, groups=4, build={**FLAT, "slabs": 1, "buffers": 2}
    ),
    "lines": Case(40, 16, (3, 5, 8), 3, 2, 1, 1, build={**LINES, "row_bytes": 128}),
    "lines, kernel 4": Case(24, 12, (3, 5, 12), 4, 2, 1, build={**LINES, "row_bytes": 64, "slabs": 1}),
    "lines, groups": Case(16, 24, (3, 5, 8), (3, 5, 4), (1, 1, 2), (1, 2, 1), groups=2, batch=3, build=LINES),
    "lines, bfloat16": Case(24, 20, (3, 3, 72), 3, 2, 1, 1, dtype="bfloat16", build=LINES),
    "lines, bfloat16, groups": Case(
        16, 16, (3, 5, 8), (3, 3, 4), (1, 2, 2), 1, 0, groups=2, dtype="bfloat16", batch=3, build=LINES
    ),
    "lines, long runs": Case(16, 20, (3, 3, 68), 3, 2, 1, build={**JOINT, "slabs": 1}),
    "lines, long runs, whole lines": Case(
        16, 16, (3, 5, 12), 3, 2, 1, groups=2, batch=3, build={**JOINT, "slabs": 2}
    ),
    "lines, long runs, bfloat16": Case(24, 20, (3, 3, 72), 3, 2, 1, dtype="bfloat16", build=JOINT),
    "lines, long runs, bfloat16, odd rows of even volumes": Case(
        16, 8, (2, 4, 72), 3, 2, 1, (1, 0, 0), batch=2, dtype="bfloat16", build=JOINT
    ),
    "lines, long runs, bfloat16, groups": Case(32, 32, (4, 5, 128), 3, 2, 1, groups=4, dtype="bfloat16", build=JOINT),
    "lines, long runs, float16": Case(40, 8, (3, 5, 8), 3, 2, 1, 1, dtype="float16", build=JOINT),
    "lines, long runs, stride 1": Case(8, 8, (4, 7, 8), (4, 3, 3), (1, 1, 2), 1, build=JOINT),
    "lines, short runs": Case(
        8, 8, (3, 1, 8), (2, 1, 3), (1, 1, 2), (0, 0, 5), dtype="float16", batch=3, build=JOINT
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
        40, 32, (3, 5, 6), (5, 3, 3), 2, (2, 1, 1), 1, build={"split": (True, True, False), "copied": True}
    ),
    "copied": Case(72, 24, (3, 4, 5), 4, 2, 1, build={**APART, "copied": True}),
    "copied, march": Case(36, 16, (4, 5, 9), 3, 1, 1, build={**MARCH, "copied": True}, batch=3),
    "copied, channels last": Case(
        36, 16, (3, 4, 9), 3, 2, 1, 1, channels_last=True, build={**FLAT, "copied": True, **STREAMED}
    ),
    "copied, channels last, rounded before": Case(
        36, 16, (3, 4, 9), 3, 1, 1, channels_last=True, build={**MARCH, "copied": True, "rewritten": True}
    ),
    "copied, channels last, rounded by consumers": Case(
        48, 16, (3, 4, 9), 3, 2, 1, 1, channels_last=True, build={**MARCH, "copied": True, "in_registers": True}
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
        build={**MARCH, "copied": True, "in_registers": True, "stages": 3},
    ),
    "copied, channels last, float16": Case(
        72, 24, (3, 4, 9), 2, channels_last=True, dtype="float16", build={**FLAT, "copied": True}
    ),
    "copied, bfloat16": Case(
        80, 40, (3, 4, 9), 2, dtype="bfloat16", build={**FLAT, "copied": True, "resident": False, "slots": 2}
    ),
    "copied, float16, odd volume": Case(
        64, 32, (1, 3, 3), (1, 2, 2), dtype="float16", build={**FLAT, "copied": True}
    ),
    "copied, batch in the rows": Case(
        40, 24, (2, 3, 3), 4, 2, 1, batch=5, build={**APART, "copied": True, "resident": False, "slots": 3}
    ),
    "copied, lines of the batch in the rows": Case(
        40, 24, (2, 2, 4), 4, 2, 1, batch=17, build={"split": (True, True, False), "copied": True, **STREAMED}
    ),
    "small panels": Case(
        72,
        40,
        (4, 8, 8),
        4,
        2,
        1,
        dtype="bfloat16",
        build={"split": (True, True, False), "copied": True, **STREAMED, "slabs": 2, "fine": True},
    ),
    "small panels, two column tiles of channels": Case(
        72,
        40,
        (4, 8, 8),
        4,
        2,
        1,
        dtype="float16",
        build={"split": (True, True, False), "copied": True, **STREAMED, "out_tile": 24, "fine": True},
    ),
    "copied, long rows stored as they are": Case(
        64,
        20,
        (2, 4, 20),
        4,
        2,
        1,
        dtype="bfloat16",
        build={"split": (True, True, False), "copied": True, **STREAMED},
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
        build={**APART, "copied": True, **STREAMED, "out_tile": 24},
    ),
    "three stages, three consumers": Case(
        72, 40, (4, 9, 8), 3, 2, 1, 1, build={**D_H_APART, **STREAMED, "stages": 3, "consumers": 3, "fine": True}
    ),
    "divided": Case(72, 40, (3, 4, 9), 3, 2, 1, 1, build={**APART, "slots": 4, "divided": True}),
    "divided, copied": Case(
        200,
        40,
        (4, 8, 8),
        4,
        2,
        1,
        dtype="bfloat16",
        build={"split": (True, True, False), "copied": True, "resident": False, "slots": 4, "divided": True},
    ),
    "divided, resident": Case(80, 16, (3, 4, 5), 3, 1, 1, dtype="float16", build={**FLAT, "divided": True}),
    "strict": Case(40, 16, (3, 4, 9), 3, 2, 1, 1, strict=True, build=FLAT),
    "strict, march, vectors": Case(44, 8, (4, 5, 12), 3, build={**MARCH, "row_bytes": 64}, strict=True),
    "strict, weights streamed": Case(
        72, 16, (5, 9, 9), 3, 1, 1, build={**FLAT, "resident": False, "slots": 2}, strict=True
    ),
    "strict, channels last, groups": Case(
        32, 32, (3, 4, 5), 3, 2, 1, groups=4, channels_last=True, build=FLAT, strict=True
    ),
    "channels last, groups as one": Case(
        32, 32, (3, 4, 5), 3, 2, 1, groups=4, channels_last=True, build={**FLAT, "copied": True, "merged": 2}
    ),
    "channels last, groups as one, march": Case(
        48, 72, (3, 4, 5), 3, 2, 1, groups=6, channels_last=True, build={**MARCH, "merged": 2}, dtype="bfloat16"
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", SETTINGS)
def test_setting(name: str) -> None:
    check(SETTINGS[name])


@needs_compiler
@pytest.mark.parametrize("order", ["reversed", "shuffled:1", "shuffled:2"])
@pytest.mark.parametrize(
    "name",
    [
        "march",
        "weights streamed",
        "several slabs",
        "lines, bfloat16, groups",
        "lines, long runs",
        "three stages, three consumers",
    ],
)
def test_result_does_not_depend_on_who_runs_first(name: str, order: str) -> None:
    check(SETTINGS[name], order)


@st.composite
def with_lines(draw: st.DrawFn) -> Case:
    """Layers whose lines of inputs can be copied. Their rows of outputs begin anywhere, or at whole vectors."""
    (kernel_d, stride_d, padding_d, dilation_d, _), (kernel_h, stride_h, padding_h, dilation_h, _) = draw(
        st.tuples(axis, axis)
    )
    kernel_w, padding_w = draw(st.sampled_from([(3, 0), (3, 1), (2, 0), (4, 1), (5, 2)]))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    size = (draw(st.integers(1, 4)), draw(st.integers(1, 7)), 8 * draw(st.integers(1, 9)))
    case = Case(
        8 * draw(st.integers(1, 3)), draw(st.integers(8, 20)), size, (kernel_d, kernel_h, kernel_w),
        (stride_d, stride_h, 2), (padding_d, padding_h, padding_w), 0, (dilation_d, dilation_h, 1),
        batch=draw(st.integers(1, 3)), dtype=dtype,
    )  # fmt: skip
    assume(min(case.geometry.output_size(size)) >= 1)
    return case


@needs_compiler
@given(with_lines(), st.sampled_from(["forward", "shuffled:3"]))
@settings(max_examples=8)
def test_lines_of_any_layer(case: Case, order: str) -> None:
    tensors = Tensors(case)
    job = job_of(tensors.problem)
    found = halo_planner.builds_of(halo_planner.Nominal.of(job), DEVICE.shared_bytes)
    plans = (halo_planner.plan_build(build, job, DEVICE) for build in found if build.lines)
    plan = next((plan for plan in plans if plan is not None), None)
    assume(plan is not None)
    assert plan is not None
    tensors.run(plan, order)
    assert tensors.error < TOLERANCE[case.dtype], (plan.build, plan.tiling)


@needs_compiler
@pytest.mark.parametrize("name", [name for name in SETTINGS if "aligned rows" in name])
def test_aligned_rows_are_stored_as_vectors(name: str) -> None:
    case = SETTINGS[name]
    tensors, build = Tensors(case), build_for(case)
    job = job_of(tensors.problem)
    found = list(tilings(build, case.batch, job.positions, job.read_size))
    for vector in (16 // job.item_bytes, 2):
        wanted = [tiling for tiling in found if build.vector(job, tiling) == vector]
        assert wanted, vector
        for tiling in wanted[:: max(1, len(wanted) // 2)]:
            tensors.y.fill_(float("nan"))
            tensors.run(halo_planner.assemble(build, tiling, job, DEVICE))
            assert tensors.error < TOLERANCE[case.dtype], (vector, tiling)


@needs_compiler
@pytest.mark.parametrize(("dtype", "slabs"), [("bfloat16", 2), ("float16", 3), ("float32", 2)])
def test_planes_that_are_one_line_are_stored_four_outputs_at_a_time(dtype: str, slabs: int) -> None:
    # Lines of 10, planes of 60.
    case = Case(16, 8, (3, 4, 8), 3, dtype=dtype, batch=3, build={**MARCH, "slabs": slabs})
    tensors, build = Tensors(case), build_for(case)
    job = job_of(tensors.problem)
    found = list(tilings(build, case.batch, job.positions, job.read_size))
    wanted = [tiling for tiling in found if build.vector(job, tiling) == 4]
    assert {tiling.length > 0 for tiling in wanted} == {True} and len({tiling.sheets for tiling in wanted}) == 2
    for tiling in wanted:
        tensors.y.fill_(float("nan"))
        tensors.run(halo_planner.assemble(build, tiling, job, DEVICE))
        assert tensors.error < TOLERANCE[case.dtype], tiling


BESIDE: dict[str, object] = {"march": False, "split": (False, False, True), "row_bytes": 64}
VECTORS = {  # inputs that are loaded by vectors of 16 bytes along w
    "six pieces": Case(40, 8, (2, 3, 16), (2, 3, 3), 1, (0, 1, 1), dtype="float16", build=FLAT),
    "march": Case(21, 8, (3, 4, 24), (2, 3, 4), 1, (1, 1, 2), dtype="bfloat16", build=MARCH),
    "several chunks, phases apart": Case(
        72, 8, (2, 2, 16), (2, 2, 4), (1, 1, 2), (0, 1, 1), dtype="bfloat16", build=BESIDE
    ),
    "weights streamed": Case(
        72, 8, (2, 4, 16), (1, 2, 2), 1, dtype="float16", build={**FLAT, "resident": False, "slots": 2}
    ),
    "groups": Case(44, 32, (2, 2, 16), (1, 2, 2), groups=4, dtype="float16", build=FLAT),
}


@needs_compiler
@pytest.mark.parametrize("name", VECTORS)
def test_aligned_rows_are_loaded_as_vectors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole lines, tiles that begin between vectors, and by the same kernel a tensor that is not aligned."""
    monkeypatch.setattr(halo_build, "MAX_BESIDE", 99.0)
    case = replace(VECTORS[name], batch=1)
    tensors, build = Tensors(case), build_for(case)
    job = job_of(tensors.problem)
    found = [t for t in tilings(build, 1, job.positions, job.read_size) if build.vectors(job, t)]
    whole = max((t for t in found if t.tiles[3] == 1 and not t.length), key=lambda t: t.count)
    tiling = min((t for t in found if t.tiles[3] > 1 and t.tile[2] % 4), key=lambda t: t.count)
    for each in (whole, tiling):
        tensors.y.fill_(float("nan"))
        tensors.run(halo_planner.assemble(build, each, job, DEVICE), "shuffled:1")
        assert tensors.error < TOLERANCE[case.dtype], each
    unaligned = torch.empty(tensors.x.numel() + 1, dtype=tensors.x.dtype)[1:].view(tensors.x.shape)
    tensors.x = unaligned.copy_(tensors.x)
    job, by_vector = replace(job, aligned=False), build.constants(job)
    plan = halo_planner.assemble(build, tiling, job, DEVICE)
    assert not build.vectors(job, tiling) and plan.main.constants == by_vector
    tensors.y.fill_(float("nan"))
    tensors.run(plan)
    assert tensors.error < TOLERANCE[case.dtype]


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_runs_are_loaded_as_vectors(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halo_build, "MAX_BESIDE", 99.0)
    case = replace(VECTORS["march"], size=(3, 14, 24), batch=3, dtype=dtype)
    tensors, build = Tensors(case), build_for(case)
    job = job_of(tensors.problem)
    runs = [t for t in tilings(build, 3, job.positions, job.read_size) if t.length and build.vectors(job, t)]
    assert {run.sheets for run in runs} == {1, 3} and max(run.tiles[2] for run in runs) > 1
    for run in runs:
        tensors.y.fill_(float("nan"))
        tensors.run(halo_planner.assemble(build, run, job, DEVICE), "shuffled:1")
        assert tensors.error < TOLERANCE[dtype], run


PAIRS = {  # inputs whose lines are even, but no vectors
    "march": Case(21, 8, (3, 14, 10), (2, 3, 3), 1, (1, 1, 2), dtype="bfloat16", build=MARCH),
    "several chunks": Case(72, 8, (2, 3, 22), (1, 2, 3), dtype="float16", build={**FLAT, "row_bytes": 64}),
}


@needs_compiler
@pytest.mark.parametrize("name", PAIRS)
def test_even_lines_are_loaded_by_pairs(name: str) -> None:
    """Boxes and runs, and by the same kernel lines that begin at odd places."""
    case = PAIRS[name]
    tensors, build = Tensors(case), build_for(case)
    job = job_of(tensors.problem)
    found = list(tilings(build, case.batch, job.positions, job.read_size))
    paired = [t for t in found if build.pairs(job, t)]
    runs = [t for t in paired if t.length]
    assert bool(runs) == build.march and len(paired) < len(found)
    boxes = [t for t in paired if not t.length]
    single = next(t for t in found if not build.pairs(job, t))
    for tiling in (*runs, boxes[0], boxes[-1], single):
        tensors.y.fill_(float("nan"))
        tensors.run(halo_planner.assemble(build, tiling, job, DEVICE), "shuffled:1")
        assert tensors.error < TOLERANCE[case.dtype], tiling


@needs_compiler
@pytest.mark.parametrize("name", ["kernel 3, stride 2", "march", "march, padded", "batch in the rows"])
def test_every_tiling_gives_the_same_result(name: str) -> None:
    """All cuts of a small volume into tiles and slabs: the run-time numbers of one compiled kernel."""
    case = SETTINGS[name]
    tensors, build = Tensors(case), build_for(case)
    job = job_of(tensors.problem)
    found = list(tilings(build, case.batch, job.positions, job.read_size))
    runs = [tiling for tiling in found if tiling.length]
    assert len(found) >= 8 and (runs or not build.march)
    for tiling in runs + found[len(runs) :: max(1, len(found) // 12)]:
        tensors.y.fill_(float("nan"))
        tensors.run(halo_planner.assemble(build, tiling, job, DEVICE))
        assert tensors.error < TOLERANCE[case.dtype], tiling


PORTIONS = {
    "streamed": Case(72, 12, (3, 5, 6), 3, 1, 1, build={"resident": False, "slots": 4, "portioned": True}),
    "phases apart": Case(
        64, 32, (2, 3, 4), (3, 3, 2), 2, 1, build={"split": (True, True, False), "copied": True, "portioned": True}
    ),
    "16 bits": Case(
        136, 9, (2, 4, 5), 2, 2, dtype="bfloat16", channels_last=True,
        build={"resident": False, "slots": 3, "portioned": True},
    ),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", PORTIONS)
def test_portions_of_the_channels_add_up(name: str) -> None:
    case = PORTIONS[name]
    tensors, build = Tensors(case), build_for(case)
    job = job_of(tensors.problem)
    found = halo_model.best_tiling(build, job, 132)
    assert found is not None and found[1].portions > 1, "a GPU has more multiprocessors than this has tiles"
    for portions in {2, build.chunks}:
        plan = halo_planner.assemble(build, replace(found[1], portions=portions), job, DEVICE)
        tensors.y.fill_(float("nan"))
        tensors.run(plan)
        assert tensors.error < TOLERANCE[case.dtype], (plan.build, plan.tiling)


LAST_DIVIDED: dict[str, object] = {"march": False, "resident": False, "slots": 4, "spread": True}
SPREAD = {
    "one slab": Case(72, 64, (3, 5, 10), (3, 2, 2), 1, 1, build={**LAST_DIVIDED, "slabs": 1}),
    "padding above and below": Case(64, 16, (5, 3, 9), (4, 2, 1), batch=1, build=LAST_DIVIDED),
    "planes without input": Case(72, 8, (2, 3, 10), (3, 1, 1), 1, 0, dilation=(5, 1, 1), build=LAST_DIVIDED),
    "every other plane": Case(72, 16, (5, 3, 4), 3, 1, 2, dilation=2, build=LAST_DIVIDED),
    "every third plane, copied": Case(
        64, 8, (4, 3, 3), (3, 2, 2), 1, (3, 1, 0), dilation=(3, 2, 1), build={**LAST_DIVIDED, "copied": True}
    ),
    "many sums": Case(72, 128, (2, 3, 9), (2, 2, 1), build={**LAST_DIVIDED, "slabs": 2, "producers": 2, "slots": 3}),
    "phases together": Case(72, 8, (3, 4, 5), 3, 2, 1, 1, build=LAST_DIVIDED),
    "phases apart, copied": Case(
        64,
        32,
        (3, 3, 4),
        (4, 2, 2),
        2,
        (1, 0, 0),
        batch=1,
        build={**LAST_DIVIDED, "split": (True, True, False), "copied": True},
    ),
    "small panels": Case(
        96, 24, (3, 5, 6), 2, 2, dtype="float16", build={**LAST_DIVIDED, "copied": True, "fine": True, "slots": 8}
    ),
    "16 bits, channels last": Case(
        136, 9, (2, 4, 5), (3, 2, 1), dtype="bfloat16", channels_last=True, build=LAST_DIVIDED
    ),
    "groups, channels last": Case(
        128, 32, (3, 4, 5), 3, 1, 2, groups=2, channels_last=True, build={**LAST_DIVIDED, "copied": True}
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", SPREAD)
def test_shares_of_the_chunks_add_up(name: str) -> None:
    case = SPREAD[name]
    tensors, build = Tensors(case), build_for(case)
    assert build.can_be_spread or build.spread
    job = job_of(tensors.problem)
    found = [t for t in tilings(build, case.batch, job.positions, job.read_size) if t.slabs <= build.round_slabs]
    ways = set()
    for tiling in found[:: max(1, len(found) // 3)]:
        work = tiling.work(build) * build.chunks
        for multiprocessors in {1, 3, 5, work // 2, 2 * work} - {0}:
            device = replace(DEVICE, multiprocessors=multiprocessors)
            plan = halo_planner.assemble(build, tiling, job, device)
            spread = tiling.spread(build, job.as_copied(False) if build.copied else job, multiprocessors)
            ways.add((spread.even > 0, spread.cost * spread.blocks > 0))
            tensors.y.fill_(float("nan"))
            tensors.run(plan, f"shuffled:{multiprocessors}")
            assert tensors.error < TOLERANCE[case.dtype], (plan.build, plan.tiling, multiprocessors)
    assert len(ways) > 1, "blocks took whole tiles, and pieces"


@needs_compiler
def test_input_may_have_any_strides() -> None:
    case = Case(12, 8, (3, 4, 5), 3, 2, 1)
    tensors = Tensors(case)
    wide = torch.zeros(2, 24, 3, 9, 7)
    wide[:, ::2, :, 1:5, 2:7] = tensors.x
    tensors.x = wide[:, ::2, :, 1:5, 2:7]
    plan = halo_planner.plan_build(build_for(case), job_of(tensors.problem), DEVICE)
    assert plan is not None
    tensors.run(plan)
    assert tensors.error < TOLERANCE["float32"]


@needs_compiler
def test_strict_float32_of_small_large_and_infinite_values() -> None:
    """Halves of a value stay finite, and what is not finite stays what it is."""
    case = Case(64, 8, (1, 1, 70), 1, batch=1, bias=False, strict=True)
    tensors, most = Tensors(case), torch.tensor(3.4028e38)  # TF32 would round it to infinity
    x, plain = tensors.x[0, :, 0, 0], slice(0, 64)
    tensors.weight.copy_(torch.eye(8).repeat(8, 1)[:, :, None, None, None])
    x.zero_()
    x[:8, plain] = (torch.rand(8, 64) + 1) * torch.logspace(-44, 38, 64)  # from subnormal numbers to large ones
    x[0, 64], x[1, 65], x[2, 66], x[3, 67] = float("inf"), -float("inf"), float("nan"), most
    x[4, 68] = x[36, 68] = most
    x[5, 69] = x[37, 69] = -most
    plan = halo_planner.plan_build(build_for(case), job_of(tensors.problem), DEVICE)
    assert plan is not None and plan.build.chunks > 1
    tensors.run(plan)
    y, exact = tensors.y[0, :, 0, 0], x[:8].double()
    allowed = 2**-22 * exact.abs() + 2**-136  # TF32 has no smaller step
    assert ((y.double() - exact).abs() <= allowed)[:, plain].all()
    assert (y[0, 64], y[1, 65]) == (float("inf"), -float("inf")) and y[2, 66].isnan()
    assert abs(y[3, 67] - most) <= 2**-22 * most
    assert (y[4, 68], y[5, 69]) == (float("inf"), -float("inf"))  # a sum that is too large


WEIGHTS = {
    "kernel 3": Case(40, 24, (3, 4, 5), (3, 3, 5)),
    "kernel 3, stride 2": Case(36, 72, (3, 4, 5), 3, 2, 1),
    "groups, bfloat16": Case(144, 48, (3, 4, 5), (2, 3, 3), groups=2, dtype="bfloat16"),
    "small groups": Case(32, 32, (3, 4, 5), 2, groups=4),
}


@needs_compiler
@pytest.mark.parametrize("which", [Pass.FORWARD, Pass.INPUT_GRAD])
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_may_have_any_strides(name: str, which: Pass) -> None:
    """Packed, a weight is the same to the bit: as it comes, channels-last, not aligned, and spread out."""
    case = WEIGHTS[name]
    tensors = Tensors(case)
    weight, results = tensors.weight, set()
    spread = torch.zeros(*weight.shape, 2, dtype=weight.dtype)[..., 0]
    beside = torch.zeros(weight.numel() + 1, dtype=weight.dtype)[1:].view(weight.shape)
    last = weight.contiguous(memory_format=torch.channels_last_3d)
    for each in (weight, last, beside.copy_(weight), spread.copy_(weight)):
        job = job_of(replace(tensors.problem, which=which, weight=each.stride()))
        build = halo_planner.choose(job, DEVICE.shared_bytes, 132)
        assert build is not None
        packed = torch.zeros(build.packed_bytes, dtype=torch.uint8)
        emulator.prepare(build.pack(job))((each.data_ptr(), packed.data_ptr()))
        results.add(packed.numpy().tobytes())
    assert len(results) == 1 and any(results.pop())


LARGE = {
    **{name: LAYERS[name] for name in ("large_volume", "grouped_strided_g1", "gan_128_64_16")},
    "32 output channels, stride 2": layer(2, 40, 32, 80, kernel=4, stride=2, padding=1),
    "few columns of lines": layer(2, 12, 160, (14, 56, 56), kernel=2, stride=2),
}


@pytest.mark.parametrize("name", LARGE)
def test_products_of_large_layers_do_not_wait_for_each_other(name: str) -> None:
    """What the emulator runs is smaller, and leaves registers free."""
    pytest.importorskip("cuda.core")
    operands = (LARGE[name].module(torch.float32, "meta"), LARGE[name].input(torch.float32, "meta"))
    forward, input_grad, *_ = (job_of(replace(problem, tf32=True)) for problem in problems_of(*call_of(*operands)))
    job = input_grad if "lines" in name else forward
    found = halo_planner.plan_or_none(job, Device("Hopper", (9, 0), 132, 232448))
    assert found is not None
    assert not compiler.compile("halo", found.main.constants, "sm_90a").serialized


def test_a_new_volume_compiles_nothing() -> None:
    """But what typical volumes need."""
    device = Device("Hopper", (9, 0), 132, 232448)
    for case in (SETTINGS["march"], SETTINGS["kernel 3, stride 2"], SETTINGS["kernel equals stride"]):

        def build(case: Case) -> tuple[halo_planner.Nominal, object]:
            job = job_of(Tensors(case).problem)
            return halo_planner.Nominal.of(job), halo_planner.choose(job, device.shared_bytes, device.multiprocessors)

        halo_planner.forget()
        nominal, first = build(case)
        assert build(case)[1] == first
        for batch, size in ((1, (2, 3, 4)), (1, (1, 1, 1)), (1, (7, 8, 9)), (2, (7, 9, 3)), (1, (5, 2, 8))):
            nominal, chosen = build(replace(case, size=size, batch=batch))
            jobs = halo_planner._typical_jobs(replace(nominal, kind=0))
            assert len(jobs) == len(TYPICAL)
            have = [halo_planner._choice(job, device.shared_bytes, device.multiprocessors) for job in jobs]
            assert chosen in (first, *(halo_planner._build_of(nominal, each) for each in have))
        halo_planner.forget()


@pytest.mark.parametrize("which", [Pass.FORWARD, Pass.INPUT_GRAD])
@pytest.mark.parametrize(
    ("dtype", "strict"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)]
)
def test_no_tiling_takes_less_than_the_least(which: Pass, dtype: torch.dtype, strict: bool) -> None:
    """What the search passes over without a closer look would not have been chosen."""
    torch.backends.cudnn.conv.fp32_precision = "ieee" if strict else "tf32"
    looked_at = 0
    for small in (layer(2, 48, 24, (6, 8, 12), 3, 2, 1, 1), layer(2, 128, 64, 4, 4, 2, 1), layer(1, 24, 16, 20, 3)):
        for layout in (torch.contiguous_format, torch.channels_last_3d):
            x = small.input(dtype, "meta").contiguous(memory_format=layout)
            problems = problems_of(*call_of(small.module(dtype, "meta"), x))
            given = job_of(next(problem for problem in problems if problem.which is which))
            for build in halo_planner.builds_of(halo_planner.Nominal.of(given), DEVICE.shared_bytes):
                job = given.as_copied(build.rewritten) if build.copied else given
                if not build.stores(job) or (build.rewritten and not given.has_rows):
                    continue
                least = halo_model.Least.of(build, job)
                for tiling in list(tilings(build, job.batch, job.positions, job.read_size))[::23]:
                    takes = halo_model.cycles(build, tiling, job, 132)
                    # Where products are left out, all of them are counted.
                    assert build.skips or not least.exceeds(tiling, 132, 1.0000001 * takes), (build, tiling)
                    assert least.exceeds(tiling, 132, 0.05 * takes)
                    looked_at += 1
    assert looked_at > 100


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ({"dtype": "float64"}, "float64"),
        ({"which": Pass.WEIGHT_GRAD}, "forward"),
        ({"batch": 0}, "nothing"),
        ({"geometry": Geometry.make(8, 8, (3, 3, 3), (4, 4, 4))}, "64 phases"),
        ({"geometry": Geometry.make(8, 2, (3, 3, 3))}, "channels"),
    ],
)
def test_why_not(problem: dict[str, object], reason: str) -> None:
    base = Tensors(Case(8, 8, (3, 3, 3), 3)).problem
    assert halo_planner.why_not(base, DEVICE) is None
    refusal = halo_planner.why_not(replace(base, **problem), DEVICE)  # type: ignore[arg-type]
    assert refusal is not None and reason in refusal
    assert halo_planner.why_not(base, Device("Ampere", (8, 0), 108, 166912)) is not None
