"""What export does to the kernels' source: reading it, deciding branches, leaving out what nothing needs."""

from __future__ import annotations

import io
import re
import struct
import textwrap
from pathlib import Path

import pytest

from tconv3d.runtime import compiler, sources
from tconv3d.tools.bench import layers
from tconv3d.tools.export import comments, cuda_source, passes, syntax
from tconv3d.tools.export.headers import Headers
from tconv3d.tools.export.program import Unit
from tconv3d.tools.export.specialise import specialise

HEADERS = sorted(sources.all_headers())
EVERY = passes.variants(passes.PRECISIONS, passes.LAYOUTS, ["H200", "any"])
KNOWN = (("kYes", True), ("kNo", False), ("kFour", 4), ("kTable", (3, -1)), ("Scalar", "float"))


# ---- reading


@pytest.mark.parametrize("name", HEADERS)
def test_every_header_is_understood(name: str) -> None:
    """Every comparison is one, too: none is taken for the arguments of a template."""
    unit = Unit(name, Headers().unit_text(name))
    assert "#if" not in unit.text and "#define" not in unit.text
    lists = [node for node in unit.root.walk() if node.kind == "template_argument_list"]
    assert not [node.text for node in lists if node.text.startswith("< ")]


def test_macros_are_expanded() -> None:
    text = '#define TWICE(N, ...) f_##N("a" #N, __VA_ARGS__)\n#define ONE 1\nint x = TWICE(3, ONE, y);\n'
    assert syntax.Macros().expand(text) == 'int x = f_3("a3", 1, y);\n'


# ---- deciding and leaving out


def specialised(tmp_path: Path, body: str, kernel: tuple[tuple[str, object], ...] = KNOWN) -> str:
    """The body of `run` in a kernel that knows `KNOWN`, as the export writes it."""
    (tmp_path / "fill.cuh").write_text(
        "namespace tconv3d {\n" + textwrap.dedent(body).strip() + "\n}  // namespace tconv3d\n"
    )
    parts = specialise(Headers(tmp_path), {"fill": [kernel]})  # type: ignore[list-item]
    return "\n".join(part.text for part in parts if part.header == "fill.cuh")


def run_of(tmp_path: Path, statements: str, before: str = "") -> list[str]:
    """The statements that are left of `run`, without spaces at their ends."""
    declared = 'template <class T> __device__ void use(T value) { asm volatile("" : : "r"(value)); }\n'
    body = (
        declared
        + before
        + "\ntemplate <class Config>\n__device__ void run(const Args& args) {\n"
        + statements
        + "\n}\n"
    )
    text = specialised(tmp_path, body)
    inside = text[text.index("run(") :]
    inside = inside[inside.index("{") + 1 : inside.rindex("}")]
    return [line.strip() for line in inside.split("\n") if line.strip()]


@pytest.mark.parametrize(
    ("statements", "left"),
    [
        ("if constexpr (Config::kYes) {\n  use(1);\n} else {\n  use(2);\n}", ["use(1);"]),
        ("// Sometimes.\nif constexpr (Config::kNo) use(1);\nuse(2);", ["use(2);"]),
        ("use(Config::kYes ? 1 : 2);", ["use(1);"]),
        ("use(4 + (Config::kNo ? 3 : 0));", ["use(4);"]),
        ("if (Config::kYes && args.count > 1) use(1);", ["if (args.count > 1) use(1);"]),
        ("if (args.count < 1 || args.count > 3) use(1);", ["if (args.count < 1 || args.count > 3) use(1);"]),
        ("if constexpr (Config::kFour > 3) return;\nuse(1);", ["return;"]),
        ("static_assert(Config::kFour == 4);\nuse(1);", ["use(1);"]),
        ("const int nobody = 3;\nuse(1);", ["use(1);"]),
        ("int nobody = 3;\nnobody = 4;\nuse(1);", ["use(1);"]),
        ("if constexpr (sizeof(typename Config::Scalar) == 4) use(1);", ["use(1);"]),
        ("if constexpr (Config::kTable(1) < 0) use(1);", ["use(1);"]),
    ],
)
def test_statements(tmp_path: Path, statements: str, left: list[str]) -> None:
    assert run_of(tmp_path, statements) == left


