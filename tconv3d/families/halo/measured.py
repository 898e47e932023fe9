"""Holds the constants of the halo kernel's model that were measured on a GPU.

planning/models/h200.json has their values, each with its unit and its origin; this module says what they mean. The
constants of the H200 serve for every GPU on which the kernel runs. Times are in cycles of a multiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...planning.calibration import model_constants


@dataclass(frozen=True)
class Costs:
    """Times and rates, which `tconv3d calibrate --models` fits; float32 and 16-bit types have their own."""

    start: float  # cycles of a plan besides its work
    tile: float  # cycles per tile that overlap with nothing
    plane: float  # cycles per plane of a march, besides its products
    shared: float  # factor on planes of shares, because neighbouring blocks are then at different depths
    crooked: float  # factor on stores if tiles are runs instead of boxes
    batch: float  # cycles of a loader warp per batch of loads
    few_loaders: float  # factor on `batch` if there is one producer warpgroup
    first: float  # fraction of the first stage's load time that overlaps with nothing
    copied: float  # cycles from the release to the arrival of a stage that asynchronous copies fill
    arrival: float  # additional cycles per stage of asynchronous copies if loaders round it in shared memory
    copy: float  # cycles of a loader warp per asynchronous copy of 512 bytes
    arriving: float  # cycles that products wait for each stage of copied rows, divided by stages - 1
    stage: float  # cycles of the barriers per stage that is filled through registers
    find: float  # cycles of a loader warp per batch of positions that it looks up, for each source of a tile
    load: float  # cycles of the multiprocessor per load by a warp
    sector: float  # cycles of the multiprocessor per sector of 32 bytes that a load touches
    product: float  # factor on the nominal cycles of the tensor cores
    panel: float  # cycles per resident panel: barriers, and the drain of the tensor cores
    streamed: float  # cycles per streamed panel in float32: barriers, and the drain of the tensor cores
    supplied: float  # replaces `streamed` with 16-bit types, and where consumers divide K
    slot: float  # cycles from the release of a panel's slot to the arrival of the next panel
    rows: float  # cycles of the launch that writes rows of channels, besides its traffic
    rows_bytes: float  # bytes per cycle that the launch moves that writes rows of channels
    rewritten: float  # cycles of the launch that rounds existing rows of channels, besides its traffic
    rewritten_bytes: float  # bytes per cycle that the launch moves that rounds existing rows of channels
    adding: float  # cycles of the launch that adds up partial sums, besides its traffic
    added_bytes: float  # bytes per cycle that the launch moves that adds up portions
    pieced_bytes: float  # bytes per cycle that the launch moves that adds up pieces of tiles, mostly from L2
    busy: float  # factor on the time if blocks divide the last tiles: blocks busy to the end share L2 and power
    store: float  # cycles per store by a warp
    scattered: float  # factor on stores along w, per near batch item (at most 8), if a tile has several
    apart: float  # factor on stores if a column tile has one phase along w
    little_hides: float  # replaces `apart` for stores along w beside one producer warpgroup
    imaged: float  # cycles per 32 outputs of 4 bytes that are stored through images
    long_runs: float  # cycles per 32 outputs that are written to images of long runs
    moment: float  # cycles per 32 outputs whose moments are added up for a norm
    narrow_band: float  # cycles per pass over a tile or plane of a march, for each band of one channel of a lane
    strict_panel: float  # strict float32: cycles of waiting for the products of a panel
    strict_sum: float  # strict float32: cycles per accumulator that is added to its total
    # Factor on the device memory's time for builds that load lines as they lie in memory, and for builds whose lanes
    # store 16 bytes of channels-last outputs at a time.
    streaming: float
    line: float  # bytes per cycle that arrive of lines as they lie in memory
    line_stage: float  # cycles per stage of lines
    turn: float  # cycles per turn of products on lines, to load and round the operands
    quads: float  # cycles per 32 outputs that lanes store four at a time; twice as many if two at a time
    cache_bytes: float  # bytes per cycle from L2 to a multiprocessor
    memory_bytes: float  # bytes per cycle of the whole device memory
    run: float  # device memory cycles per run of outputs whose ends share sectors with other tiles
    long_run: float  # replaces `run` for outputs that are stored as long runs
    torn: float  # bytes of traffic per byte of an output whose neighbours come from another column tile
    overlap: float  # exponent of the norm that joins times that overlap: 1 is a sum, infinity the maximum
    crowded: float  # most bytes per cycle of input and streamed panels in a march
    uneven: float  # difference between the times at which blocks end, as a fraction of the time of the shortest tile
    turn_slabs: float  # exponent of the number of slabs in the time of a turn: loads of several slabs are in flight
    supply: float  # exponent of the norm that joins products and the panels that they wait for
    # Exponent of the fraction of products that remain when some are skipped. It is below 1 because consumers wait for
    # each other, and the launch waits for the last block.
    skipped: float
    filled: float  # fraction of the shared memory time of arriving data during which operands wait


@dataclass(frozen=True)
class Choices:
    """Constants that decide how a kernel is compiled or launched, besides being part of predicted times.

    Times of builds cannot tell them. `tconv3d calibrate --models` plans and times with several values of each.
    """

    chunk: float  # fraction of a chunk's cost that does not depend on the panels that it skips
    store_cycles: float  # cycles to store an accumulator, from the last product of a tile to the first of the next
    instruction: float  # overhead of a matrix instruction, by which the columns of a march are ordered
    instruction_many_channels: float  # replaces `instruction` for float32 with more than 8 channels per group
    beside: float  # most elements that loads of whole vectors may fetch, as a multiple of the halo's elements


_sections = model_constants("halo")
COSTS = Costs(**_sections["float32"])
HALVES = Costs(**{**_sections["float32"], **_sections["16 bit"]})
CHOICES = Choices(**_sections["choices"])
VERSION = repr((COSTS, HALVES, CHOICES))  # part of the keys of stored choices
