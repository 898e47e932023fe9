"""Split volumes for tests: cases, the job that computes them on every rank, and the comparison with one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from layers import UNIT, Layer, passes, poisoned, wrong_elements
from preferred import only, preferring
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.profiler import ProfilerActivity, profile

import tconv3d
from tconv3d import distributed
from tconv3d.distributed.exchange import Pieces
from tconv3d.distributed.shards import Block, Box, Split, block, chunk, volume
from tconv3d.planning.geometry import Geometry


@dataclass(frozen=True)
class Case:
    """Describes a layer, its volume, and how the volume is split."""

    layer: Layer
    shards: tuple[int, ...]  # the shape of the mesh
    dims: tuple[int, ...]  # the tensor's dimension (2: depth) that each mesh dimension splits
    dtype: str = "float32"  # or tf32
    channels_last: bool = False
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "tf32" else getattr(torch, self.dtype)

    def operands(self) -> tuple[list[Tensor], Tensor]:
        """Returns input, weight, bias if there is one, and the gradient of the result, as one process has them."""
        random = torch.Generator().manual_seed(self.seed)
        memory = torch.channels_last_3d if self.channels_last else torch.contiguous_format

        def rounded(tensor: Tensor) -> Tensor:  # to sixteenths, which every type and TF32 hold exactly
            return tensor.mul_(16).round_().clamp_(-32, 32).div_(16).to(self.torch_dtype)

        layer = self.layer
        operands = [rounded(each.float()) for each in layer.operands(torch.float32, "cpu", self.seed)]
        operands[0] = operands[0].contiguous(memory_format=memory)
        shape = F.conv_transpose3d(*_with_bias(operands), *layer.settings).shape
        grad = rounded(torch.randn(shape, generator=random)).contiguous(memory_format=memory)
        return operands, grad

    def own(self, whole: Tensor, place: tuple[int, ...]) -> Tensor:
        """Returns the shard of a tensor at a place of the mesh."""
        for dim, shards, index in zip(self.dims, self.shards, place, strict=True):
            rows = chunk(whole.shape[dim], shards, index)
            whole = whole.narrow(dim, rows.start, len(rows))
        return whole


def _with_bias(operands: list[Tensor]) -> list[Any]:
    return [*operands, *([None] if len(operands) == 2 else [])]


_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """Returns the mesh of the first ranks. All ranks must call this, and those outside of the mesh as well."""
    if shape not in _meshes:
        _meshes[shape] = DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).view(shape))
    return _meshes[shape]


Kernels = Literal["pytorch", "direct", "tensor cores"]
FORCED: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "pytorch": contextlib.nullcontext,
    "direct": lambda: only("direct"),
    "tensor cores": lambda: preferring("halo", "hopper_weight_grad"),
}


@contextlib.contextmanager
def as_tests_run(case: Case, kernels: Kernels) -> Any:
    """Kernels run in the emulator, with the case's precision: of one family alone, or preferred ones, if named."""
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "tf32" if case.dtype == "tf32" else "ieee"
    try:
        with tconv3d.use_backend("torch" if kernels == "pytorch" else "emulator"), FORCED[kernels]():
            yield
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


Passes = tuple[Tensor, list[Tensor]]  # a result, and the gradients of input, weight and, if there is one, bias


def split_passes(cases: list[Case], kernels: Kernels, broken: str = "") -> list[Passes | None]:
    """Runs on every rank: returns the rank's shards of results and gradients; None where the rank has no shard."""
    for case in cases:  # before anything can fail, because all ranks must take part
        mesh_of(case.shards)
    block.cache_clear()
    with BROKEN[broken]():
        found = [_split_passes(case, kernels) for case in cases]
    block.cache_clear()
    return found


def _split_passes(case: Case, kernels: Kernels) -> Passes | None:
    mesh = mesh_of(case.shards)
    place = mesh.get_coordinate()
    if place is None:
        return None
    leaf, leaves, grad = _leaves(case, tuple(place))
    with as_tests_run(case, kernels), poisoned():
        result = _convolve(case, leaf, leaves)
        assert result.shape == grad.shape
        local = result.to_local()
        grads = torch.autograd.grad(local, [leaf, *leaves], case.own(grad, tuple(place)))
    return local.detach(), list(grads)


