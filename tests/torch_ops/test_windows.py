"""Windows of a layer: any padding and output padding, on kernels of every family and on PyTorch's operators."""

from __future__ import annotations

import pytest
import torch
from layers import allowed_error, assert_right, poisoned
from preferred import counted, preferring
from torch import Tensor

from tconv3d.planning import planner
from tconv3d.planning.geometry import Axis, Geometry
from tconv3d.planning.offers import Refusal
from tconv3d.planning.problem import Pass, Problem, contiguous_strides
from tconv3d.torch_ops import executor, windows

# A window's input rows and output rows in each dimension, in a layer of stride 2 with a kernel of 4 or 3.
ROWS = {
    "cropped": ((range(2, 6), range(5, 9)), (range(3), range(5)), (range(3, 11), range(6, 21))),
    "beyond the last input": ((range(3), range(1, 11)), (range(2, 5), range(4, 11)), (range(1, 6), range(2, 17))),
    "before the first input": ((range(4, 7), range(3, 14)), (range(2, 5), range(4, 10)), (range(3, 9), range(7, 19))),
}
# Input channels, output channels, groups, type, and kernels that are preferred.
FAMILIES = {
    "direct": (3, 5, 1, torch.float32, ()),
    "tensor cores": (16, 16, 1, torch.bfloat16, ("halo", "hopper_weight_grad")),
    "few outputs": (16, 2, 1, torch.bfloat16, ("few_outputs", "few_weight_grad")),
    "few inputs": (2, 16, 1, torch.float16, ("few_inputs", "few_weight_grad")),
    "mma": (16, 16, 1, torch.float16, ("mma", "tensor_weight_grad")),
    "depthwise": (4, 4, 4, torch.float32, ("depthwise_lines", "depthwise")),
    "groups": (16, 16, 4, torch.bfloat16, ("group_backward",)),
    "gathered": (16, 16, 1, torch.float16, ("gather",)),
}


def by_definition(axes: list[Axis], x: Tensor, w: Tensor, b: Tensor, dy: Tensor, groups: int) -> list[Tensor]:
    """Returns result and gradients in float64, by loops over taps: output = input*stride - padding + tap*dilation."""
    leaves = [each.double().requires_grad_() for each in (x, w, b)]
    whole = torch.conv_transpose3d(leaves[0], leaves[1], None, tuple(axis.stride for axis in axes), groups=groups)
    for dim, axis in enumerate(axes, 2):
        rows = range(axis.padding, axis.padding + axis.output_size(x.shape[dim]))
        index = torch.tensor([row if 0 <= row < whole.shape[dim] else whole.shape[dim] for row in rows])
        extended = torch.cat([whole, torch.zeros_like(whole.narrow(dim, 0, 1))], dim)
        whole = extended.index_select(dim, index)
    result = whole + leaves[2][:, None, None, None]
    return [result.detach(), *torch.autograd.grad(result, leaves, dy.double())]


def operands(name: str, rows: str, kernel: int) -> tuple[list[Axis], list[Tensor]]:
    ins, outs, groups, dtype, _ = FAMILIES[name]
    axes = [Axis(kernel, 2, 1).window(*each) for each in ROWS[rows]]
    size = tuple(len(each[0]) for each in ROWS[rows])
    out = tuple(len(each[1]) for each in ROWS[rows])
    assert Geometry(ins, outs, groups, (axes[0], axes[1], axes[2])).output_size(size) == out
    random = torch.Generator().manual_seed(2)
    shapes = ((2, ins, *size), (ins, outs // groups, kernel, kernel, kernel), (outs,), (2, outs, *out))
    return axes, [torch.randn(shape, generator=random).mul(8).round().div(8).to(dtype) for shape in shapes]


def compare(axes: list[Axis], tensors: list[Tensor], groups: int) -> None:
    x, w, b, dy = tensors
    exact = by_definition(axes, x, w, b, dy, groups)
    largest = by_definition(axes, *(each.abs() for each in tensors), groups)
    size, kernel = tuple(x.shape[2:]), tuple(w.shape[2:])
    with poisoned():
        found = [
            windows.forward(x, w, b, axes, groups),
            *windows.backward(dy, x, w, (True, True), size, kernel, axes, groups),
            windows.bias_grad(dy),
        ]
    for what, ours, true, most in zip(("result", "dx", "dw", "db"), found, exact, largest, strict=True):
        assert ours is not None
        assert_right(what, ours, true, allowed_error(true, most, x.dtype))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kernel", [3, 4])
def test_pytorchs_operators_compute_windows(rows: str, kernel: int) -> None:
    axes, tensors = operands("direct", rows, kernel)
    compare(axes, tensors, 1)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_of_every_family_compute_windows(ours: str, name: str, rows: str) -> None:
    axes, tensors = operands(name, rows, 4 if name != "depthwise" else 3)
    with preferring(*FAMILIES[name][4]), counted() as plans:
        compare(axes, [each.to(ours) for each in tensors], FAMILIES[name][2])
    negative = any(axis.padding < 0 for axis in axes)
    assert not negative or set(plans) == {"direct"}


def test_every_family_takes_a_window_where_it_takes_the_layer() -> None:
    """The families above are really asked: with the window that has no negative padding, most of them are taken."""
    taken = set()
    for name, (ins, outs, groups, dtype, kernels) in FAMILIES.items():
        axes, (x, w, _, dy) = operands(name, "cropped", 4 if name != "depthwise" else 3)
        problems = [
            Problem(
                which, Geometry(ins, outs, groups, (axes[0], axes[1], axes[2])), 2, tuple(x.shape[2:]),
                str(dtype).removeprefix("torch."), x.stride(), w.stride(), dy.stride(),
            )
            for which in (Pass.FORWARD, Pass.INPUT_GRAD, Pass.WEIGHT_GRAD)
        ]  # fmt: skip
        with preferring(*kernels):
            for problem in problems:
                (offer,) = planner.taken({problem.which: problem}, executor.EMULATED)
                taken.add(offer.kernel)
    assert {"halo", "mma", "few_outputs", "few_inputs", "depthwise"} <= taken, taken


def test_a_negative_padding_is_left_to_the_direct_family() -> None:
    axis = Axis(4, 2, 1).window(range(4, 8), range(3, 14))
    assert axis.padding < 0
    geometry = Geometry(16, 2, 1, (axis, Axis(1), Axis(1)))
    strides = contiguous_strides((1, 16, 4, 4, 4))
    problem = Problem(Pass.FORWARD, geometry, 1, (4, 4, 4), "bfloat16", strides, (32, 16, 1, 1, 1), strides)
    answers = planner.answers({Pass.FORWARD: problem}, executor.EMULATED)
    refused = [each for each in answers if isinstance(each, Refusal)]
    assert len(answers) - len(refused) == 1
    assert any("negative padding" in each.why for each in refused)


def test_windows_without_rows_are_the_bias_or_nothing() -> None:
    axis = Axis(3).window(range(2, 2), range(2))
    assert axis.output_size(0) == 2
    axes = [axis, Axis(1), Axis(1)]
    x, w, b = torch.ones(1, 2, 0, 3, 3), torch.ones(2, 2, 3, 1, 1), torch.tensor([1.0, 2.0])
    result = windows.forward(x, w, b, axes, 1)
    assert result.shape == (1, 2, 2, 3, 3) and result[0, 1].eq(2).all()
    assert windows.backward(result, x, w, (True, True), (0, 3, 3), (3, 1, 1), axes, 1) == (None, None)
    empty = torch.ones(1, 2, 0, 3, 3)
    assert windows.bias_grad(empty).tolist() == [0, 0]
