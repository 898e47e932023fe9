"""The classes of a dilated dimension cover every output once, and read of x what the dimension reads."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tconv3d.planning.classes import WHOLE, divided
from tconv3d.planning.geometry import Axis, Gather

small = st.integers(1, 5)
axes = st.builds(Axis, kernel=st.integers(1, 7), stride=small, padding=st.integers(0, 6), dilation=small)


def reads(gather: Gather, positions: int, outputs: int) -> dict[int, list[tuple[int, int]]]:
    """Returns what every output reads: pairs of an input and a tap."""
    return {
        gather.output_step * q + phase: [
            (gather.input_step * q + gather.offset(phase, j), gather.tap(phase, j))
            for j in range(gather.count[phase])
        ]
        for q in range(positions)
        for phase in range(gather.phases)
        if gather.output_step * q + phase < outputs
    }


@settings(max_examples=600)
@given(axis=axes, size=st.integers(1, 12), forward=st.booleans(), together=st.booleans())
def test_classes_read_what_the_dimension_reads(axis: Axis, size: int, forward: bool, together: bool) -> None:
    outputs = axis.output_size(size) if forward else size
    if outputs < 1:
        return
    gather, positions = (axis.scatter, axis.positions(outputs)) if forward else (axis.gather, size)
    of_class, classes, most = divided(gather, positions, together)
    if classes == WHOLE:
        assert (of_class, most) == (gather, positions)
        assert abs(gather.offset_step) == 1 or max(gather.count) == 1
        return
    found: dict[int, list[tuple[int, int]]] = {}
    lattices = set()
    for c in range(classes.present):
        for q in range(most):
            for phase in range(gather.phases):
                output = of_class.output_step * q + classes.y_step * c + classes.start(phase)
                if not 0 <= output < outputs:
                    continue
                assert output not in found
                first = of_class.input_step * q + classes.x_step * c
                taps = range(gather.count[phase])
                found[output] = [(first + of_class.offset(phase, j), of_class.tap(phase, j)) for j in taps]
                lattices |= {(c, phase * (not together), x % classes.unit) for x, _ in found[output]}
    assert found == reads(gather, positions, outputs)
    assert len(lattices) == len({(c, phase) for c, phase, _ in lattices})  # one lattice for all that a block reads
    assert of_class.input_step % classes.unit == 0 and abs(of_class.offset_step) == classes.unit
    assert classes.precedes == any(classes.start(phase) < 0 for phase in range(gather.phases))
    assert together or not classes.precedes
