"""Writes the CUDA source of an exported file from operations and their plans.

The source holds the needed parts of the kernels' headers, then for every operation the constants and the kernels that
are compiled with them, then the functions that launch the kernels. Where a file has several variants, macros
(`guard`) choose one.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from ...planning import arguments
from ...planning.launch import Constant, Constants, Launch
from ...planning.problem import Plan
from . import comments
from .headers import Headers
from .passes import NotExportableError, Operation, Variant, macro, variants_of
from .program import Declaration, Unit
from .specialise import Part, Settings, specialise
from .tidy import LINE, tidy

Members = dict[str, "Members"]  # the members of a struct by name, each with its own members

SMALL = 48 * 1024  # bytes of shared memory that a block has without asking for more
LAUNCHING = "// ==== Launching "
TOP = """// A kernel is a template over a Config, the constants of this layer; Args are its arguments at run time.
{macros}#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
"""
CHECK = """
inline void check(cudaError_t status, const char* kernel) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(kernel) + ": " + cudaGetErrorString(status));
  }
}
"""
ASK = """  if (shared_bytes > 48 * 1024) {  // more than a kernel has without asking
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), name);
  }
"""
LAUNCH = """
template <class Args>
void launch(const char* name, void (*kernel)(Args), dim3 grid, unsigned threads, int shared_bytes, Args args,
            cudaStream_t stream) {
%s  cudaLaunchConfig_t config{grid, dim3{threads, 1, 1}, static_cast<size_t>(shared_bytes), stream, nullptr, 0};
  check(cudaLaunchKernelEx(&config, kernel, args), name);
}
"""
LAUNCH_CLUSTERS = """
// Launches clusters of blocks along x; the blocks of a cluster see each other's shared memory.
template <class Args>
void launch_clusters(const char* name, void (*kernel)(Args), dim3 grid, unsigned threads, int shared_bytes,
                     Args args, cudaStream_t stream, unsigned cluster) {
%s  cudaLaunchAttribute blocks{};
  blocks.id = cudaLaunchAttributeClusterDimension;
  blocks.val.clusterDim.x = cluster;
  blocks.val.clusterDim.y = blocks.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{grid, dim3{threads, 1, 1}, static_cast<size_t>(shared_bytes), stream, &blocks, 1};
  check(cudaLaunchKernelEx(&config, kernel, args), name);
}
"""
PART = """
// Returns a place in an operation's scratch memory.
inline void* part(void* workspace, long long bytes) { return static_cast<unsigned char*>(workspace) + bytes; }
"""


def cuda_source(operations: Sequence[Operation], kernels: Path | None = None, emulated: bool = False) -> str:
    """The whole source. `emulated`: for the emulator, whose header stands in for inline assembly."""
    settings = _settings(operations)
    parts = specialise(Headers(kernels, emulated, _tails(settings)), settings)
    names = _arguments(parts)
    words = _words(parts)
    trimmed = [_trimmed(operation, words) for operation in operations]
    # A word of Python that checkers of kernels search a file for is no good name of a variable.
    device = _renamed(tidy(_device(parts)), "pass", "round_index")
    every = variants_of(operations)
    rest = "".join(_kernels(operation, words, every) for operation in trimmed) + _host(trimmed, names, every)
    facts = comments.Facts(comments.words_of(device + rest), _values_of_constants(operations))
    device = tidy(comments.only_true(device, facts))
    known = sorted({macro for variant in every for macro in variant.macros}) if len(every) > 1 else []
    macros = _comment(f"Which variant is compiled is said by the macros {', '.join(known)}.") if known else ""
    include = '#include "emulated_ptx_hopper.h"\n' if emulated else ""
    return TOP.format(macros=macros) + include + "\n" + device.strip("\n") + "\n" + rest


def _arguments(parts: Sequence[Part]) -> dict[str, Members]:
    """Returns, for each kernel, the members that its arguments still have, with those of inner structs."""
    structs: dict[str | None, dict[str, Declaration]] = {}
    for part in parts:
        found = {each.name: each for each in _declarations(part) if each.kind == "struct"}
        structs.setdefault(part.kernel, {}).update(found)
    shared = structs.get(None, {})
    return {
        kernel: _struct_members(found["Args"], {**shared, **found})
        for kernel, found in structs.items()
        if kernel is not None and "Args" in found
    }


def _declarations(part: Part) -> list[Declaration]:
    return Unit(part.header, f"namespace tconv3d {{\n{part.text}\n}}").declarations


def _struct_members(struct: Declaration, known: Mapping[str, Declaration]) -> Members:
    result: Members = {}
    for name, (member, *_) in struct.members.items():
        declared = member.core.parent
        assert declared is not None
        inner = known.get(declared.need("type").text)
        result[name] = _struct_members(inner, known) if inner is not None else {}
    return result


def _renamed(text: str, old: str, new: str) -> str:
    """Renames an identifier in code, but not in comments."""
    lines = []
    for line in text.split("\n"):
        code, mark, comment = line.partition("//")
        lines.append(re.sub(rf"\b{old}\b", new, code) + mark + comment)
    return "\n".join(lines)


def _values_of_constants(operations: Sequence[Operation]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for launches in (plan.launches for operation in operations for plan in operation.plans.values()):
        for name, value in (constant for launch in launches for constant in launch.constants):
            if isinstance(value, int):
                found.setdefault(name, set()).add(int(value))
    return found


def _words(parts: Sequence[Part]) -> dict[str, set[str]]:
    """Returns, for each kernel, the names that its specialised source mentions."""
    shared = set().union(*(_mentioned(part.text) for part in parts if part.kernel is None))
    found: dict[str, set[str]] = {}
    for part in parts:
        if part.kernel is not None:
            found.setdefault(part.kernel, set(shared)).update(_mentioned(part.text))
    return found


def _mentioned(text: str) -> set[str]:
    code = re.sub(r"//[^\n]*", "", text)
    return set(re.findall(r"[A-Za-z_]\w*", code)) | set(re.findall(r"::\w+", code))


def _is_read(constant: tuple[str, Constant], words: set[str]) -> bool:
    """Says whether a constant is mentioned; one that names a type must be mentioned as a member of a Config.

    A type that no kernel needs is left out of the source, and then so is its name in a Config: functions that mention
    the member are compiled for other kernels.
    """
    name, value = constant
    if not isinstance(value, str):
        return name in words
    written = value.replace("tconv3d::", "")
    return f"::{name}" in words and (written != IDENTITY or IDENTITY in words)


def _trimmed(operation: Operation, words: Mapping[str, set[str]]) -> Operation:
    """Returns the operation without the constants that its specialised kernels do not read."""

    def trim(launch: Launch) -> Launch:
        kept = tuple(c for c in launch.constants if _is_read(c, words[launch.kernel]) or c[0] in _BOUNDS)
        return replace(launch, constants=kept)

    plans = {v: replace(plan, launches=tuple(map(trim, plan.launches))) for v, plan in operation.plans.items()}
    return replace(operation, plans=plans)


IDENTITY = "Identity"  # the epilogue of passes without one
# Constants that are used to launch a kernel, and perhaps never inside it.
_BOUNDS = ("kThreads", "kMinBlocks", "kClusterSize", arguments.TAIL)


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


def _tails(settings: Settings) -> dict[str, Constants]:
    """Returns, for each kernel with operands of a tail, the constant with the most whole tensors."""
    found: dict[str, Constants] = {}
    for kernel, several in settings.items():
        given = [value for constants in several for name, value in constants if name == arguments.TAIL]
        if given:
            found[kernel] = ((arguments.TAIL, max(value for value in given if isinstance(value, int))),)
    return found


def _device(parts: Sequence[Part]) -> str:
    """Writes the headers' parts, with one namespace for neighbours that are in the same."""
    text = ""
    for (kernel, namespace), group in groupby(parts, key=lambda part: (part.kernel, part.namespace)):
        full = f"{namespace}::{kernel}" if kernel else namespace
        bodies = [_explained(part) for part in group]
        rule = f"// ==== The kernel {kernel} " + "=" * (LINE - len(kernel) - 24) + "\n\n" if kernel else ""
        text += f"\n{rule}namespace {full} {{\n\n" + "\n\n".join(bodies) + f"\n\n}}  // namespace {full}\n"
    return text


