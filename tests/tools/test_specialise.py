"""What export does to the kernels' source: reading it, deciding branches, leaving out what nothing mentions."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

import tconv3d
from tconv3d.planning import planner
from tconv3d.planning.problem import Device, Pass, Plan, Problem
from tconv3d.runtime import sources
from tconv3d.tools.bench import layers
from tconv3d.tools.bench.precision import LAYOUTS, in_layout, precision
from tconv3d.tools.export import cuda_source, cxx, passes, specialise
from tconv3d.tools.export.specialise import Sources, fold
from tconv3d.torch_ops import executor

HEADERS = sorted(sources.all_headers())
EVERY = passes.variants(tuple(passes.PRECISIONS), passes.LAYOUTS)
KNOWN = {"kYes": True, "kNo": False, "kFour": 4}


def truth(condition: str) -> bool | None:
    def lookup(qualifier: str, name: str) -> int | None:
        return int(KNOWN[name]) if qualifier == "Config" and name in KNOWN else None

    value = cxx.Evaluator(lookup, lambda *_: None, {"float": 4}.get)(condition)
    return None if value is None else bool(value)


def folded(text: str) -> str:
    return fold(textwrap.dedent(text).strip(), truth)


def expected(text: str) -> str:
    return textwrap.dedent(text).strip()


# ---- reading


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("name", HEADERS)
def test_every_header_is_read_whole(name: str, emulated: bool) -> None:
    header = Sources(emulated=emulated).header(name)
    again = cxx.render(cxx.declarations(header.body), lambda declaration: True)
    assert again == header.body
    assert "#if" not in again and "TCONV3D_EMULATOR" not in again


def test_declarations_know_their_names() -> None:
    text = """
    // A point.
    struct Point { int x, y; };
    template <class T, int N = 3>
    __device__ int size(const T& of) { return N; }  // beside
    static constexpr int kA = 1, kB = (2, 3);
    using Pair = Vector<int, 2>;
    enum class Kind { kOne };
    """
    found = cxx.declarations(textwrap.dedent(text).strip())
    assert [(d.kind, d.names) for d in found] == [
        ("struct", ("Point",)),
        ("function", ("size",)),
        ("constant", ("kA", "kB")),
        ("using", ("Pair",)),
        ("using", ("Kind",)),
    ]
    assert found[0].text.startswith("// A point.") and found[1].text.endswith("// beside")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("-7 / 2", -3),  # C++ rounds towards zero
        ("-7 % 2", -1),
        ("(1 << 4) | 3", 19),
        ("0x10u == 16 ? 5 : 6", 5),
        ("sizeof(float) * Config::kFour", 16),
        ("static_cast<int>(Config::kFour) > 3", 1),
        ("!Config::kNo && Config::kFour != 4", 0),
        ("Config::kNo && unknown", 0),
        ("unknown || Config::kYes", 1),
        ("unknown && Config::kYes", None),
        ("kFour", None),  # not known without its Config
        ("1.5f > 1", None),
        ("f(2)", None),
        ("1 / 0", None),
        ("Config::kFour +", None),
    ],
)
def test_integer_expressions(text: str, value: int | None) -> None:
    def lookup(qualifier: str, name: str) -> int | None:
        return int(KNOWN[name]) if qualifier == "Config" and name in KNOWN else None

    assert cxx.Evaluator(lookup, lambda *_: None, {"float": 4}.get)(text) == value


# ---- folding


def test_a_branch_that_is_taken_loses_its_condition() -> None:
    text = """
    void f() {
      if constexpr (Config::kYes) {
        one();
        two();
      } else {
        three();
      }
    }
    """
    assert folded(text) == expected("void f() {\n  one();\n  two();\n}")


def test_a_branch_that_is_never_taken_goes_with_its_comment() -> None:
    text = """
    void f() {
      one();
      // Only sometimes.
      if constexpr (Config::kNo) two();
      three();
    }
    """
    assert folded(text) == expected("void f() {\n  one();\n  three();\n}")


def test_a_chain_of_conditions_keeps_what_is_not_known() -> None:
    text = """
    if (unknown) {
      one();
    } else if constexpr (Config::kNo) {
      two();
    } else {
      three();
    }
    """
    assert folded(text) == expected("if (unknown) {\n  one();\n} else {\n  three();\n}")
    assert folded("if (unknown) {\n  one();\n} else if (Config::kNo) {\n  two();\n}") == "if (unknown) {\n  one();\n}"
    unchanged = "if constexpr (kFour == 4) {\n  one();\n}"
    assert folded(unchanged) == unchanged


def test_names_of_a_block_stay_inside_it() -> None:
    text = """
    void f(int row) {
      if constexpr (Config::kYes) {
        const int row = 2;
        use(row);
      }
      use(row);
    }
    """
    assert folded(text).count("{") == 2, "without its braces the block's row would be the one used last"


@pytest.mark.parametrize(
    "declaration", ["int row = 2;", "const int row = 2;", "Vector<int, 2> row{};", "float* row = x;"]
)
def test_whatever_may_declare_a_name_keeps_its_braces(declaration: str) -> None:
    text = f"void f() {{\n  if (Config::kYes) {{\n    {declaration}\n  }}\n  last();\n}}"
    assert folded(text) == f"void f() {{\n  {{\n    {declaration}\n  }}\n  last();\n}}"


def test_what_a_loop_repeats_stays_one_statement() -> None:
    assert folded("for (;;) if (Config::kNo) one();\nlast();") == "for (;;) {}\nlast();"
    assert folded("for (;;)\n  if (Config::kYes) {\n    one();\n    two();\n  }\nlast();") == (
        "for (;;)\n  {\n    one();\n    two();\n  }\nlast();"
    )
    assert folded("int f() {\n  for (;;) if (Config::kYes) return 1;\n  last();\n}") == (
        "int f() {\n  for (;;) return 1;\n  last();\n}"
    )


def test_what_follows_a_return_is_gone() -> None:
    text = """
    int f() {
      if constexpr (Config::kYes) return 1;
      const int left = 2;
      return left;
    }
    int g() { return 3; }
    """
    assert folded(text) == expected("int f() {\n  return 1;\n}\nint g() { return 3; }")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x = Config::kYes ? a : b;", "x = a;"),
        ("x = 2 * (Config::kNo ? a : b);", "x = 2 * b;"),
        ("x = 2 * (Config::kNo ? a : b + c);", "x = 2 * (b + c);"),
        ("f(Config::kYes ? a : b, c);", "f(a, c);"),
        ("x = Config::kNo ? a : q ? b : c;", "x = q ? b : c;"),
        ("x = q ? Config::kYes ? a : b : c;", "x = q ? a : c;"),
        ("x = y < Config::kFour ? a : b;", "x = y < Config::kFour ? a : b;"),
        ("Ring<Config::kYes ? 1 : 2> ring;", "Ring<Config::kYes ? 1 : 2> ring;"),
        ("Ring<q && Config::kNo ? 1 : 2> ring;", "Ring<q && Config::kNo ? 1 : 2> ring;"),
        ("x =\n    Config::kYes ? a : b;", "x = a;"),
    ],
)
def test_choices(text: str, value: str) -> None:
    assert folded(text) == value


# ---- pruning and the whole


def kernels(tmp_path: Path, **headers: str) -> Sources:
    for name, body in headers.items():
        include = "" if name == "common" else '#include "common.cuh"\n\n'
        (tmp_path / f"{name}.cuh").write_text(
            f"// {name}.\n#pragma once\n\n{include}namespace tconv3d {{\n\n{expected(body)}\n\n"
            "}  // namespace tconv3d\n"
        )
    return Sources(tmp_path)


COMMON = """
struct Half { unsigned short bits; };
float widen(float value) { return value; }
float widen(Half value) { return half_bits(value.bits); }
float half_bits(unsigned short bits) { return bits; }

