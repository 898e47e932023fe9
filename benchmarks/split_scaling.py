"""Predicts, on paper, how a layer scales when its volume is split over up to 512 GPUs.

    python benchmarks/split_scaling.py

Rows, slabs and messages come from `tconv3d.distributed.shards`, which a split layer runs by. Compute times are the
H200's times per input position, from benchmarks/results. Bandwidths and latencies of the networks are assumptions,
stated here. Nothing of this was measured on several GPUs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import log2, prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tconv3d.distributed.shards import Block, ShardTooSmall, block, volume
from tconv3d.planning.geometry import Geometry
from tconv3d.tools.bench import results

ROOT = Path(__file__).resolve().parent.parent
TIMES = ROOT / "benchmarks" / "results" / "h200.json"
LAYERS = ("nnunet_64_32_64", "monai_64_16_32", "gan_128_64_16", "large_volume")
GPUS = (8, 64, 512)
OUTPUTS = (1024, 256)  # edges of the output volume
BYTES = 4  # float32


@dataclass(frozen=True)
class Network:
    """Describes what one GPU sends in one direction: GB/s that are reached, and seconds until a message arrives."""

    name: str
    bandwidth: float
    latency: float


# NVLink of an H200: 450 GB/s in each direction by its data sheet, of which 80% are assumed to be reached. InfiniBand
# NDR with one adapter per GPU: 50 GB/s, of which 90% are assumed to be reached. The latencies are assumptions too and
# include the start of NCCL's kernel.
NETWORKS = (Network("NVLink", 360.0, 10e-6), Network("InfiniBand", 45.0, 20e-6))


@dataclass(frozen=True)
class Layer:
    """Holds a layer's geometry and its measured seconds per input position, forward and backward."""

    name: str
    text: str
    geometry: Geometry
    rates: tuple[float, float]

    @property
    def weight_bytes(self) -> int:
        return self.geometry.in_channels * self.geometry.out_per_group * self.geometry.taps * BYTES

    def input_edge(self, output_edge: int) -> int:
        """Returns the edge of the input whose output has nearly the given edge."""
        return output_edge // self.geometry.stride[0]


@cache
def layers() -> tuple[tuple[Layer, ...], float]:
    """Returns the layers, and the shortest time of a pass that was measured, which no launch is predicted to beat."""
    found = results.read(TIMES)
    rows = {(row.layer, row.which): row for row in found.rows}
    times = {key: row.ours_ms for key, row in rows.items() if row.ours_ms is not None}
    made = []
    for name in LAYERS:
        shape = rows[name, "forward"].shape
        settings = (shape[key] for key in ("kernel", "stride", "padding", "output_padding"))
        geometry = Geometry.make(
            shape["in_channels"],
            shape["out_channels"],
            *map(tuple, settings),
            shape["groups"],
            tuple(shape["dilation"]),
        )
        positions = shape["batch"] * prod(shape["size"])
        forward, backward = (times[name, which] / 1e3 / positions for which in ("forward", "backward"))
        made.append(Layer(name, _described(rows[name, "forward"].text), geometry, (forward, backward)))
    return tuple(made), min(times.values()) / 1e3


def _described(text: str) -> str:
    """Returns a layer's description without its volume: "64 to 16, kernel 3, stride 2"."""
    channels, rest = text.split(" on ")
    return f"{channels}, {rest.split(', ', 1)[1]}"


@dataclass(frozen=True)
class Prediction:
    """Holds the seconds of a step on one rank."""

    mesh: tuple[int, ...]
    compute: float
    exchange: float  # messages alone
    total: float
    sent: int  # bytes

    def efficiency(self, alone: float) -> float:
        return alone / (prod(self.mesh) * self.total)


def step(layer: Layer, edge: int, mesh: tuple[int, ...], network: Network) -> Prediction:
    """Predicts a training step of one batch item on a rank in the midst of the mesh."""
    place = tuple(min(1, count - 1) for count in mesh)
    compute = exchange = total = 0.0
    sent = 0
    for backward in (False, True):
        here = block(layer.geometry, (edge, edge, edge), mesh, place, backward)
        one = _pass(layer, here, network, backward)
        compute, exchange, total, sent = compute + one[0], exchange + one[1], total + one[2], sent + one[3]
    ranks = prod(mesh)
    if ranks > 1:
        moved = 2 * (ranks - 1) / ranks * layer.weight_bytes
        reduction = 2 * network.latency * log2(ranks) + moved / network.bandwidth / 1e9
        exchange, total = exchange + reduction, total + reduction
    return Prediction(mesh, compute, exchange, total, sent)


def _pass(layer: Layer, here: Block, network: Network, backward: bool) -> tuple[float, float, float, int]:
    """Returns seconds of kernels, of messages and of both as they overlap, and bytes sent."""
    rate, least = layer.rates[backward], layers()[1]
    channels = layer.geometry.out_channels if backward else layer.geometry.in_channels
    own = max(least, rate * volume(here.targets if backward else here.sources))
    compute, exchange, total, waiting, sent = own, 0.0, 0.0, own, 0
    for dim in here.dims:
        message = sum(map(volume, here.sends(dim).values())) * channels * BYTES
        seconds = network.latency + message / network.bandwidth / 1e9 if message else 0.0
        total += max(seconds, waiting)  # kernels that wait for nothing run meanwhile
        rows = [volume(slab.computed if backward else slab.sources) for slab in here.slabs(dim)]
        waiting = sum(max(least, rate * count) for count in rows)
        compute, exchange, sent = compute + waiting, exchange + seconds, sent + message
    return compute, exchange, total + waiting, sent


def best(layer: Layer, edge: int, ranks: int, network: Network) -> Prediction | None:
    """Returns the prediction for the fastest mesh, or None if no mesh has shards as large as their halos.

    Depth has the most shards and width the fewest, because rows of depth are the longest pieces of memory.
    """
    powers = [2**each for each in range(ranks.bit_length())]
    found = []
    for mesh in product(powers, repeat=3):
        if prod(mesh) == ranks and list(mesh) == sorted(mesh, reverse=True):
            try:
                found.append(step(layer, edge, mesh, network))
            except ShardTooSmall:
                continue
    return min(found, key=lambda each: each.total, default=None)


def table() -> str:
    """Returns the table of docs/distributed.md."""
    lines = [
        "| layer | output | GPUs | mesh (InfiniBand) | MB sent | kernels | messages NVLink | InfiniBand | efficiency "
        "NVLink | InfiniBand |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for output, layer in product(OUTPUTS, layers()[0]):
        edge = layer.input_edge(output)
        alone = step(layer, edge, (1, 1, 1), NETWORKS[0]).total
        for ranks in GPUS:
            near, far = (best(layer, edge, ranks, network) for network in NETWORKS)
            if near is None or far is None:
                lines.append(f"| {layer.text} | {output}³ | {ranks} | shards smaller than a halo | | | | | | |")
                continue
            cells = [
                layer.text, f"{output}³", str(ranks), "x".join(map(str, far.mesh)), f"{far.sent / 1e6:.1f}",
                f"{far.compute * 1e3:.2f} ms", f"{near.exchange * 1e3:.2f} ms", f"{far.exchange * 1e3:.2f} ms",
                f"{near.efficiency(alone):.0%}", f"{far.efficiency(alone):.0%}",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
