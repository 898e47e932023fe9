"""geometry.py against the definition of a transposed convolution, and against PyTorch's sizes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tconv3d.planning.geometry import Axis, Gather, Geometry, valid_range

axes = st.builds(
    Axis,
    kernel=st.integers(1, 6),
    stride=st.integers(1, 6),
    padding=st.integers(0, 6),
    output_padding=st.integers(0, 3),
    dilation=st.integers(1, 5),
)


def pairs(axis: Axis, size: int) -> set[tuple[int, int, int]]:
    """(input index, tap, output index) by definition: o = i*stride - padding + tap*dilation, inside the output."""
    bound = axis.output_size(size)
    every = (
        (i, t, i * axis.stride - axis.padding + t * axis.dilation) for i in range(size) for t in range(axis.kernel)
    )
    return {(i, t, o) for i, t, o in every if 0 <= o < bound}


def gathered(gather: Gather, positions: int, in_size: int, out_size: int) -> list[tuple[int, int, int]]:
    """(input index, tap, output index) as a kernel walks them."""
    return [
        (gather.input_step * q + gather.offset(f, j), gather.tap(f, j), gather.output_step * q + f)
        for q in range(positions)
        for f in range(gather.phases)
        for j in range(gather.count[f])
        if 0 <= gather.input_step * q + gather.offset(f, j) < in_size and gather.output_step * q + f < out_size
    ]


@given(axes, st.integers(1, 7))
def test_forward_visits_each_pair_once(axis: Axis, size: int) -> None:
    out = axis.output_size(size)
    if out > 0:
        walked = gathered(axis.scatter, axis.positions(out), size, out)
        assert len(walked) == len(set(walked))
        assert set(walked) == pairs(axis, size)


@given(axes, st.integers(1, 7))
def test_input_gradient_visits_each_pair_once(axis: Axis, size: int) -> None:
    out = axis.output_size(size)
    if out > 0:
        walked = gathered(axis.gather, size, out, size)
        assert len(walked) == len(set(walked))
        assert {(i, t, o) for o, t, i in walked} == pairs(axis, size)


@given(axes, st.integers(1, 7))
def test_own_taps_meet_every_output_once(axis: Axis, size: int) -> None:
    if axis.own_taps and axis.output_size(size) > 0:
        met = sorted(o for _, t, o in pairs(axis, size) if t in axis.own_taps)
        assert met == list(range(axis.output_size(size)))


def test_which_settings_have_own_taps() -> None:
    assert Axis(2, 2).own_taps == (0, 1) and Axis(4, 2, 1).own_taps == (1, 2)
    assert Axis(3, 1, 1).own_taps == (1,) and Axis(3, 2, 1, 1).own_taps == (1, 2)
    assert Axis(3).own_taps == () and Axis(2, 3).own_taps == ()


@given(axes)
def test_phases_and_shifts_are_the_quotient_and_remainder(axis: Axis) -> None:
    for tap in range(axis.kernel):
        assert 0 <= axis.phase(tap) < axis.stride
        assert axis.shift(tap) * axis.stride + axis.phase(tap) == tap * axis.dilation - axis.padding
        assert tap in axis.taps(axis.phase(tap))


@given(axes, st.integers(1, 7))
def test_multiplications_count_the_pairs(axis: Axis, size: int) -> None:
    if axis.output_size(size) > 0:
        geometry = Geometry(3, 4, 1, (axis, Axis(1), Axis(1)))
        assert geometry.multiplications(2, (size, 1, 1)) == 2 * 3 * 4 * len(pairs(axis, size))


@given(st.integers(-9, 9), st.integers(1, 4), st.integers(0, 6), st.integers(0, 9))
def test_valid_range(offset: int, step: int, size: int, bound: int) -> None:
    assert list(valid_range(offset, step, size, bound)) == [i for i in range(size) if 0 <= step * i + offset < bound]


@given(axes, st.integers(1, 5))
def test_output_size_is_pytorchs(axis: Axis, size: int) -> None:
    if axis.output_padding >= max(axis.stride, axis.dilation) or axis.output_size(size) <= 0:
        return
    x, w = torch.zeros(1, 1, size, 1, 1), torch.zeros(1, 1, axis.kernel, 1, 1)
    settings = [(v, n, n) for v, n in ((axis.stride, 1), (axis.padding, 0), (axis.output_padding, 0))]
    y = F.conv_transpose3d(x, w, None, *settings, 1, (axis.dilation, 1, 1))
    assert y.shape[2] == axis.output_size(size)


def test_empty_phases() -> None:
    assert Geometry.make(1, 1, (3, 3, 3), (2, 2, 2), dilation=(2, 2, 2)).empty_phases == 7
    assert Geometry.make(1, 1, (3, 3, 3), (2, 2, 2)).empty_phases == 0
    assert Geometry.make(1, 1, (1, 1, 1), (2, 3, 1)).empty_phases == 5
