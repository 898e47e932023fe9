"""Counts floating-point operations of this library's operators as PyTorch does: `FlopCounterMode` and the profiler.

The counts are PyTorch's own for the convolution of each operator. ReLU, GroupNorm, tails and bias gradients count
nothing, as in PyTorch. This module knows operators by name and shape, and nothing of how they are computed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.autograd import profiler_util

Shape = Sequence[int]
_COUNTER = "torch.utils.flop_counter"
BACKWARD = "conv_transpose3d_backward"  # no operator: the profiler's name for gradients that are computed together


# ---- one function for each operator, given the shapes of tensors and the other arguments as they are


def _forward(input: Shape, weight: Shape, *_: Any, out_shape: Any = None) -> int:
    from torch.utils.flop_counter import conv_flop_count

    return conv_flop_count(list(input), list(weight), [], transposed=True)


def _input_grad(grad: Shape, weight: Shape, input_size: Shape, *settings: Any, out_shape: Any = None) -> int:
    input = [grad[0], weight[0], *input_size]
    return _backward(grad, input, weight, (True, False, False), *settings)


def _weight_grad(grad: Shape, input: Shape, kernel: Shape, *settings: Any, out_shape: Any = None) -> int:
    weight = [input[1], grad[1] // settings[3], *kernel]
    return _backward(grad, input, weight, (False, True, False), *settings)


def _backward(
    grad: Shape, input: Shape, weight: Shape, wanted: Sequence[bool], *settings: Any, out_shape: Any = None
) -> int:
    from torch.utils.flop_counter import conv_backward_flop

    stride, padding, output_padding, groups, dilation = settings
    convolution = stride, padding, dilation, True, output_padding, groups
    shapes = [list(shape) for shape in (grad, input, weight)]
    formula: Callable[..., int] = conv_backward_flop
    return formula(*shapes, None, *convolution, wanted, out_val=(shapes[1], shapes[2], None))


_FORMULAS: dict[str, Callable[..., int]] = {
    "conv_transpose3d": _forward,
    "conv_transpose3d_relu": _forward,
    "conv_transpose3d_relu_group_norm": _forward,
    "conv_transpose3d_relu_statistics": _forward,
    "conv_transpose3d_input_grad": _input_grad,
    "conv_transpose3d_weight_grad": _weight_grad,
    "chain": _forward,
    "chain_recorded": _forward,
}


# ---- FlopCounterMode


def register() -> None:
    """Registers the operators with `FlopCounterMode` and the profiler."""
    when_imported(_COUNTER, _register_formulas)
    _count_in_profiles()


def _register_formulas(counter: ModuleType) -> None:
    for name, formula in _FORMULAS.items():
        counter.register_flop_formula(getattr(torch.ops.tconv3d, name))(formula)


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Calls a function with a module now if the module is imported, else as soon as it is.

    PyTorch's counter imports Triton, which takes long, and few programs count.
    """
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder:
    """Finds one module as Python would without it, once, and calls a function after the module has run."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self.then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# ---- the profiler, with `with_flops=True`


def _count_in_profiles() -> None:
    """Makes profiles count this library's operators.

    PyTorch's profiler counts a fixed list of its own operators, in C++, and has no registry. So the count is added
    when a profile's events are put in order, from the shapes that the profiler has recorded.
    """
    build_tree = profiler_util.EventList._build_tree

    def build_and_count(events: Any) -> None:
        build_tree(events)
        if events._with_flops:
            for event in events:
                _count(event)

    profiler_util.EventList._build_tree = build_and_count  # type: ignore[method-assign]


def _count(event: Any) -> None:
    """Sets the count of an event of this library, unless the event is a step of another one that is counted."""
    shapes, values = event.input_shapes, event.concrete_inputs  # the shapes of tensors, the values of other arguments
    if not _is_ours(event) or not shapes or len(shapes) != len(values):
        return
    outer = event.cpu_parent
    while outer is not None and not _is_ours(outer):
        outer = outer.cpu_parent
    if outer is None:
        formula = {**_FORMULAS, BACKWARD: _backward}[event.name.removeprefix("tconv3d::")]
        event.flops = formula(*(shape or value for shape, value in zip(shapes, values, strict=True)))


def _is_ours(event: Any) -> bool:
    name: str = event.name.removeprefix("tconv3d::")
    return name != event.name and (name in _FORMULAS or name == BACKWARD)
