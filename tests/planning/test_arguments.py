"""Declared arguments: C++ structs and bytes of launches come from one declaration, and a compiler agrees with it."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import pytest

from tconv3d import emulator
from tconv3d.families.halo.arguments import HALO
from tconv3d.planning import arguments
from tconv3d.planning.arguments import (
    CONST_POINTER,
    DIVIDER,
    DOUBLE,
    EXTENT,
    INT32,
    INT64,
    POINTER,
    STRIDES,
    WALK,
    Arguments,
    Struct,
    declared,
    per_axis,
)
from tconv3d.planning.launch import Launch
from tconv3d.runtime import compiler, sources
from tconv3d.tools.export.headers import Headers
from tconv3d.tools.export.program import Unit

KERNELS = sorted(
    name.removesuffix(".cuh")
    for name, path in sources.all_headers().items()
    if re.search(r"\bvoid run\(const Args& args\)", path.read_text())
)
PAIR = Struct("Pair", "Two numbers.", far=INT64("A long one."), near=INT32("A short one."))


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Arguments:
    """Arguments with padding between fields, inside structs and at the end."""
    monkeypatch.setattr(arguments, "_declared", {})
    return Arguments(
        "probe",
        x=CONST_POINTER("What is read."),
        y=POINTER("What is written."),
        count=INT32("A number, behind which 4 bytes are unused."),
        eps=DOUBLE("A small number."),
        size=EXTENT("Twelve bytes, behind which 4 are unused."),
        first=PAIR("Sixteen bytes, of which 4 are unused."),
        by_w=DIVIDER("Twelve bytes without padding before them."),
        second=PAIR("Sixteen bytes, of which 4 are unused."),
        last=INT32("A number at the end."),
    )


VALUES = {
    "count": -3,
    "eps": 0.5,
    "size": (2, 3, 4),
    "first": {"far": 2**40, "near": 5},
    "by_w": 7,
    "second": {"far": -1, "near": -2},
    "last": 9,
}


# ---- packing


def test_bytes_are_padded_as_in_cpp(probe: Arguments) -> None:
    multiplier, shift = (2**32 * (8 - 7)) // 7 + 1, 3
    expected = struct.pack("i4xd3i4xqi4x3I4xqi4xi4x", -3, 0.5, 2, 3, 4, 2**40, 5, 7, multiplier, shift, -1, -2, 9)
    assert probe.pack(**VALUES) == expected
    assert probe.size == 16 + len(expected)
    assert probe.pointers(y="result", x="input") == ("input", "result"), "in the order of the struct"


def test_what_was_packed_can_be_read(probe: Arguments) -> None:
    found = probe.given(("a", "null"), probe.pack(**VALUES))
    assert (found["x"], found["y"]) == ("a", "null")
    assert found["size"] == {"d": 2, "h": 3, "w": 4} and found["by_w"]["divisor"] == 7
    assert {name: found[name] for name in ("count", "eps", "first", "second", "last")} == {
        name: VALUES[name] for name in ("count", "eps", "first", "second", "last")
    }


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"count": None}, TypeError, "arguments of probe: Args: missing: count; unknown: nothing"),
        ({"counts": 3}, TypeError, "arguments of probe: Args: missing: nothing; unknown: counts"),
        ({"size": (1, 2)}, ValueError, r"Args.size cannot be \(1, 2\)"),
        ({"size": (1, 2, 3, 4)}, ValueError, r"Args.size cannot be \(1, 2, 3, 4\)"),
        ({"count": 2**31}, ValueError, "Args.count cannot be 2147483648"),
        ({"count": 0.5}, ValueError, "Args.count cannot be 0.5"),
        ({"first": {"far": 1}}, TypeError, "Pair: missing: near; unknown: nothing"),
        ({"first": {"far": 1, "near": 2, "nearer": 3}}, TypeError, "Pair: missing: nothing; unknown: nearer"),
    ],
)
def test_wrong_arguments_are_refused(
    probe: Arguments, change: dict[str, object], error: type[Exception], message: str
) -> None:
    values = {name: value for name, value in {**VALUES, **change}.items() if value is not None}
    with pytest.raises(error, match=message):
        probe.pack(**values)


def test_a_launch_has_what_the_declaration_says(probe: Arguments) -> None:
    constants = (("kVector", 4),)
    launch = probe.launch(5, 64, constants, {"y": "result"}, shared_bytes=16, min_blocks=2, overlaps=True, **VALUES)
    compiled = (("kThreads", 64), ("kMinBlocks", 2), *constants)
    assert launch == Launch("probe", compiled, (5, 1, 1), 64, 16, ("x", "result"), probe.pack(**VALUES), True)
    with pytest.raises(TypeError, match="probe: pointers expected: x, y; got: x, y, z"):
        probe.launch(5, 64, constants, {"z": "result"}, **VALUES)
    with pytest.raises(TypeError, match="missing: last; unknown: nothing"):
        probe.launch(5, 64, constants, **{name: value for name, value in VALUES.items() if name != "last"})


@pytest.mark.parametrize("operands", [{"x": "a"}, {"x": "a", "y": "b", "z": "c"}, {"x": "a", "count": "b"}])
def test_wrong_pointers_are_refused(probe: Arguments, operands: dict[str, str]) -> None:
    with pytest.raises(TypeError, match="probe: pointers expected: x, y; got: x"):
        probe.pointers(**operands)


def test_a_kernel_is_declared_once_and_its_pointers_come_first(probe: Arguments) -> None:
    with pytest.raises(ValueError, match="probe: the arguments of a kernel are declared once"):
        Arguments("probe", x=POINTER("What is written."))
    with pytest.raises(ValueError, match="late: the pointers of a kernel come before its other arguments"):
        Arguments("late", n=INT32("A number."), x=POINTER("What is written."))


@pytest.mark.parametrize("divisor", [0, 1, 2, 3, 7, 641, 2**16 + 1, 2**31 - 1])
def test_a_divider_divides(divisor: int) -> None:
    found = DIVIDER.read(DIVIDER.write(divisor))
    divisor = max(1, divisor)
    for n in {0, 1, divisor - 1, divisor, 2 * divisor - 1, 10**9, 2**31 - 1}:
        assert ((n * found["multiplier"] >> 32) + n) >> found["shift"] == n // divisor


def test_a_walk_has_its_step_in_digits() -> None:
    found = WALK.read(WALK.write(((2, 3, 5), 32)))
    assert (found["size"], found["step"], found["step_n"]) == (
        {"d": 2, "h": 3, "w": 5},
        {"d": 0, "h": 0, "w": 2},
        1,
    ), "32 positions are one batch item of 30 and 2 more"
    assert [found[f"by_{axis}"]["divisor"] for axis in "dhw"] == [2, 3, 5]
    assert per_axis("by", (2, 3, 5)) == {"by_d": 2, "by_h": 3, "by_w": 5}


# ---- C++


def test_the_struct_in_cpp(probe: Arguments) -> None:
    lines = probe.definitions.splitlines()
    assert lines[:3] == ['#include "common.cuh"', "namespace tconv3d {", "// Two numbers."]
    assert "  long long far;  // A long one." in lines and "  const void* x;  // What is read." in lines
    assert f'static_assert(sizeof(Args) == {probe.size}, "Python and C++ lay out Args alike");' in lines
    assert lines.count("struct Pair {") == 1 and max(map(len, lines)) <= arguments.LINE


def test_a_long_comment_stands_above_its_field() -> None:
    text = Struct("Long", "A struct.", n=INT32("word " * 30), m=INT32("Short.")).definition
    assert re.search(
        r"struct Long \{\n  // word [^\n]*\n  // word [^\n]*\n  int n;\n  int m;  // Short\.\n\};\n", text
    )


def test_the_unit_of_a_declared_kernel_begins_with_its_arguments() -> None:
    unit = compiler.translation_unit("halo", (("kThreads", 128),))
    assert unit.startswith(f'{HALO.definitions}#include "halo.cuh"\n')
    assert compiler.translation_unit("nobodys", ()).startswith('#include "nobodys.cuh"\n')


@pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")
def test_every_struct_is_laid_out_as_the_compiler_does(tmp_path: Path) -> None:
    """Sizes, and the offset of every field, of all declared kernels."""
    units = []
    for kernel in KERNELS:
        found = declared(kernel)
        assert found is not None
        checks = "".join(
            f"static_assert(offsetof({each.name}, {key}) == {offset});\n"
            for each in (*found.inner, found)
            for key, offset in each.offsets.items()
        )
        text = found.definitions.replace("namespace tconv3d {", f"namespace tconv3d::{kernel}_kernel {{")
        units.append(text + f"namespace tconv3d::{kernel}_kernel {{\n{checks}}}\n")
    source = tmp_path / "layouts.cpp"
    source.write_text("#include <cstddef>\n#include <cuda_emulator.h>\n" + "".join(units))
    include = Path(emulator.__file__).parent / "include"
    places = [f"-I{place}" for place in (include, *sources.KERNELS)]
    command = [emulator._compiler(), "-std=c++20", "-fsyntax-only", *places, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]


# ---- the kernels of the package


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_is_declared(kernel: str) -> None:
    found = declared(kernel)
    assert found is not None and found.kernel == kernel
    fields = [field for each in found.generated for field in each.fields.values()]
    assert all(re.fullmatch(r"[A-Z\[].*\.", field.comment) for field in fields), "every comment is a sentence"


def test_every_declaration_is_of_a_kernel() -> None:
    assert sorted(arguments._declared) == KERNELS
    assert not [name for name, path in sources.all_headers().items() if "struct Args" in path.read_text()]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernels_headers_have_the_types_of_its_arguments(kernel: str) -> None:
    """The cache key of a kernel covers the headers that its own includes, and so those of its arguments' types."""
    found = declared(kernel)
    assert found is not None
    assert set(found.includes) <= set(sources.headers(kernel))


@pytest.mark.parametrize("known", [STRIDES, EXTENT, DIVIDER, WALK], ids=lambda known: known.name)
def test_types_of_headers_have_the_members_that_python_writes(known: Struct) -> None:
    unit = Unit(known.header, Headers().unit_text(known.header))
    (found,) = [each for each in unit.declarations if each.kind == "struct" and each.name == known.name]
    members = [
        (each.core.parent.need("type").text, name) for name, (each, *_) in found.members.items() if each.core.parent
    ]
    assert members == [(field.type.name, key) for key, field in known.fields.items()]
