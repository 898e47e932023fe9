"""Declares the run-time arguments of a kernel once, for its C++ struct and for the bytes of a launch.

    FILL = Arguments(
        "fill",
        words=POINTER("Memory to fill, in words of 16 bytes."),
        count=INT64("How many words there are."),
    )
    FILL.definitions   # `struct Args` in C++, which the compiler gets before the kernel's header
    FILL.launch(1, 32, (), {"words": "workspace"}, count=7)   # a block of 32 threads, without further constants

A kernel without a declaration (`declared` returns None) defines `struct Args` in its own header.

This module knows nothing of what a kernel computes.
"""

from __future__ import annotations

import struct
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Protocol

from .geometry import Triple
from .launch import Constants, Launch

LINE = 110  # columns of a generated line, the limit in .clang-format


class Type(Protocol):
    """Describes a C++ type that Python can write as bytes and read back."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def align(self) -> int: ...
    def write(self, value: Any) -> bytes: ...
    def read(self, data: bytes) -> Any: ...


@dataclass(frozen=True)
class Field:
    type: Type
    comment: str


@dataclass(frozen=True)
class Plain:
    """Describes the type of a number or an address; a call returns a field of this type with a comment."""

    name: str
    form: str  # format character of Python's module `struct`

    def __call__(self, comment: str) -> Field:
        return Field(self, comment)

    @property
    def size(self) -> int:
        return struct.calcsize(self.form)

    align = size

    def write(self, value: Any) -> bytes:
        return struct.pack(self.form, value)

    def read(self, data: bytes) -> Any:
        return struct.unpack(self.form, data)[0]


@dataclass(frozen=True)
class Array:
    """Describes an array of numbers; a call returns a field of this type with a comment. Absent numbers are zeros."""

    of: Plain
    count: int

    def __call__(self, comment: str) -> Field:
        return Field(self, comment)

    @property
    def name(self) -> str:
        return self.of.name

    @property
    def size(self) -> int:
        return self.of.size * self.count

    @property
    def align(self) -> int:
        return self.of.align

    def write(self, value: Sequence[Any]) -> bytes:
        if len(value) > self.count:
            raise ValueError(f"expected at most {self.count} numbers, got {len(value)}")
        return struct.pack(f"{len(value)}{self.of.form}", *value).ljust(self.size, bytes(1))

    def read(self, data: bytes) -> tuple[Any, ...]:
        return struct.unpack(f"{self.count}{self.of.form}", data)


class Struct:
    """Describes a struct of declared fields; a call returns a field of this type for another struct.

    `header` names the header that defines the struct; without a header the definition is generated. `make` converts
    the value that planners give to the values of the fields by name.
    """

    def __init__(
        self,
        name: str,
        comment: str,
        header: str = "",
        make: Callable[[Any], Mapping[str, Any]] = lambda value: value,
        /,
        **fields: Field,
    ) -> None:
        self.name, self.comment, self.header, self.fields = name, comment, header, fields
        self._make = make
        self.align = max(field.type.align for field in fields.values())
        self.offsets, end = dict[str, int](), 0
        for key, field in fields.items():
            self.offsets[key] = _round_up(end, field.type.align)
            end = self.offsets[key] + field.type.size
        self.size = _round_up(end, self.align)

    def __call__(self, comment: str) -> Field:
        return Field(self, comment)

    def write(self, value: Any) -> bytes:
        """Returns the bytes of a value that planners give; bytes are taken as they are."""
        if isinstance(value, bytes):
            return value
        values = self._make(value)
        missing = ", ".join(key for key in self.fields if key not in values)
        unknown = ", ".join(key for key in values if key not in self.fields)
        if missing or unknown:
            raise TypeError(f"{self.name}: missing: {missing or 'nothing'}; unknown: {unknown or 'nothing'}")
        data = bytearray(self.size)
        for key, field in self.fields.items():
            try:
                packed = field.type.write(values[key])
            except (ValueError, struct.error) as error:
                raise ValueError(f"{self.name}.{key} cannot be {values[key]!r}: {error}") from error
            data[self.offsets[key] : self.offsets[key] + len(packed)] = packed
        return bytes(data)

    def read(self, data: bytes) -> dict[str, Any]:
        """Returns the values of the fields by name, with a dictionary for each inner struct."""
        places = {key: slice(at, at + self.fields[key].type.size) for key, at in self.offsets.items()}
        return {key: self.fields[key].type.read(data[place]) for key, place in places.items()}

    @property
    def inner(self) -> Iterator[Struct]:
        """Yields the structs among the types of the fields, each after the structs that it contains."""
        for field in self.fields.values():
            if isinstance(field.type, Struct):
                yield from field.type.inner
                yield field.type

    @property
    def definition(self) -> str:
        """The C++ text of the struct, with a comment for every field."""
        lines = [*_comment(self.comment, ""), f"struct {self.name} {{"]
        members = {key: f"  {_declared_as(field.type, key)};" for key, field in self.fields.items()}
        width = max(map(len, members.values()))
        for key, member in members.items():
            comment = self.fields[key].comment
            beside = f"{member:{width}}  // {comment}"
            lines += [beside] if len(beside) <= LINE else [*_comment(comment, "  "), member]
        return "\n".join([*lines, "};", ""])


def _declared_as(type: Type, name: str) -> str:
    return f"{type.name} {name}[{type.count}]" if isinstance(type, Array) else f"{type.name} {name}"


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, LINE, initial_indent=f"{indent}// ", subsequent_indent=f"{indent}// ")


# ---- The arguments of a kernel.


_declared: dict[str, Arguments] = {}


def declared(kernel: str, constants: Constants = ()) -> Arguments | None:
    """Returns the declared arguments of a kernel, or None if the kernel's header defines them.

    Every kernel of the package is declared by the module that launches it, which `import tconv3d` imports. A kernel
    with the constant TAIL has further arguments: the operands of what follows the convolution.
    """
    found = _declared.get(kernel)
    wholes = next((value for name, value in constants if name == TAIL), None)
    return found if found is None or wholes is None else found.with_tail(wholes)


class Arguments(Struct):
    """Declares `struct Args` of a kernel: pointers, followed by all other values that change between launches."""

    def __init__(self, kernel: str, /, **fields: Field) -> None:
        self._describe(kernel, fields)
        if kernel in _declared:
            raise ValueError(f"{kernel}: the arguments of a kernel are declared once")
        _declared[kernel] = self

    def _describe(self, kernel: str, fields: Mapping[str, Field]) -> None:
        super().__init__("Args", "What changes from launch to launch.", **fields)
        self.kernel = kernel
        self.pointer_names = [key for key, field in fields.items() if field.type in (POINTER, CONST_POINTER)]
        if list(fields)[: len(self.pointer_names)] != self.pointer_names:
            raise ValueError(f"{kernel}: the pointers of a kernel come before its other arguments")

    @cache  # noqa: B019 - declarations live as long as the program
    def with_tail(self, wholes: int) -> Arguments:
        """Returns these arguments and the operands of a tail with this many whole tensors (device/epilogue.cuh).

        Every argument keeps its place among the pointers or among the others, and the new ones follow.
        """
        own = self.fields
        pointers = {key: own[key] for key in self.pointer_names}
        others = {key: field for key, field in own.items() if key not in pointers}
        names = tail_pointers(wholes)
        made = Arguments.__new__(Arguments)
        made._describe(
            self.kernel,
            {
                **pointers,
                names[0]: CONST_POINTER("Vectors of the tail: [batch item][channel][vector], or null."),
                **{name: CONST_POINTER("A tensor of the tail, which broadcasts to y.") for name in names[1:]},
                **others,
                "tail": TAIL_SIZES("How the operands of the tail lie in memory."),
            },
        )
        return made

    def pointers(self, **operands: str) -> tuple[str, ...]:
        """Returns the operands of a launch's pointers in the order of the struct, with "null" for a null pointer."""
        if operands.keys() != set(self.pointer_names):
            wanted, given = (", ".join(names) for names in (self.pointer_names, operands))
            raise TypeError(f"{self.kernel}: pointers expected: {wanted}; got: {given}")
        return tuple(operands[key] for key in self.pointer_names)

    def pack(self, **values: Any) -> bytes:
        """Returns the bytes of the arguments after the pointers."""
        try:
            whole = self.write({**dict.fromkeys(self.pointer_names, 0), **values})
        except (TypeError, ValueError) as error:
            raise type(error)(f"arguments of {self.kernel}: {error}") from error
        return whole[8 * len(self.pointer_names) :]

    def launch(
        self,
        blocks: int,
        threads: int,
        constants: Constants,
        operands: Mapping[str, str] | None = None,
        /,
        *,
        shared_bytes: int = 0,
        min_blocks: int = 1,
        overlaps: bool = False,
        **values: Any,
    ) -> Launch:
        """Returns a launch of the kernel, compiled for `min_blocks` blocks per multiprocessor.

        A pointer gets the operand of its own name unless `operands` names another; `values` are the other arguments.
        """
        named = {**{name: name for name in self.pointer_names}, **(operands or {})}
        return Launch(
            self.kernel,
            (("kThreads", threads), ("kMinBlocks", min_blocks), *constants),
            (blocks, 1, 1),
            threads,
            shared_bytes,
            self.pointers(**named),
            self.pack(**values),
            overlaps,
        )

    def given(self, operands: Sequence[str], scalars: bytes) -> dict[str, Any]:
        """Returns the arguments of a launch by name: operands for pointers, numbers, and dictionaries for structs."""
        values = self.read(bytes(8 * len(self.pointer_names)) + scalars)
        return values | dict(zip(self.pointer_names, operands, strict=True))

    @property
    def generated(self) -> list[Struct]:
        """The structs that no header defines, in an order in which they compile; Args is at the end."""
        return list(dict.fromkeys([*(each for each in self.inner if not each.header), self]))

    @property
    def includes(self) -> list[str]:
        """The names of the headers that define types of the fields."""
        return list(dict.fromkeys(each.header for each in self.inner if each.header))

    @cached_property
    def definitions(self) -> str:
        """The C++ source that defines `Args`, which is compiled before the kernel's header."""
        includes = "".join(f'#include "{header}"\n' for header in self.includes)
        structs = "".join(each.definition for each in self.generated)
        check = f'static_assert(sizeof(Args) == {self.size}, "Python and C++ lay out Args alike");\n'
        return f"{includes}namespace tconv3d {{\n{structs}{check}}}  // namespace tconv3d\n"


