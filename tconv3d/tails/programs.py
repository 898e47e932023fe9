"""Writes the tail of a chain as text, and reads it again.

A compiled graph names the tail of a chain by its text, which an operator takes as an argument. PyTorch keeps compiled
graphs on disk, and another process that loads one needs nothing but the text. Only functions and methods that tails
can hold are written. This module knows graphs of PyTorch's Python API, no kernels.
"""

from __future__ import annotations

import builtins
import json
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

SPACES: dict[str, Any] = {
    "torch": torch,
    "functional": F,
    "nn": torch._C._nn,
    "operator": operator,
    "special": torch.special,
    "builtins": builtins,
}
MOST_PROGRAMS = 512  # programs that are kept after they were read


class CannotWrite(ValueError):
    """Says why a tail has no text."""


@dataclass(frozen=True)
class Program:
    """Holds a tail: a function of the convolution's result, then of tensors and integers in the order of `kinds`."""

    graph: fx.GraphModule
    kinds: tuple[str, ...]  # "tensor" or "int" for every argument behind the convolution's result
    steady: frozenset[int]  # places of tensors that are mostly the same in all calls
    written: tuple[int, ...]  # places of tensors that the tail writes to
    autocast: torch.dtype | None  # the type of autocast, under which the tail runs

    def arguments(self, tensors: list[Any], numbers: list[Any]) -> list[Any]:
        """Returns the arguments behind the convolution's result."""
        rest = {"tensor": iter(tensors), "int": iter(numbers)}
        return [next(rest[kind]) for kind in self.kinds]


def write(
    graph: fx.Graph,
    kinds: tuple[str, ...],
    steady: frozenset[int],
    written: tuple[int, ...],
    autocast: torch.dtype | None,
) -> str:
    """Returns a tail as text; raises `CannotWrite` if it calls something that has no name."""
    names: dict[fx.Node, int] = {}
    lines: list[Any] = []
    for node in graph.nodes:
        names[node] = len(names)
        if node.op == "call_method":
            lines.append(["method", str(node.target), _encoded(node.args, names), _encoded(node.kwargs, names)])
        elif node.op == "call_function":
            lines.append(["call", _name(node.target), _encoded(node.args, names), _encoded(node.kwargs, names)])
        elif node.op == "output":
            lines.append(["output", "", _encoded(node.args, names), {}])
        elif node.op != "placeholder":
            raise CannotWrite(f"{node.op} {node.target} has no text")
    said = {
        "kinds": kinds,
        "steady": sorted(steady),
        "written": written,
        "autocast": None if autocast is None else _encoded(autocast, names),
        "nodes": lines,
    }
    return json.dumps(said, separators=(",", ":"))


@lru_cache(MOST_PROGRAMS)
def read(text: str) -> Program:
    """Returns the tail that `write` has written."""
    said = json.loads(text)
    graph = fx.Graph()
    nodes = [graph.placeholder("z")]
    nodes += [graph.placeholder(f"passed_{place}") for place in range(len(said["kinds"]))]
    for op, name, args, options in said["nodes"]:
        given, named = _decoded(args, nodes), _decoded(options, nodes)
        if op == "output":
            graph.output(given[0])
        elif op == "method":
            nodes.append(graph.call_method(name, given, named))
        else:
            nodes.append(graph.call_function(_function(name), given, named))
    return Program(
        fx.GraphModule(torch.nn.Module(), graph),
        tuple(said["kinds"]),
        frozenset(said["steady"]),
        tuple(said["written"]),
        None if said["autocast"] is None else _decoded(said["autocast"], nodes),
    )


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "")
    for space, module in SPACES.items():
        if getattr(module, name, None) is function:
            return f"{space}.{name}"
    raise CannotWrite(f"{name or function} has no text")


def _function(name: str) -> Callable[..., Any]:
    space, _, function = name.partition(".")
    found: Callable[..., Any] = getattr(SPACES[space], function)
    return found


def _encoded(value: Any, names: dict[fx.Node, int]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, fx.Node):
        return {"node": names[value]}
    if isinstance(value, (tuple, list)):
        return {
            type(value).__name__ if type(value) in (tuple, list) else "tuple": [_encoded(v, names) for v in value]
        }
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": [[key, _encoded(each, names)] for key, each in value.items()]}
    if isinstance(value, slice):
        return {"slice": [_encoded(each, names) for each in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"ellipsis": 0}
    if isinstance(value, (torch.dtype, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    raise CannotWrite(f"a constant of type {type(value).__name__} has no text")


def _decoded(value: Any, nodes: list[fx.Node]) -> Any:
    if not isinstance(value, dict):
        return value
    if not value:
        return {}
    ((kind, said),) = value.items()
    if kind == "node":
        return nodes[said]
    if kind == "torch":
        return getattr(torch, said)
    if kind == "ellipsis":
        return Ellipsis
    if kind == "dict":
        return {key: _decoded(each, nodes) for key, each in said}
    parts = [_decoded(each, nodes) for each in said]
    return slice(*parts) if kind == "slice" else tuple(parts) if kind == "tuple" else parts