def _explained(part: Part) -> str:
    """Returns a header's text below the header's comment, which explains the only declaration if there is one."""
    alone = len(_declarations(part)) == 1 and not part.text.startswith("//")
    return f"{part.comment}{chr(10) if alone else chr(10) * 2}{part.text}" if part.comment else part.text


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
    """Returns the preprocessor condition that one of the chosen variants is compiled; empty if it always holds."""
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
    for chosen, of in ((gpus, "gpu"), (precisions, "precision"), (layouts, "layout")):
        if set(chosen) != {getattr(v, of) for v in every}:
            named = " || ".join(f"defined({macro(name)})" for name in sorted(chosen))
            parts.append(f"({named})" if len(chosen) > 1 else named)
    text = " && ".join(parts)
    return text if len(text) <= LINE else " && \\\n    ".join(parts)


# ---- operations


def guarded(text: str, chosen: Iterable[Variant], every: Sequence[Variant]) -> str:
    """Returns a text that is compiled for the chosen variants of a file only."""
    condition = guard(chosen, every)
    return f"\n#if {condition}\n{text}#endif\n" if condition else f"\n{text}"


def _kernels(operation: Operation, words: Mapping[str, set[str]], every: Sequence[Variant]) -> str:
    """Writes the kernels of an operation with their constants, for every variant."""
    title = operation.name.replace("_", " ").capitalize()
    text = f"\n// ==== {title} " + "=" * (LINE - len(title) - 12) + "\n"
    for section in sections(operation):
        plan = section.plan
        own = ""
        if len(every) > 1:
            own += _comment(f"For {'; '.join(str(v) for v in section.plans)}.")
        own += _comment(described(plan)) + "namespace tconv3d {\n\n"
        own += "\n".join(_kernel(operation, section, i, words) for i in range(len(plan.launches)))
        text += guarded(own + "\n}  // namespace tconv3d\n", section.plans, every)
    return text