// ---- Instructions.

template <int N>
struct Multiply;
#define MULTIPLY(N)          \\
  template <>                \\
  struct Multiply<N> {       \\
    int at() { return N_##N; } \\
  }
#define N_8 1
#define N_16 N_8 + 1
MULTIPLY(8);
MULTIPLY(16);

// ---- Nobody's.

void unused() {}
"""
KERNEL = """
struct Args { int n; };
template <class Config>
struct Kernel {
  static constexpr int kWidth = Config::kTwice ? 16 : 8;
  static constexpr int kOther = 5;
  static_assert(kWidth > 0);
  int data;
  void compute() { Multiply<kWidth>(); }
  void rest() {}
};
template <class Config>
void run(const Args& args) {
  if constexpr (Config::kTwice) {
    Kernel<Config>().rest();
  } else {
    Kernel<Config>().compute();
  }
  widen(typename Config::Scalar());
}
"""


def test_only_what_a_setting_needs_is_left(tmp_path: Path) -> None:
    sources = kernels(tmp_path, common=COMMON, kernel=KERNEL)
    common, kernel = specialise.specialise(sources, {"kernel": [(("kTwice", False), ("Scalar", "float"))]})
    assert "widen(float value)" in common.text and "Half" not in common.text and "half_bits" not in common.text
    assert "MULTIPLY(8)" in common.text and "MULTIPLY(16)" not in common.text
    assert "N_8 1" in common.text and "N_16" not in common.text
    assert "---- Instructions" in common.text and "Nobody's" not in common.text and "unused" not in common.text
    assert "kWidth = 8;" in kernel.text and "static_assert" in kernel.text and "int data" in kernel.text
    assert "compute" in kernel.text and "rest" not in kernel.text and "kOther" not in kernel.text


def test_settings_that_differ_keep_both_branches(tmp_path: Path) -> None:
    sources = kernels(tmp_path, common=COMMON, kernel=KERNEL)
    settings = [(("kTwice", twice), ("Scalar", "tconv3d::Half")) for twice in (False, True)]
    common, kernel = specialise.specialise(sources, {"kernel": settings})
    assert "MULTIPLY(8)" in common.text and "MULTIPLY(16)" in common.text and "N_16" in common.text
    assert "half_bits" in common.text
    assert "if constexpr (Config::kTwice)" in kernel.text
    assert "compute" in kernel.text and "rest" in kernel.text


def test_a_template_whose_argument_is_not_known_keeps_all_its_specialisations(tmp_path: Path) -> None:
    body = "struct Args { int n; };\ntemplate <class Config>\nvoid run(const Args& args) {\n  Multiply<size()>();\n}"
    sources = kernels(tmp_path, common=COMMON, kernel=body)
    common, _ = specialise.specialise(sources, {"kernel": [(("Scalar", "float"),)]})
    assert "MULTIPLY(8)" in common.text and "MULTIPLY(16)" in common.text


@pytest.mark.parametrize(
    ("variants", "condition"),
    [
        ([("hopper", "tf32", "contiguous")],
         "defined(FOR_HOPPER) && defined(FOR_TF32) && !defined(FOR_CHANNELS_LAST_3D)"),
        ([("hopper", "tf32", "contiguous"), ("hopper", "tf32", "channels_last_3d")],
         "defined(FOR_HOPPER) && defined(FOR_TF32)"),
        ([("any", "float16", "contiguous"), ("hopper", "float16", "contiguous")],
         "defined(FOR_FLOAT16) && !defined(FOR_CHANNELS_LAST_3D)"),
        ([("any", "tf32", "contiguous"), ("any", "float32", "contiguous")],
         "!defined(FOR_HOPPER) && (defined(FOR_TF32) || defined(FOR_FLOAT32)) && !defined(FOR_CHANNELS_LAST_3D)"),
    ],
)  # fmt: skip
def test_guards_say_which_variants(variants: list[tuple[str, str, str]], condition: str) -> None:
    assert cuda_source.guard([passes.Variant(*v) for v in variants], EVERY) == condition


def test_numbers_are_written_with_all_their_digits() -> None:
    assert (
        cuda_source._value({"eps": 1e-5, "count": 3, "far": 2**40})
        == "{.eps = 1e-05, .count = 3, .far = 1099511627776ll}"
    )


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
    macros = {f"FOR_{name.upper()}" for name in (variant.precision, variant.layout, variant.gpu)}
    text = condition.replace("\\\n", " ").replace("&&", " and ").replace("||", " or ").replace("!", " not ")
    names = tuple(f"FOR_{name}" for name in ("HOPPER", "TF32", "FLOAT32", "FLOAT16", "BFLOAT16", "CHANNELS_LAST_3D"))
    return bool(eval(text, {"defined": lambda name: name in macros, **{name: name for name in names}}))


@pytest.mark.parametrize("variant", [v for v in EVERY if v.gpu == "any"], ids=str)  # problems do not know the GPU
def test_problems_are_those_of_the_executor(variant: passes.Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step of the library asks the planner what export asks it."""
    asked = []

    nothing = Plan("none", "nothing runs here", ())

    def plan(problem: Problem, device: Device) -> Plan:
        asked.append(problem)
        return nothing

    def plan_gradients(problems: tuple[Problem, ...], device: Device) -> Plan:
        asked.extend(problems)
        return nothing

    monkeypatch.setattr(planner, "plan", plan)
    monkeypatch.setattr(planner, "plan_gradients", plan_gradients)
    monkeypatch.setattr(executor, "_tasks", {})
    layer = layers.parse("32, 24, kernel_size=3, stride=(1, 2, 2), padding=1, size=(5, 6, 7), batch=2")
    dtype = torch.float32 if variant.precision == "tf32" else getattr(torch, variant.precision)
    module = in_layout(tconv3d.accelerate(layer.module(dtype)), variant.layout)
    x = layer.input(dtype).to(memory_format=LAYOUTS[variant.layout]).requires_grad_()
    with precision(variant.precision), tconv3d.use_backend("emulator"):
        y = module(x)
        y.backward(torch.ones_like(y))
    expected = [passes.problem(layer, which, variant) for which in Pass]
    assert sorted(asked, key=str) == sorted(expected, key=str)
