"""Split volumes for tests: cases, the job that computes them on every rank, and the comparison with one process."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from layers import UNIT, Layer, passes, poisoned, wrong_elements
from preferred import only
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import tconv3d
from tconv3d.distributed.shards import chunk


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


@contextlib.contextmanager
def as_tests_run(case: Case, family: str | None) -> Any:
    """Kernels run in the emulator, with the case's precision, of one family if one is named."""
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "tf32" if case.dtype == "tf32" else "ieee"
    try:
        with tconv3d.use_backend("emulator"), contextlib.nullcontext() if family is None else only(family):
            yield
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


Passes = tuple[Tensor, list[Tensor]]  # a result, and the gradients of input, weight and, if there is one, bias


def split_passes(cases: list[Case], family: str | None) -> list[Passes | None]:
    """Runs on every rank: returns the rank's shards of results and gradients; None where the rank has no shard."""
    import tconv3d.distributed as distributed

    found: list[Passes | None] = []
    for case in cases:
        mesh = mesh_of(case.shards)
        place = mesh.get_coordinate()
        if place is None:
            found.append(None)
            continue
        (x, *parameters), grad = case.operands()
        leaf = case.own(x, tuple(place)).clone(memory_format=torch.preserve_format).requires_grad_()
        leaves = [each.requires_grad_() for each in parameters]
        placements = [Shard(dim) for dim in case.dims]
        with as_tests_run(case, family), poisoned():
            volume = DTensor.from_local(leaf, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())
            bias = leaves[1] if len(leaves) == 2 else None
            result = distributed.conv_transpose3d(volume, leaves[0], bias, *case.layer.settings)
            assert result.shape == grad.shape and result.placements == tuple(placements)
            local = result.to_local()
            grads = torch.autograd.grad(local, [leaf, *leaves], case.own(grad, tuple(place)))
        found.append((local.detach(), list(grads)))
    return found


def one_process(case: Case, family: str | None) -> Passes:
    """Returns result and gradients of the whole volume in one process."""
    operands, grad = case.operands()
    with as_tests_run(case, family), poisoned():
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