def described(plan: Plan) -> str:
    """Says in a sentence which kernel runs, why, and how it divides the work."""
    return f"{plan.kernel} ({plan.why})" + (f": {plan.tile}" if plan.tile else "") + "."


def parameters(operation: Operation) -> list[str]:
    """Returns the parameters of the C++ function that launches an operation's kernels."""
    inputs = [f"const void* {name}" for name in operation.operands]
    outputs = [f"void* {result.name}" for result in operation.results]
    return [*inputs, *outputs, *(["void* workspace"] if operation.has_workspace else []), "cudaStream_t stream"]


def _host(operations: Sequence[Operation], names: Mapping[str, Members], every: Sequence[Variant]) -> str:
    """Writes what launches the kernels, with no more than these launches need."""
    launches = [each for o in operations for plan in o.plans.values() for each in plan.launches]
    clusters = [cluster_of(each) for each in launches]
    text = f"\n{LAUNCHING}" + "=" * (LINE - len(LAUNCHING) - 3) + "\n\nnamespace tconv3d {\n" + CHECK
    for template, chosen in ((LAUNCH, [c == 1 for c in clusters]), (LAUNCH_CLUSTERS, [c > 1 for c in clusters])):
        own = [each for each, takes in zip(launches, chosen, strict=True) if takes]
        text += template % (ASK if any(each.shared_bytes > SMALL for each in own) else "") if own else ""
    functions = "".join(_functions(operation, names, every) for operation in operations)
    return text + (PART if "part(workspace" in functions else "") + functions + "\n}  // namespace tconv3d\n"