TAIL = "kTailWholes"  # the constant of kernels whose epilogue has operands: the number of whole tensors


def tail_pointers(wholes: int) -> tuple[str, ...]:
    """Returns the names of the operands of an epilogue: its vectors, and so many whole tensors."""
    return ("tail_vectors", *(f"tail_whole_{i}" for i in range(wholes)))


def with_tail(launch: Launch, vectors: int, wholes: int, channels: int, volume: int) -> Launch:
    """Returns a launch whose epilogue has operands; the launch has all other arguments already."""
    if not any(name == "Epilogue" for name, _ in launch.constants):
        return launch
    names = tail_pointers(wholes)
    return replace(
        launch,
        constants=(*launch.constants, (TAIL, wholes)),
        pointers=(*launch.pointers, names[0] if vectors else "null", *names[1:]),
        scalars=launch.scalars + TAIL_SIZES.write({"volume": volume, "channels": channels}),
    )


# ---- Types that kernels share.


POINTER, CONST_POINTER = Plain("void*", "P"), Plain("const void*", "P")
INT32, UINT32, INT64, DOUBLE = (
    Plain("int", "i"),
    Plain("unsigned", "I"),
    Plain("long long", "q"),
    Plain("double", "d"),
)


def _in_order(names: str) -> Callable[[Sequence[int]], Mapping[str, int]]:
    return lambda values: dict(zip(names, values, strict=True))