def test_loops_of_constants_are_followed_turn_by_turn(tmp_path: Path) -> None:
    before = """
    template <int kValue>
    struct Int {
      static constexpr int value = kValue;
    };
    template <int kCount, int kIndex = 0, class Body>
    __device__ void static_for(Body&& body) {
      if constexpr (kIndex < kCount) {
        body(Int<kIndex>{});
        static_for<kCount, kIndex + 1>(body);
      }
    }
    """
    statements = (
        "static_for<2>([&](auto i) {\n  if constexpr (decltype(i)::value > 5) use(1);\n"
        "  if constexpr (decltype(i)::value == 1) use(2);\n});"
    )
    left = run_of(tmp_path, statements, textwrap.dedent(before))
    assert not any("use(1)" in line for line in left), "no turn takes it"
    assert any("if constexpr (decltype(i)::value == 1)" in line for line in left), (
        "one turn takes it, another does not"
    )


def test_constant_functions_are_computed(tmp_path: Path) -> None:
    before = """
    struct Range {
      int first, last;
      __device__ constexpr int count() const { return last - first + 1; }
    };
    __device__ constexpr Range range(int n) {
      Range all{100, 0};
      for (int i = 3; i < n; ++i) all = {i < all.first ? i : all.first, i > all.last ? i : all.last};
      return all;
    }
    """
    statements = "constexpr Range kRange = range(Config::kFour + 2);\nif constexpr (kRange.count() == 3) use(1);"
    assert run_of(tmp_path, statements, textwrap.dedent(before)) == ["use(1);"]


MEMBERS = """
struct Place {
  int kept, written, unread;
  __device__ int used(int first, int second) const { return kept + second; }
  __device__ int nobody() const { return unread; }
};
template <class Config>
__device__ void run(const Args& args) {
  Place at;
  at.kept = args.count;
  at.written = 3;
  *static_cast<int*>(args.words) = at.used(1, 2);
}
"""


def test_members_functions_and_parameters_that_nobody_reads_are_gone(tmp_path: Path) -> None:
    text = specialised(tmp_path, MEMBERS)
    assert "kept" in text and "used(int second)" in text and "at.used(2)" in text
    assert "written" not in text and "unread" not in text and "nobody" not in text


def test_constants_that_differ_keep_both_branches(tmp_path: Path) -> None:
    text = "template <class Config>\n__device__ void run(const Args& args) {\n  if constexpr (Config::kYes) {\n"
    text += "    *static_cast<int*>(args.words) = 1;\n  } else {\n    *static_cast<int*>(args.words) = 2;\n  }\n}\n"
    (tmp_path / "fill.cuh").write_text(f"namespace tconv3d {{\n{text}\n}}  // namespace tconv3d\n")
    both = [(("kYes", True),), (("kYes", False),)]
    (part,) = (p for p in specialise(Headers(tmp_path), {"fill": list(both)}) if p.header == "fill.cuh")
    assert "if constexpr (Config::kYes)" in part.text and "= 1" in part.text and "= 2" in part.text


@pytest.mark.parametrize(
    ("comment", "left"),
    [
        ("// Adds kOne. It is in gone.cuh. And more.", "// Adds kOne."),
        ("// Adds kOne (gone.cuh).", "// Adds kOne."),
        ("// Uses kGone.", ""),
        ("// With kOne == 1 it adds. With kOne == 2 it does not.", "// With kOne == 1 it adds."),
        ("// Terms:\n//\n// - kGone: one\n// - kOne: two", "// Terms:\n//\n// - kOne: two"),
    ],
)
def test_comments_are_true(comment: str, left: str) -> None:
    facts = comments.Facts({"kOne"}, {"kOne": {1}})
    assert comments.only_true(f"{comment}\nint kOne;", facts) == f"{left}\nint kOne;".lstrip("\n")


# ---- machine code


