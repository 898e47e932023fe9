"""Writes the CUDA source of an exported file from operations and their plans.

The source holds the needed parts of the kernels' headers, then for every operation and variant the constants, the
kernels that are compiled with them, and the function that launches them. Macros (`guard`) choose the variant.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...planning import arguments
from ...planning.launch import Constant, Constants, Launch
from ...planning.problem import Plan
from . import cxx
from .passes import NotExportableError, Operation, Variant
from .specialise import Part, Settings, Sources, specialise

LINE = 110
_ONLY_LAUNCHED = {"kMinBlocks"}  # used in the launch bounds, never inside a kernel
TOP = r"""// A kernel is a template over a Config, the constants of this layer; Args are its arguments at run time.
// Which variant is compiled is said by the macros FOR_HOPPER, FOR_TF32, FOR_FLOAT32, FOR_FLOAT16,
// FOR_BFLOAT16, FOR_CHANNELS_LAST_3D.
#ifndef __CUDACC_RTC__
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#endif
"""
LAUNCH = r"""
// ---- Launching.

#ifndef __CUDACC_RTC__
namespace tconv3d {

inline void check(cudaError_t status, const char* kernel) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(kernel) + ": " + cudaGetErrorString(status));
  }
}

template <class Args>
void launch(const char* name, void (*kernel)(Args), dim3 grid, unsigned threads, int shared_bytes, Args args,
            cudaStream_t stream, unsigned cluster = 1) {
  if (shared_bytes > 48 * 1024) {  // more than a kernel has without asking
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), name);
  }
  if (cluster == 1) {
    void* parameters[] = {&args};
    check(cudaLaunchKernel(kernel, grid, dim3{threads, 1, 1}, parameters, shared_bytes, stream), name);
    return;
  }
  cudaLaunchAttribute blocks{};  // that see each other's shared memory
  blocks.id = cudaLaunchAttributeClusterDimension;
  blocks.val.clusterDim.x = cluster;
  blocks.val.clusterDim.y = blocks.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3{threads, 1, 1};
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &blocks;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, args), name);
}

