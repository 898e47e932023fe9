"""Values that are computed once, and changed copies of dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tconv3d.planning.plain_data import changed, once


@dataclass(frozen=True)
class Plain:
    width: int
    height: int = 3

    @once
    def area(self) -> int:
        """The area."""
        computed.append(self)
        return self.width * self.height


computed: list[Plain] = []


def test_a_value_is_computed_once_for_each_object() -> None:
    computed.clear()
    first, second = Plain(2), Plain(2)
    assert first.area == first.area == second.area == 6
    assert len(computed) == 2 and Plain.area.__doc__ == "The area."


def test_a_changed_copy_is_that_of_dataclasses() -> None:
    """What has been computed from the old fields is not copied."""
    plain = Plain(2)
    assert plain.area == 6
    copy = changed(plain, {"height": 5})
    assert copy == replace(plain, height=5) and hash(copy) == hash(replace(plain, height=5))
    assert copy.area == 10 and plain == Plain(2)
    with pytest.raises(TypeError, match=r"Plain has no fields.*depth"):
        changed(plain, {"depth": 1})
