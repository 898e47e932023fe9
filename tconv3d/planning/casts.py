"""Plans the launch that converts the operands of a layer under autocast (device/cast.cuh).

PyTorch converts each operand by an operator of its own. For small operands these operators take longer than the
layer, so that one launch converts all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .arguments import CONST_POINTER, INT64, POINTER, Arguments
from .launch import Launch
from .scalars import SCALARS

THREADS, ITEMS = 256, 4  # threads of a block, and elements of a thread
MOST = 3  # operands of a launch
MOST_ELEMENTS = 2**20  # elements of an operand, because a thread moves them singly, which is slow for large tensors

_ORDER = ("first", "second", "third")
CAST = Arguments(
    "cast",
    **{name: CONST_POINTER(f"The {name} operand, or null.") for name in _ORDER},
    **{f"{name}_result": POINTER(f"The {name} operand in the other type.") for name in _ORDER},
    **{f"{name}_count": INT64(f"Elements of the {name} operand; 0 if there is none.") for name in _ORDER},
    first_blocks=INT64("Blocks that convert the first operand."),
    second_blocks=INT64("Blocks that convert the second operand."),
)


def cast(counts: Sequence[int], from_dtype: str, to_dtype: str) -> Launch:
    """Returns the launch that converts operands with so many elements, at most MOST and each dense in memory.

    Its pointers are the operands "first", "second" and "third", and their results, "first result" and so on.
    """
    used = dict(zip(_ORDER, counts, strict=False))
    blocks = {name: -(-used.get(name, 0) // (THREADS * ITEMS)) for name in _ORDER}
    sizes: dict[str, Any] = {f"{name}_count": used.get(name, 0) for name in _ORDER}
    return CAST.launch(
        sum(blocks.values()),
        THREADS,
        (("From", SCALARS[from_dtype]), ("To", SCALARS[to_dtype]), ("kItems", ITEMS)),
        {
            **{name: name if name in used else "null" for name in _ORDER},
            **{f"{name}_result": f"{name} result" if name in used else "null" for name in _ORDER},
        },
        **sizes,
        first_blocks=blocks["first"],
        second_blocks=blocks["second"],
    )