// A place in an operation's scratch memory.
inline void* part(void* workspace, long long bytes) { return static_cast<unsigned char*>(workspace) + bytes; }

}  // namespace tconv3d
#endif
"""


def cuda_source(operations: Sequence[Operation], kernels: Path | None = None, emulated: bool = False) -> str:
    """The whole source. `emulated`: for the emulator, whose header stands in for inline assembly."""
    specialised = specialise(Sources(kernels, emulated), _settings(operations))
    parts = [_part(part) for part in specialised]
    mentioned = {"kThreads", *_ONLY_LAUNCHED}.union(*(cxx.words(part.text) for part in specialised))
    includes = '#include "emulated_ptx_hopper.h"\n' if emulated else ""
    written = [_operation(_trimmed(operation, mentioned)) for operation in operations]
    return TOP + includes + "".join(parts) + LAUNCH + "".join(written)


def _trimmed(operation: Operation, mentioned: set[str]) -> Operation:
    """Returns the operation without the constants that no specialised kernel reads."""

    def trim(launch: Launch) -> Launch:
        return replace(launch, constants=tuple(c for c in launch.constants if c[0] in mentioned))

    plans = {v: replace(plan, launches=tuple(map(trim, plan.launches))) for v, plan in operation.plans.items()}
    return replace(operation, plans=plans)


def _settings(operations: Sequence[Operation]) -> Settings:
    """Returns, for each kernel, all sets of constants that it is compiled with."""
    found: Settings = {}
    for operation in operations:
        for plan in operation.plans.values():
            for launch in plan.launches:
                known = found.setdefault(launch.kernel, [])
                if launch.constants not in known:
                    known.append(launch.constants)
    return found


def _part(part: Part) -> str:
    if not part.text.strip():
        return ""
    name = part.header.removesuffix(".cuh")
    namespace = f"{part.namespace}::{part.kernel}" if part.kernel else part.namespace
    rule = f"// ==== {name} " + "=" * (LINE - len(name) - 9)
    comment = "".join(f"{line}\n" for line in part.comment.splitlines() if "emulator" not in line)
    return f"\n{rule}\n{comment}\nnamespace {namespace} {{\n\n{part.text}\n\n}}  // namespace {namespace}\n"


# ---- which variants share a section


@dataclass
class Section:
    """Holds variants that run the same launches; some constants, such as `Scalar`, may differ between precisions."""

    plans: dict[Variant, Plan]

    @property
    def plan(self) -> Plan:
        return next(iter(self.plans.values()))

    def takes(self, variant: Variant, plan: Plan) -> bool:
        """Says whether the variant can join: its launches are equal, or alike for its GPU and layout (`_alike`)."""
        return any(
            plan.launches == known_plan.launches
            or ((variant.gpu, variant.layout) == (known.gpu, known.layout) and _alike(plan, known_plan))
            for known, known_plan in self.plans.items()
            if (plan.workspace_bytes, plan.regions) == (known_plan.workspace_bytes, known_plan.regions)
        )


def _alike(a: Plan, b: Plan) -> bool:
    """Says whether the launches differ only in constants that name types and at most one other constant."""
    if len(a.launches) != len(b.launches):
        return False
    for x, y in zip(a.launches, b.launches, strict=True):
        differing = [(c, d) for c, d in zip(x.constants, y.constants, strict=False) if c != d]
        others = [c for c, d in differing if not (c[0] == d[0] and isinstance(c[1], str))]
        if replace(x, constants=()) != replace(y, constants=()) or len(others) > 1:
            return False
        if len(x.constants) != len(y.constants) or any(c[0] != d[0] for c, d in differing):
            return False
    return True


def sections(operation: Operation) -> list[Section]:
    found: list[Section] = []
    for variant, plan in operation.plans.items():
        section = next((s for s in found if s.takes(variant, plan)), None)
        if section is None:
            found.append(Section({variant: plan}))
        else:
            section.plans[variant] = plan
    return found


def guard(chosen: Iterable[Variant], all_of: Iterable[Variant]) -> str:
    """Returns the preprocessor condition that one of the chosen variants is compiled."""
    chosen, every = list(chosen), list(all_of)
    rectangles: dict[tuple[frozenset[str], frozenset[str]], list[str]] = {}
    for precision in dict.fromkeys(v.precision for v in chosen):
        by_gpu: dict[str, set[str]] = {}
        for v in chosen:
            if v.precision == precision:
                by_gpu.setdefault(v.gpu, set()).add(v.layout)
        for layouts in {frozenset(layouts) for layouts in by_gpu.values()}:
            gpus = frozenset(gpu for gpu, found in by_gpu.items() if found == layouts)
            rectangles.setdefault((gpus, layouts), []).append(precision)
    texts = [_rectangle(gpus, found, layouts, every) for (gpus, layouts), found in rectangles.items()]
    return " || \\\n    ".join(f"({text})" if "&&" in text and len(texts) > 1 else text for text in texts)


def _rectangle(gpus: frozenset[str], precisions: list[str], layouts: frozenset[str], every: list[Variant]) -> str:
    parts = []
    if gpus != {v.gpu for v in every}:
        parts.append("defined(FOR_HOPPER)" if "hopper" in gpus else "!defined(FOR_HOPPER)")
    if set(precisions) != {v.precision for v in every}:
        named = " || ".join(f"defined(FOR_{precision.upper()})" for precision in precisions)
        parts.append(f"({named})" if len(precisions) > 1 else named)
    if layouts != {v.layout for v in every}:
        last = "defined(FOR_CHANNELS_LAST_3D)"
        parts.append(last if "channels_last_3d" in layouts else f"!{last}")
    text = " && ".join(parts) or "1"
    return text if len(text) <= LINE else " && \\\n    ".join(parts)


# ---- operations


def _operation(operation: Operation) -> str:
    title = operation.name.replace("_", " ")
    every = list(operation.plans)
    text = f"\n// ==== {title} " + "=" * (LINE - len(title) - 9) + "\n"
    for section in sections(operation):
        text += f"\n#if {guard(section.plans, every)}\n{_section(operation, section)}#endif\n"
    return text


def parameters(operation: Operation) -> list[str]:
    """Returns the parameters of the C++ function that launches an operation's kernels."""
    inputs = [f"const void* {name}" for name in operation.operands]
    outputs = [f"void* {result.name}" for result in operation.results]
    return [*inputs, *outputs, "void* workspace", "cudaStream_t stream"]