def rows_of_results(case: Case) -> int:
    """Runs on every rank: returns how many rows along the first split dimension its result has."""
    result = split_passes([case], "direct")[0]
    assert result is not None
    return int(result[0].shape[case.dims[0]])


def _leaves(case: Case, place: tuple[int, ...]) -> tuple[Tensor, list[Tensor], Tensor]:
    """Returns the rank's shard of the input, the parameters, and the gradient of the whole result."""
    (x, *parameters), grad = case.operands()
    leaf = case.own(x, place).clone(memory_format=torch.preserve_format).requires_grad_()
    return leaf, [each.requires_grad_() for each in parameters], grad


def _convolve(case: Case, local: Tensor, parameters: list[Tensor]) -> DTensor:
    shape = (case.layer.batch, case.layer.in_channels, *case.layer.size)
    placements = [Shard(dim) for dim in case.dims]
    memory = torch.channels_last_3d if case.channels_last else torch.contiguous_format
    strides = torch.empty(shape, device="meta").to(memory_format=memory).stride()
    mesh = mesh_of(case.shards)
    volume = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)
    bias = parameters[1] if len(parameters) == 2 else None
    result = distributed.conv_transpose3d(volume, parameters[0], bias, *case.layer.settings)
    assert result.placements == tuple(placements)
    return result


@contextlib.contextmanager
def _sending_the_row_beside() -> Iterator[None]:
    """Every message has the rows that follow those it should have, or precede them at the end of a shard."""
    gather = Pieces.gather

    def shifted(pieces: Pieces, box: Box, dim: int) -> Tensor:
        has = pieces.pieces[0][0][dim]
        step = 1 if box[dim].stop < has.stop else -1
        rows = range(box[dim].start + step, box[dim].stop + step)
        return gather(pieces, (*box[:dim], rows, *box[dim + 1 :]), dim)

    with patch.object(Pieces, "gather", shifted):
        yield


BROKEN: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "": contextlib.nullcontext,
    "row beside": _sending_the_row_beside,
    "no halo": lambda: patch.object(Split, "halos", lambda split, index: (range(0), range(0))),
    "halo without readers": lambda: patch.object(Block, "readers", lambda here, dim, halo: (range(0),) * 3),
}


def one_process(case: Case, kernels: Kernels) -> Passes:
    """Returns result and gradients of the whole volume in one process."""
    operands, grad = case.operands()
    with as_tests_run(case, kernels), poisoned():
        return passes(tconv3d.conv_transpose3d, operands, case.layer.settings, grad)


def places(case: Case) -> list[tuple[int, ...]]:
    """Returns the places of the mesh in the order of the ranks."""
    return [tuple(int(i) for i in each) for each in torch.ones(case.shards).nonzero()]


def wrong_shards(case: Case, by_rank: list[Passes], expected: Passes | None) -> list[str]:
    """Describes what is wrong: results that differ from `expected` in a bit, and results that are far from float64.

    Every rank rounds its part of a parameter's gradient to the type, so that the error may be as large as the
    rounding of all these parts.
    """
    operands, grad = case.operands()
    exact = passes(F.conv_transpose3d, [each.double() for each in operands], case.layer.settings, grad.double())
    largest = passes(
        F.conv_transpose3d, [each.double().abs() for each in operands], case.layer.settings, grad.double().abs()
    )
    dtype = case.torch_dtype
    sum_unit = UNIT[torch.float64 if dtype == torch.float64 else torch.float32] * 12
    wrong = []
    rounded = _parts_rounded(case, operands, grad)
    for rank, (place, (result, grads)) in enumerate(zip(places(case), by_rank, strict=True)):
        names = ("result", "input gradient", "weight gradient", "bias gradient")
        for name, ours, true, most, parts in zip(
            names, (result, *grads), (exact[0], *exact[1]), (largest[0], *largest[1]), (0, 0, *rounded), strict=False
        ):
            own = name in names[:2]
            true, most = (case.own(true, place), case.own(most, place)) if own else (true, most)
            allowed = most * sum_unit + (true.abs() + parts) * UNIT[dtype] + 1e-7 * (dtype == torch.float16)
            found = wrong_elements(f"rank {rank}, {name}", ours, true, allowed)
            if found is not None:
                wrong.append(found)
        if expected is not None and not torch.equal(result, case.own(expected[0], place)):
            wrong.append(f"rank {rank}: bits of the result differ from those of one process")
        if not all(torch.equal(a, b) for a, b in zip(grads[1:], by_rank[0][1][1:], strict=True)):
            wrong.append(f"rank {rank}: parameter gradients differ from those of rank 0")
    return wrong