def _functions(operation: Operation, names: Mapping[str, Members], every: Sequence[Variant]) -> str:
    text = ""
    for section in sections(operation):
        plan, start = section.plan, f"void launch_{operation.name}("
        own = ""
        if operation.has_workspace:
            own += f"long long {operation.name}_workspace() {{ return {plan.workspace_bytes}; }}\n"
        own += listed(start, parameters(operation), ") {", len(start))
        launches = [_launch(operation, plan, i, names) for i in range(len(plan.launches))]
        own += launches[0] if len(launches) == 1 else "".join(f"  {{\n{each}  }}\n" for each in launches)
        text += guarded(own + "}\n", section.plans, every)
    return text


def cluster_of(launch: Launch) -> int:
    found = dict(launch.constants).get("kClusterSize", 1)
    assert isinstance(found, int)
    return found


def _names(operation: Operation, plan: Plan, index: int) -> tuple[str, str]:
    """Names the Config and the kernel function of a launch, numbered if the plan launches the kernel repeatedly."""
    kernels = [launch.kernel for launch in plan.launches]
    kernel = kernels[index]
    number = str(kernels[:index].count(kernel) + 1) if kernels.count(kernel) > 1 else ""
    camel = "".join(word.capitalize() for word in operation.name.split("_"))
    return f"{camel}Config{number}", f"{operation.name}_{kernel}{number}"


def _kernel(operation: Operation, section: Section, index: int, words: Mapping[str, set[str]]) -> str:
    """Writes the Config of a launch, and the kernel that is compiled with it."""
    plan = section.plan
    launch = plan.launches[index]
    config, function = _names(operation, plan, index)
    namespace = launch.kernel
    constants = {
        v.precision: tuple(c for c in plan.launches[index].constants if _is_read(c, words[launch.kernel]))
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
            lines.append(listed(f"  using {key} = ", value.replace("tconv3d::", "").split(", "), ";", 6))
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


def _launch(operation: Operation, plan: Plan, index: int, names: Mapping[str, Members]) -> str:
    """Writes one launch, with the arguments that the kernel has by name."""
    launch = plan.launches[index]
    _, function = _names(operation, plan, index)
    declared = arguments.declared(launch.kernel, launch.constants)
    if declared is None:
        raise NotExportableError(f"the arguments of {launch.kernel} are not declared (planning/arguments.py)")
    known = {name: name for name in (*operation.operands, *(r.name for r in operation.results), "workspace")}
    known |= {name: f"part(workspace, {start})" for name, start in plan.regions}
    places = [known.get(pointer, "nullptr") for pointer in launch.pointers]
    values = declared.given(places, launch.scalars)
    members = {name: inner for name, inner in names[launch.kernel].items() if name in values}
    fields = [piece for name, inner in members.items() for piece in _fields(name, values[name], inner)]
    grid = ", ".join(map(str, launch.grid))
    cluster = cluster_of(launch)
    given = [f'"{launch.kernel}"', function, f"dim3{{{grid}}}", str(launch.threads), str(launch.shared_bytes)]
    given += ["args", "stream", *([str(cluster)] if cluster > 1 else [])]
    columns = 2 if len(plan.launches) == 1 else 4  # several launches are in blocks of their own
    start = " " * columns + ("launch_clusters(" if cluster > 1 else "launch(")
    call = listed(start, given, ");", len(start))
    declared_as = f"{' ' * columns}const {launch.kernel}::Args args{{\n"
    return declared_as + listed(" " * (columns + 4), fields, "};", columns + 4) + call


def _fields(name: str, value: object, members: Members) -> list[str]:
    """Writes the initializer of a member in pieces, between which a line may be broken."""
    text = f".{name} = {_value(value, members)}"
    if not isinstance(value, dict) or len(text) < LINE - 20:
        return [text]
    pieces = [piece for inner, below in members.items() for piece in _fields(inner, value[inner], below)]
    return [f".{name} = {{{pieces[0]}", *pieces[1:-1], pieces[-1] + "}"]


def _value(value: object, members: Members) -> str:
    if isinstance(value, dict):
        inner = (f".{name} = {_value(value[name], below)}" for name, below in members.items())
        return "{" + ", ".join(inner) + "}"
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