def _section(operation: Operation, section: Section) -> str:
    plan = section.plan
    who = "; ".join(str(v) for v in section.plans)
    note = f"For {who}: {plan.kernel} ({plan.why})" + (f", {plan.tile}" if plan.tile else "") + "."
    text = _comment(note) + "namespace tconv3d {\n\n"
    text += "\n".join(_kernel(operation, section, i) for i in range(len(plan.launches)))
    text += f"\n#ifndef __CUDACC_RTC__\nlong long {operation.name}_workspace() {{ return {plan.workspace_bytes}; }}\n"
    start = f"void launch_{operation.name}("
    text += listed(start, parameters(operation), ") {", len(start))
    for i, launch in enumerate(plan.launches):
        text += _launch(operation, plan, i, launch)
    return text + "}\n#endif\n\n}  // namespace tconv3d\n"


def _names(operation: Operation, plan: Plan, index: int) -> tuple[str, str]:
    """Names the Config and the kernel function of a launch, numbered if the plan launches the kernel repeatedly."""
    kernels = [launch.kernel for launch in plan.launches]
    kernel = kernels[index]
    number = str(kernels[:index].count(kernel) + 1) if kernels.count(kernel) > 1 else ""
    camel = "".join(word.capitalize() for word in operation.name.split("_"))
    return f"{camel}Config{number}", f"{operation.name}_{kernel}{number}"


def _kernel(operation: Operation, section: Section, index: int) -> str:
    """Writes the Config of a launch, and the kernel that is compiled with it."""
    plan = section.plan
    launch = plan.launches[index]
    config, function = _names(operation, plan, index)
    namespace = launch.kernel
    constants = {
        v.precision: tuple(c for c in plan.launches[index].constants if c[0] not in _ONLY_LAUNCHED)
        for v, plan in section.plans.items()
    }
    given = dict(launch.constants)
    bounds = f"{given['kThreads']}, {given['kMinBlocks']}"
    return (
        f"namespace {namespace} {{\n{_config(config, constants)}}}  // namespace {namespace}\n"
        f"__global__ void __launch_bounds__({bounds})\n"
        f"{function}(const __grid_constant__ {namespace}::Args args) {{\n"
        f"  {namespace}::run<{namespace}::{config}>(args);\n}}\n"
    )


def _config(name: str, by_precision: dict[str, Constants]) -> str:
    """Writes `struct name` with the constants of all precisions; constants that differ stand between #ifs."""
    first = next(iter(by_precision.values()))
    common = [c for c in first if all(c in other for other in by_precision.values())]
    tables = "".join(_table(f"{name}_", key, value) for key, value in common if isinstance(value, tuple))
    text = f"{tables}struct {name} {{\n"
    differing = {p: [c for c in constants if c not in common] for p, constants in by_precision.items()}
    if any(differing.values()):
        for i, (precision, constants) in enumerate(differing.items()):
            text += f"#{'elif' if i else 'if'} defined(FOR_{precision.upper()})\n" + _members(name, constants)
        text += "#endif\n"
    return text + _members(name, common) + "};\n"


