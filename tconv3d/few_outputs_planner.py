"""Plans for kernels/few_outputs.cuh: the forward pass with few output channels, products first, shifts afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from .direct_planner import INT32_MAX, SCALARS
from .geometry import Gather, Geometry
from .launch import Constants, Launch
from .packing import divider, int32s, int64s, padded
from .problem import Device, Pass, Plan, Problem, last_offset

HAS_EPILOGUE = True
TILES = ((8, 16), (8, 32), (16, 16), (4, 32), (8, 8), (4, 16))  # positions along h and w
MAX_OUT = 4  # channels per group; with more, columns of channels fill the tensor cores
MAX_SUMS = 96  # accumulators of a thread in the product
MAX_WINDOW = 48  # and in its window of output planes
SHARED_BYTES = 100 * 1024  # so that two blocks share a multiprocessor


@dataclass(frozen=True)
class Tile:
    """A block's positions with their halo, and how its warps share the rows of the product."""

    h: int
    w: int
    halo_h: int
    halo_w: int

    @property
    def warps(self) -> int:
        return self.h * self.w // 32

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows per warp."""
        tiles = -(-self.halo_h * self.halo_w // 16)
        return -(-tiles // self.warps)

    @property
    def rows(self) -> int:
        return self.row_tiles * self.warps * 16

    @property
    def pitch(self) -> int:
        """Of a column in shared memory: 4 past a multiple of 32, so that fragments are stored without conflicts."""
        return self.rows + (4 - self.rows) % 32

    def __str__(self) -> str:
        return f"{self.h} x {self.w} positions per block, walking along depth"


def _offsets(gather: Gather) -> list[int]:
    return [gather.offset(f, j) for f in range(gather.phases) for j in range(gather.count[f])]


def _span(gather: Gather) -> int:
    return max(_offsets(gather)) - min(_offsets(gather))


def _columns(g: Geometry) -> int:
    return -(-g.taps * g.out_per_group // 8) * 8


def _steps(problem: Problem) -> int:
    return -(-problem.geometry.in_per_group // (32 // problem.item_bytes))


def _window(g: Geometry) -> int:
    d = g.axes[0]
    return max(d.dilation * (d.kernel - 1) + 1, d.stride)


def _shared_bytes(problem: Problem, tile: Tile) -> int:
    columns = _columns(problem.geometry)
    return _steps(problem) * columns // 8 * 256 + columns * tile.pitch * 4


def _choose_tile(problem: Problem) -> Tile | None:
    """The tile whose product has the fewest rows per position, of those that fit. Never depends on the volume."""
    g = problem.geometry
    spans = [_span(axis.scatter) for axis in g.axes[1:]]
    tiles = [Tile(h, w, h + spans[0], w + spans[1]) for h, w in TILES]
    fit = [
        tile
        for tile in tiles
        if tile.row_tiles * _columns(g) // 2 <= MAX_SUMS and _shared_bytes(problem, tile) <= SHARED_BYTES
    ]
    return min(fit, key=lambda tile: tile.rows / (tile.h * tile.w), default=None)


def why_not(problem: Problem, device: Device) -> str | None:
    g = problem.geometry
    if problem.which is not Pass.FORWARD:
        return "it computes the forward pass"
    if problem.dtype == "float64" or (problem.dtype == "float32" and not problem.tf32):
        return "tensor cores round products to TF32 or 16 bits"
    if g.out_per_group > MAX_OUT:
        return f"more than {MAX_OUT} output channels per group"
    if g.in_per_group < 8:
        return "fewer than 8 input channels per group"
    if _window(g) * g.stride[1] * g.stride[2] * g.out_per_group > MAX_WINDOW:
        return "the window of output planes does not fit the registers"
    if _choose_tile(problem) is None:
        return "the products of all taps do not fit a multiprocessor"
    return None


def plan(problem: Problem, device: Device) -> Plan:
    g, tile = problem.geometry, _choose_tile(problem)
    assert tile is not None, "why_not was not asked"
    d, h, w = g.axes
    tap_phase = [h.phase(th) * w.stride + w.phase(tw) for th in range(h.kernel) for tw in range(w.kernel)]
    origin_h, origin_w = min(_offsets(h.scatter)), min(_offsets(w.scatter))
    tap_offset = [
        (-h.shift(th) - origin_h) * tile.halo_w + (-w.shift(tw) - origin_w)
        for th in range(h.kernel)
        for tw in range(w.kernel)
    ]
    plane = last_offset((*problem.input_size[1:],), problem.input[3:])
    constants: Constants = (
        ("kThreads", tile.h * tile.w),
        ("kMinBlocks", 3 if tile.row_tiles * _columns(g) // 2 < MAX_SUMS else 2),
        ("Scalar", SCALARS[problem.dtype]),
        ("Epilogue", problem.activation),
        ("kWide", plane > INT32_MAX),
        ("kUnitW", problem.input[4] == 1),
        ("kIn", g.in_per_group),
        ("kOut", g.out_per_group),
        ("kTileH", tile.h),
        ("kTileW", tile.w),
        ("kHaloH", tile.halo_h),
        ("kHaloW", tile.halo_w),
        ("kOriginH", origin_h),
        ("kOriginW", origin_w),
        ("kPitch", tile.pitch),
        ("kRowTiles", tile.row_tiles),
        ("kWindow", _window(g)),
        ("kStrideD", d.stride),
        ("kPaddingD", d.padding),
        ("kDilationD", d.dilation),
        *((f"kKernel{n}", axis.kernel) for n, axis in zip("DHW", g.axes, strict=True)),
        ("kStrideH", h.stride),
        ("kStrideW", w.stride),
        ("kPairs", w.stride == 2 and problem.output[4] == 1),
        ("kTapPhase", tuple(tap_phase)),
        ("kTapOffset", tuple(tap_offset)),
    )
    out_d, out_h, out_w = problem.output_size
    tiles_h = -(-h.positions(out_h) // tile.h)
    tiles_w = -(-w.positions(out_w) // tile.w)
    flat = problem.batch * g.groups * tiles_h * tiles_w
    parts = _parts(out_d, flat, device)
    planes = -(-out_d // parts)
    parts = -(-out_d // planes)
    launch = Launch(
        kernel="few_outputs",
        constants=constants,
        grid=(flat * parts, 1, 1),
        threads=tile.h * tile.w,
        shared_bytes=_shared_bytes(problem, tile),
        pointers=("x", "weight", "bias", "y"),
        scalars=padded(
            int64s(*problem.input, *problem.output, *problem.weight),
            int32s(*problem.input_size, *problem.output_size, planes, problem.batch),
            divider(tiles_w),
            divider(tiles_h),
            divider(parts),
        ),
    )
    return Plan("few_outputs", "tensor cores, a column for every tap", (launch,), tile=str(tile))


def _parts(planes: int, flat: int, device: Device) -> int:
    """Into how many parts the depth is cut: enough blocks for a few waves, but parts long against their halo."""
    wanted = -(-device.multiprocessors * 6 // max(flat, 1))
    return max(1, min(wanted, planes // 12))
