"""Declares the operators to PyTorch: their names and arguments, without implementations.

A saved program (torch.export, AOTInductor) names the operators it calls. In a process that has not imported this
package, PyTorch would not know them, and would say only that it found no such operator. Therefore the package's entry
point in the group `torch.backends`, which `import torch` calls, declares them (`announce`) and gives each an
implementation that raises an error: it says to import this package. That takes a millisecond, because the entry point
(`tconv3d_autoload`) loads this file alone. Importing the package replaces these implementations.

This module must not import any other module of the package, nor anything but PyTorch that takes time to import.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch

NAMESPACE = "tconv3d"
ANNOUNCED = "tconv3d_announced_operators"  # name of this module when the entry point has loaded it by its path

SETTINGS = "int[3] stride, int[3] padding, int[3] output_padding, int groups, int[3] dilation"
_OPERANDS = "Tensor input, Tensor weight, Tensor? bias"
_NORM = "Tensor? norm_weight, Tensor? norm_bias"
_CHAIN = f"{_OPERANDS}, Tensor[] tensors, SymInt[] numbers, str program"
SCHEMAS = (
    f"conv_transpose3d({_OPERANDS}, {SETTINGS}) -> Tensor",
    f"conv_transpose3d_input_grad(Tensor grad_output, Tensor weight, SymInt[3] input_size, {SETTINGS}) -> Tensor",
    f"conv_transpose3d_weight_grad(Tensor grad_output, Tensor input, SymInt[3] kernel, {SETTINGS}) -> Tensor",
    "conv_transpose3d_bias_grad(Tensor grad_output) -> Tensor",
    f"conv_transpose3d_relu({_OPERANDS}, {SETTINGS}) -> Tensor",
    f"conv_transpose3d_relu_group_norm({_OPERANDS}, {_NORM}, int num_groups, float eps, ScalarType dtype, "
    f"{SETTINGS}) -> Tensor",
    # conv_transpose3d_relu_statistics and normalize are the two steps of conv_transpose3d_relu_group_norm. Statistics
    # are means and reciprocal standard deviations, [2, N, groups].
    f"conv_transpose3d_relu_statistics({_OPERANDS}, int num_groups, float eps, {SETTINGS}) -> (Tensor, Tensor)",
    f"normalize(Tensor input, Tensor statistics, {_NORM}, ScalarType dtype) -> Tensor",
    # relu_group_norm_grad returns the gradients of the ReLU's input, of norm_weight and norm_bias as one tensor
    # [2, C], and of the convolution's bias [C].
    "relu_group_norm_grad(Tensor grad_output, Tensor input, Tensor statistics, Tensor? norm_weight, "
    "ScalarType parameters, bool[3] wanted) -> (Tensor, Tensor, Tensor)",
    # chain computes a convolution and its tail, which `program` writes as text (tails/programs.py) and which takes
    # `tensors` and `numbers`. It returns the result, and new values of the tensors that the tail writes to.
    # chain_recorded also returns what chain_grad takes: the convolution's result, and sums [slots, N*C]. chain_grad
    # returns the gradients of the convolution's result and of the needed tensors.
    f"chain({_CHAIN}, {SETTINGS}) -> Tensor[]",
    f"chain_recorded({_CHAIN}, bool[] needed, int slots, {SETTINGS}) -> Tensor[]",
    f"chain_grad(Tensor grad_output, Tensor result, Tensor sums, {_CHAIN}, bool[] needed, {SETTINGS}) -> Tensor[]",
)
MESSAGE = (
    "this program calls an operator of tconv3d, which this process has not imported: `import tconv3d` before the "
    "program is called"
)

_declared: torch.library.Library | None = None
_announced: torch.library.Library | None = None


def declare() -> torch.library.Library:
    """Declares all operators at the first call, and returns the library that further operators may be added to."""
    global _declared
    if _declared is None:
        _declared = torch.library.Library(NAMESPACE, "DEF")
        for schema in SCHEMAS:
            _declared.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    return _declared


def announce() -> None:
    """Declares all operators, with implementations that say to import the package."""
    global _announced
    declare()
    _announced = torch.library.Library(NAMESPACE, "IMPL")
    for schema in SCHEMAS:
        _announced.impl(schema.partition("(")[0], _refuse, "CompositeExplicitAutograd")


def library() -> torch.library.Library:
    """Returns the library for the implementations: the announced one, without what it says, or a new one."""
    module: Any = sys.modules.get(ANNOUNCED)
    if module is None:
        return declare()
    found: torch.library.Library = module.withdraw()
    return found


def withdraw() -> torch.library.Library:
    """Removes the implementations of `announce`, and returns the library with the declarations."""
    global _announced
    if _announced is not None:
        _announced._destroy()
        _announced = None
    return declare()


def _refuse(*arguments: Any) -> NoReturn:
    raise RuntimeError(MESSAGE)