def _members(config: str, constants: Iterable[tuple[str, Constant]]) -> str:
    constants = list(constants)
    lines = []
    for key, value in constants:
        if isinstance(value, str):
            lines.append(f"  using {key} = {value.removeprefix('tconv3d::')};\n")
    for type_, kind in (("bool", bool), ("int", int)):
        given = [f"{key} = {str(value).lower()}" for key, value in constants if type(value) is kind]
        wide = [text for text in given if type_ == "int" and abs(int(text.split()[-1])) >= 2**31]
        for name, texts in ((type_, [t for t in given if t not in wide]), ("long long", wide)):
            if texts:
                lines.append(listed(f"  static constexpr {name} ", texts, ";", 6))
    for key, value in constants:
        if isinstance(value, tuple):
            nested = value and isinstance(value[0], tuple)
            index, access = ("int i, int j", "[i][j]") if nested else ("int i", "[i]")
            type_ = _table_type(value)
            lines.append(
                f"  static __device__ constexpr {type_} {key}({index}) {{ return {config}_{key}{access}; }}\n"
            )
    return "".join(lines)


def _table_type(value: Constant) -> str:
    assert isinstance(value, tuple)
    flat = [n for row in value for n in (row if isinstance(row, tuple) else (row,))]
    return "int" if all(-(2**31) < n < 2**31 for n in flat) else "long long"


def _table(prefix: str, key: str, value: Constant) -> str:
    """Writes a table in constant memory that can also be read at compile time."""
    assert isinstance(value, tuple)
    rows = [row for row in value if isinstance(row, tuple)]
    items = ["{" + ", ".join(map(str, row)) + "}" for row in rows] if rows else list(map(str, value or (0,)))
    extent = f"[{len(rows)}][{len(rows[0])}]" if rows else f"[{len(items)}]"
    return listed(f"__constant__ constexpr {_table_type(value)} {prefix}{key}{extent} = {{", items, "};", 4)


def _launch(operation: Operation, plan: Plan, index: int, launch: Launch) -> str:
    """One launch, its arguments by name."""
    _, function = _names(operation, plan, index)
    declared = arguments.declared(launch.kernel)
    if declared is None:
        raise NotExportableError(f"the arguments of {launch.kernel} are not declared (planning/arguments.py)")
    known = {name: name for name in (*operation.operands, *(r.name for r in operation.results), "workspace")}
    known |= {name: f"part(workspace, {start})" for name, start in plan.regions}
    places = [known.get(pointer, "nullptr") for pointer in launch.pointers]
    values = declared.given(places, launch.scalars)
    fields = [piece for name, value in values.items() for piece in _fields(name, value)]
    grid = ", ".join(map(str, launch.grid))
    shared, cluster = launch.shared_bytes, dict(launch.constants).get("kClusterSize", 1)
    return (
        f"  {{\n    const {launch.kernel}::Args args{{\n"
        + listed(" " * 8, fields, "};", 8)
        + f'    launch("{launch.kernel}", {function}, dim3{{{grid}}}, {launch.threads}, {shared}, args, '
        + f"stream{f', {cluster}' if cluster != 1 else ''});\n  }}\n"
    )


def _fields(name: str, value: object) -> list[str]:
    """Writes the initializer of a member in pieces, between which a line may be broken."""
    text = f".{name} = {_value(value)}"
    if not isinstance(value, dict) or len(text) < LINE - 20:
        return [text]
    pieces = [piece for inner, of_it in value.items() for piece in _fields(inner, of_it)]
    return [f".{name} = {{{pieces[0]}", *pieces[1:-1], pieces[-1] + "}"]


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f".{name} = {_value(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value}ll" if isinstance(value, int) and abs(value) >= 2**32 else str(value)


def _comment(text: str) -> str:
    return "".join(f"// {line}\n" for line in textwrap.wrap(text, LINE - 3))


def listed(start: str, items: Sequence[str], end: str, indent: int) -> str:
    """Joins `start`, the items with commas between them, and `end`, in lines of at most `LINE` columns."""
    lines, line = [], start
    for i, item in enumerate(items):
        last = i == len(items) - 1
        piece = item + (end if last else ",")
        if line.strip() and line != start and len(line) + 1 + len(piece) > LINE:
            lines.append(line)
            line = " " * indent + piece
        else:
            line += ("" if line == start else " ") + piece
    return "\n".join([*lines, line]) + "\n"