def _parts_rounded(case: Case, operands: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Returns the sums of the absolute values of the parts that the ranks add up to the parameters' gradients."""
    totals = [torch.zeros_like(each, dtype=torch.float64) for each in operands[1:]]
    if case.dtype in ("float32", "tf32", "float64"):
        return totals  # rounding them is far below the error of a sum
    for place in places(case):
        x = torch.zeros_like(operands[0], dtype=torch.float64)
        case.own(x, place).copy_(case.own(operands[0], place))
        dy = torch.zeros_like(grad, dtype=torch.float64)
        case.own(dy, place).copy_(case.own(grad, place))
        parameters = [each.double() for each in operands[1:]]
        _, (_, whole, *_) = passes(F.conv_transpose3d, [x, *parameters], case.layer.settings, grad.double())
        _, (_, own, *bias) = passes(F.conv_transpose3d, [x, *parameters], case.layer.settings, dy)
        for total, term in zip(
            totals, (own.abs() + (whole - own).abs(), *(each.abs() for each in bias)), strict=True
        ):
            total += term
    return totals


# ---- messages and memory


def _blocks(case: Case, place: tuple[int, ...]) -> list[Block]:
    """Returns the rank's part of the forward and of the backward pass."""
    layer, counts, at = case.layer, [1, 1, 1], [0, 0, 0]
    for dim, shards, index in zip(case.dims, case.shards, place, strict=True):
        counts[dim - 2], at[dim - 2] = shards, index
    geometry = Geometry.make(layer.in_channels, layer.out_channels, layer.kernel, *layer.settings)
    return [block(geometry, layer.size, tuple(counts), tuple(at), backward) for backward in (False, True)]


def bytes_sent(case: Case) -> tuple[list[int], list[int]]:
    """Runs on every rank: returns the bytes given to isend in the two passes, and those that the geometry says."""
    sent: list[int] = []
    batch = dist.batch_isend_irecv

    def counting(operations: list[Any]) -> Any:
        sent[-1] += sum(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return batch(operations)

    place = tuple(mesh_of(case.shards).get_coordinate() or ())
    leaf, leaves, grad = _leaves(case, place)
    with as_tests_run(case, "direct"), patch.object(dist, "batch_isend_irecv", counting):
        sent.append(0)
        local = _convolve(case, leaf, leaves).to_local()
        sent.append(0)
        torch.autograd.grad(local, [leaf, *leaves], case.own(grad, place))
    channels = (case.layer.in_channels, case.layer.out_channels)
    rows = [here.rows_sent for here in _blocks(case, place)]
    size = case.layer.batch * case.torch_dtype.itemsize
    return sent, [size * count * each for count, each in zip(channels, rows, strict=True)]


def _peak(step: Callable[[], object]) -> int:
    """Returns the most bytes that PyTorch's allocator holds at a time during a step, besides what it held before."""
    step()  # plans, compiles and caches
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    assert most > 0
    return most


def peak_of_one_process(case: Case) -> int:
    """Returns the most bytes of a step of the whole volume in one process, with its input and output gradient."""
    operands, grad = case.operands()
    with as_tests_run(case, "direct"):
        peak = _peak(lambda: passes(tconv3d.conv_transpose3d, operands, case.layer.settings, grad))
    return peak + operands[0].nbytes + grad.nbytes


def peak_of_a_rank(case: Case) -> tuple[int, int]:
    """Runs on every rank: returns the most bytes of a step, and those of slabs and messages by the geometry."""
    place = tuple(mesh_of(case.shards).get_coordinate() or ())
    leaf, leaves, whole = _leaves(case, place)
    grad = case.own(whole, place).clone()

    def step() -> None:
        torch.autograd.grad(_convolve(case, leaf, leaves).to_local(), [leaf, *leaves], grad)

    with as_tests_run(case, "direct"):
        peak = _peak(step)
    halos = 0
    channels = (case.layer.in_channels, case.layer.out_channels)
    for here, (sources, targets) in zip(_blocks(case, place), (channels, channels[::-1]), strict=True):
        slabs = [slab for dim in here.dims for slab in here.slabs(dim)]
        rows = sum(sources * volume(slab.sources) + targets * volume(slab.computed) for slab in slabs)
        halos = max(halos, case.layer.batch * (rows + sources * here.rows_sent) * case.torch_dtype.itemsize)
    return peak + leaf.nbytes + grad.nbytes, halos


# ---- arguments


def refusals() -> dict[str, str]:
    """Runs on every rank: returns the errors for arguments that cannot be split."""
    mesh = mesh_of((4,))
    whole, weight = torch.ones(2, 4, 8, 4, 4), torch.ones(4, 4, 3, 3, 3)

    def split(placement: Any) -> DTensor:
        return distributed.shard(whole, mesh, [placement])

    depth = split(Shard(2))
    calls: dict[str, tuple[Any, Any]] = {
        "plain tensor": (whole, weight),
        "channels": (split(Shard(1)), weight),
        "partial": (DTensor.from_local(whole, mesh, [Partial()]), weight),
        "split weight": (depth, distributed.shard(weight, mesh, [Shard(0)])),
        "weight of another type": (depth, weight.double()),
        "wrong channels": (depth, torch.ones(3, 2, 3, 3, 3)),
    }
    found = {}
    for name, (input, given) in calls.items():
        try:
            distributed.conv_transpose3d(input, given)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def other_operands() -> list[str]:
    """Runs on every rank: compares operands of other kinds with one process, and returns what differs."""
    wrong = []
    whole = torch.randn(4, 4, 8, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weight = torch.randn(4, 3, 3, 3, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    settings = ((2, 2, 2), (1, 1, 1), (1, 1, 1))

    def step(function: Any, x: Tensor, w: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        result = function(*leaves, None, *settings)
        grads = torch.autograd.grad(result.float().square().sum(), leaves)
        return [each.full_tensor() if isinstance(each, DTensor) else each for each in (result.detach(), *grads)]

    def compare(name: str, ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
        for what, one, other in zip(("result", "input gradient", "weight gradient"), ours, theirs, strict=True):
            if not torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance):
                wrong.append(f"{name}: {what}")

    exact = step(F.conv_transpose3d, whole, weight)
    mesh = mesh_of((2, 2))
    split = distributed.shard(whole, mesh, [Shard(0), Shard(2)])
    compare("batch and depth", step(distributed.conv_transpose3d, split, weight), exact, 1e-5)
    shared = DTensor.from_local(weight, mesh, [Replicate(), Replicate()])
    compare("replicated weight", step(distributed.conv_transpose3d, split, shared), exact, 1e-5)
    x, w = whole.float(), weight.float()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = step(F.conv_transpose3d, x, w)
        ours = step(distributed.conv_transpose3d, distributed.shard(x, mesh, [Shard(3), Shard(2)]), w)
    if ours[0].dtype is not torch.bfloat16 or ours[1].dtype is not torch.float32:
        wrong.append(f"autocast: {ours[0].dtype}, {ours[1].dtype}")
    compare("autocast", ours, theirs, 0.1)
    return wrong