def text_sections(cubin: bytes) -> list[bytes]:
    """The machine code of every kernel in an ELF file."""
    (offset,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + i * size) for i in range(count)]
    start = headers[names][4]
    found = []
    for header in headers:
        place = start + header[0]
        if cubin[place : cubin.index(b"\0", place)].startswith(b".text"):
            found.append(cubin[header[4] : header[4] + header[5]])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("large_volume", "tf32"),
        ("depthwise_64", "float16"),
        pytest.param("grouped_strided", "bfloat16", marks=pytest.mark.thorough),
    ],
)
def test_specialised_kernels_are_the_librarys_machine_code(name: str, which: str) -> None:
    """With all arguments and constants at their places, a specialised kernel compiles to equal bytes.

    Where a loop that assigns numbers to themselves is left out, the compiler chooses other registers, but no more.
    """
    try:
        compiler.version()
    except compiler.MissingCompilerError as error:
        pytest.skip(str(error))
    from cuda.core import Program, ProgramOptions

    (variant,) = passes.variants([which], ["contiguous"], ["H200"])
    operations = passes.operations(layers.LAYERS[name], [variant])
    parts = specialise(Headers(), cuda_source._settings(operations), keep_arguments=True)
    words = cuda_source._words(parts)
    device = cuda_source._device(parts)
    for operation in operations:
        (section,) = cuda_source.sections(operation)
        for i, launch in enumerate(section.plan.launches):
            words[launch.kernel] |= {key for key, value in launch.constants if not isinstance(value, str)}
            source = f"{device}\nnamespace tconv3d {{\n{cuda_source._kernel(operation, section, i, words)}}}\n"
            options = ProgramOptions(arch="sm_90a", **compiler._OPTIONS)
            log = io.StringIO()
            ours = bytes(Program(source, "c++", options).compile("cubin", logs=log).code)
            theirs = compiler.compile(launch.kernel, launch.constants, "sm_90a")
            what = f"{operation.name}: {launch.kernel}"
            assert compiler.report(log.getvalue()) == theirs.report, what
            if (name, operation.name, launch.kernel) == ("large_volume", "forward", "halo"):
                (mine,), (other,) = text_sections(ours), text_sections(theirs.cubin)
                assert len(mine) == len(other), what
            else:
                assert text_sections(ours) == text_sections(theirs.cubin), what


# ---- variants


@pytest.mark.parametrize(
    ("variants", "condition"),
    [
        ([("H200", "tf32", "contiguous")], "defined(FOR_H200) && defined(FOR_TF32) && defined(FOR_CONTIGUOUS)"),
        ([("H200", "tf32", "contiguous"), ("H200", "tf32", "channels_last_3d")],
         "defined(FOR_H200) && defined(FOR_TF32)"),
        ([("any", "float16", "contiguous"), ("H200", "float16", "contiguous")],
         "defined(FOR_FLOAT16) && defined(FOR_CONTIGUOUS)"),
    ],
)  # fmt: skip
def test_guards_say_which_variants(variants: list[tuple[str, str, str]], condition: str) -> None:
    assert cuda_source.guard([passes.Variant(*v) for v in variants], EVERY) == condition


def test_one_variant_needs_no_guard() -> None:
    only = passes.variants(["tf32"], ["contiguous"], ["H200"])
    assert cuda_source.guard(only, only) == ""


def test_guards_are_right_for_every_set_of_variants() -> None:
    """Each variant of a layer is in exactly one section, and no section's condition holds for another's."""
    layer = layers.LAYERS["monai_32_2_64"]
    for operation in passes.operations(layer, EVERY):
        found = cuda_source.sections(operation)
        for variant in EVERY:
            holds = [holds_for(cuda_source.guard(section.plans, EVERY), variant) for section in found]
            own = [variant in section.plans for section in found]
            assert holds == own and sum(own) == 1


def holds_for(condition: str, variant: passes.Variant) -> bool:
    text = condition.replace("\\\n", " ").replace("&&", " and ").replace("||", " or ") or "True"
    names = {name: name for name in re.findall(r"FOR_\w+", condition)}
    return bool(eval(text, {"defined": lambda name: name in variant.macros, **names}))