def _divider(divisor: int) -> dict[str, int]:
    """Returns numbers with n / divisor == (mulhi(n, multiplier) + n) >> shift for 0 <= n < 2^31."""
    divisor = max(divisor, 1)
    shift = (divisor - 1).bit_length()
    multiplier = ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1
    return {"divisor": divisor, "multiplier": multiplier, "shift": shift}


def _walk(walk: tuple[Triple, int]) -> dict[str, Any]:
    """Returns the values of `struct Walk` for a volume's size and a step in positions, for any batch size."""
    size, step = walk
    d, h, w = size = tuple(max(extent, 1) for extent in size)
    digits = (step // (w * h) % d, step // w % h, step % w)
    return {"size": size, "step": digits, "step_n": step // (w * h * d), **per_axis("by", size)}


def per_axis(name: str, values: Sequence[int]) -> dict[str, Any]:
    """Returns one argument per dimension: per_axis("by", (2, 3, 4)) == {"by_d": 2, "by_h": 3, "by_w": 4}."""
    return {f"{name}_{axis}": value for axis, value in zip("dhw", values, strict=True)}


def fields_per_axis(name: str, make: Callable[[str], Field], comment: str) -> dict[str, Field]:
    """Returns the fields that `per_axis` gives values to; the axis replaces {} in the comment."""
    return {f"{name}_{axis}": make(comment.format(axis)) for axis in "dhw"}


TAIL_SIZES = Struct(
    "TailSizes",
    "How the operands of a tail lie in memory.",
    volume=INT64("Positions of the result."),
    channels=INT32("Output channels of all groups."),
)
STRIDES = Struct(
    "Strides",
    "The strides of a 5-D tensor in elements.",
    "common.cuh",
    _in_order("ncdhw"),
    **{axis: INT64("") for axis in "ncdhw"},
)
EXTENT = Struct(
    "Extent",
    "One number for each dimension of a volume.",
    "common.cuh",
    _in_order("dhw"),
    **{axis: INT32("") for axis in "dhw"},
)
DIVIDER = Struct(
    "Divider",
    "Division by a number that all threads share; planners give the number.",
    "common.cuh",
    _divider,
    **{part: UINT32("") for part in ("divisor", "multiplier", "shift")},
)
WALK = Struct(
    "Walk",
    "A walk over the positions of a volume; planners give the volume's size and the step.",
    "cursor.cuh",
    _walk,
    size=EXTENT(""),
    step=EXTENT(""),
    step_n=INT32(""),
    by_d=DIVIDER(""),
    by_h=DIVIDER(""),
    by_w=DIVIDER(""),
)
