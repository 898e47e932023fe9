"""Writes the C++ source of an exported file: functions on tensors, on the caller's device and stream."""

from __future__ import annotations

from collections.abc import Sequence

from .cuda_source import guarded, listed, parameters
from .passes import Operation, Result, Variant, variants_of

TOP = """#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
{more}#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

namespace tconv3d {  // in the CUDA source

"""
BOTH_FORMATS = """#ifdef FOR_CHANNELS_LAST_3D
constexpr auto kFormat = at::MemoryFormat::ChannelsLast3d;
#else
constexpr auto kFormat = at::MemoryFormat::Contiguous;
#endif
"""
FORMATS = {"contiguous": "Contiguous", "channels_last_3d": "ChannelsLast3d"}
KINDS = {"float16": "kHalf", "bfloat16": "kBFloat16", "float32": "kFloat", "float64": "kDouble", "int64": "kLong"}
SCRATCH = """
// Returns memory that an operation needs only while it runs; the next one on the stream may have it.
at::Tensor scratch(long long bytes, const at::Tensor& like) {
  return at::empty({bytes}, like.options().dtype(at::kByte));
}
"""


def host_source(operations: Sequence[Operation]) -> str:
    strided = any(result.strides for operation in operations for result in operation.results)
    text = TOP.replace("{more}", "#include <ATen/ops/empty_strided.h>\n" if strided else "")
    every = variants_of(operations)
    declared: dict[str, list[Variant]] = {}
    for operation in operations:
        for line in _declarations(operation):
            declared.setdefault(line, []).extend(operation.plans)
    for line, variants in declared.items():
        text += guarded(line, variants, every).removeprefix("\n")
    layouts = {variant.layout for variant in every}
    one = f"constexpr auto kFormat = at::MemoryFormat::{FORMATS[next(iter(layouts))]};\n"
    text += "\n}  // namespace tconv3d\n"
    if any(result.volume for operation in operations for result in operation.results):
        text += "\n" + (BOTH_FORMATS if len(layouts) > 1 else one)
    text += SCRATCH if any(operation.has_workspace for operation in operations) else ""
    return text + "".join(guarded(_functions(each).removeprefix("\n"), each.plans, every) for each in operations)


def _declarations(operation: Operation) -> list[str]:
    """Declares what launches the kernels of an operation, and the size of its scratch memory if it needs any."""
    start = f"void launch_{operation.name}("
    size = [f"long long {operation.name}_workspace();\n"] if operation.has_workspace else []
    return [*size, listed(start, parameters(operation), ");", len(start))]


def function_names(operations: Sequence[Operation]) -> list[str]:
    """Returns the names of the functions that Python calls."""
    return list(dict.fromkeys(name for operation in operations for name in _names(operation)))


def _names(operation: Operation) -> list[str]:
    over = operation.in_place or operation.only_in_place
    return [*([] if operation.only_in_place else [operation.name]), *([f"{operation.name}_"] if over else [])]


def _functions(operation: Operation) -> str:
    """Writes the function of an operation and, if it may run in place, also `name_`, which overwrites operand 0."""
    return "".join(_function(operation, over=name.endswith("_")) for name in _names(operation))


def _function(operation: Operation, over: bool = False) -> str:
    first = operation.operands[0]
    results = [first] if over else [result.name for result in operation.results]
    kind = "at::Tensor" if len(results) == 1 else f"std::tuple<{', '.join(['at::Tensor'] * len(results))}>"
    start = f"{kind} {operation.name}{'_' if over else ''}("
    tensors = [f"const at::Tensor& {name}" for name in operation.operands]
    scratch = ("workspace",) if operation.has_workspace else ()
    addresses = [f"{name}.data_ptr()" for name in (*operation.operands, *results, *scratch)]
    call = f"  tconv3d::launch_{operation.name}("
    found = results[0] if len(results) == 1 else f"{{{', '.join(results)}}}"
    return (
        "\n"
        + listed(start, tensors, ") {", len(start))
        + f"  const c10::cuda::CUDAGuard guard({first}.device());\n"
        + ("" if over else "".join(_allocation(result, first) for result in operation.results))
        + (
            f"  const at::Tensor workspace = scratch(tconv3d::{operation.name}_workspace(), {first});\n"
            if scratch
            else ""
        )
        + listed(call, [*addresses, "c10::cuda::getCurrentCUDAStream()"], ");", len(call))
        + f"  return {found};\n}}\n"
    )


def _allocation(result: Result, like: str) -> str:
    shape = ", ".join(map(str, result.shape))
    dtype = f".dtype(at::{KINDS[result.dtype]})" if result.dtype else ""
    if result.strides:
        strides = ", ".join(map(str, result.strides))
        start = f"  at::Tensor {result.name} = at::empty_strided("
        return listed(start, [f"{{{shape}}}", f"{{{strides}}}", f"{like}.options(){dtype}"], ");", len(start))
    volume = ".memory_format(kFormat)" if result.volume else ""
    return f"  at::Tensor {result.name} = at::empty({{{shape}}}, {like}.options(){dtype}{volume});\n"
