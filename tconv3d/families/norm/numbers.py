"""Plans the kernel that computes small tensors between passes (numbers.cuh), and defines its programs.

    step          count, extent, words of its instructions, threads that add a sum, result and divisor, base;
                  then its instructions
    number        code 0, register, constant
    load, store   code 1 or 2, register, tensor, type; levels, offset, then size and stride of each level
    operation     code 3 and up, register, first and second operand; third operand

The first word of an instruction has four bytes, the lowest of them first. A step with an extent of 0 evaluates its
instructions for the indices below `count`. Any other adds up its register `result` for `extent` indices per sum, and
writes the sums, divided by the constant `divisor`, to scratch from place `base` on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...planning.problem import Plan
from .arguments import MOST_NUMBERS, MOST_TENSORS, MOST_WORDS, NUMBERS

THREADS = 512
REGISTERS = 64
# The types of elements, in the order of `load_number` in numbers.cuh.
TYPES = ("float64", "float32", "bfloat16", "float16", "int64", "bool")
# Operations by the names of device/expressions.cuh with the number of their operands; frequent ones come first.
OPERATIONS = {
    "Product": 2, "Sum": 2, "Difference": 2, "Quotient": 2, "ReciprocalSquareRoot": 1, "Reciprocal": 1,
    "SquareRoot": 1, "Negative": 1, "Absolute": 1, "Largest": 2, "Smallest": 2, "Choice": 3, "Less": 2,
    "LessOrEqual": 2, "Greater": 2, "GreaterOrEqual": 2, "Equal": 2, "NotEqual": 2, "Both": 2, "Either": 2, "Not": 1,
    "Exponential": 1, "Logarithm": 1, "Sigmoid": 1, "HyperbolicTangent": 1,
}  # fmt: skip
NUMBER, LOAD, STORE, FIRST_OPERATION = range(4)  # codes of instructions


@dataclass(frozen=True, eq=False)
class Program:
    """Holds a program as the kernel takes it; programs are compared by identity, which is quick."""

    words: tuple[int, ...]
    numbers: tuple[float, ...]
    steps: int
    tensors: int  # the first of them is scratch

    @property
    def fits(self) -> bool:
        """Tells whether the arguments of a launch have room for the program."""
        return len(self.words) <= MOST_WORDS and len(self.numbers) <= MOST_NUMBERS and self.tensors <= MOST_TENSORS


def tensor_names() -> tuple[str, ...]:
    return tuple(f"tensor_{i}" for i in range(MOST_TENSORS))


@lru_cache(maxsize=1024)
def plan_numbers(program: Program) -> Plan:
    """Returns the plan of a program: one block."""
    listed = "tconv3d::NoOperation"
    for name, count in reversed(OPERATIONS.items()):
        operands = ", ".join(f"tconv3d::Local<{i}>" for i in range(count))
        listed = f"tconv3d::OperationList<tconv3d::{name}<{operands}>, {listed}>"
    launch = NUMBERS.launch(
        1,
        THREADS,
        (("kRegisters", REGISTERS), ("Operations", listed)),
        {name: name if i < program.tensors else "null" for i, name in enumerate(tensor_names())},
        words=program.words,
        numbers=program.numbers,
        steps=program.steps,
    )
    return Plan("numbers", "small tensors between passes, by one block", (launch,))
