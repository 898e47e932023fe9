"""Finds what follows the convolution of a traced model, as a function of the convolution's result.

This module knows graphs of torch.fx, not kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

PLAIN = (bool, int, float, str, tuple, type(None))  # types of settings that are written into a file
# Modules that compute something else in evaluation than in training.
MODAL = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd, nn.RReLU)


@dataclass(frozen=True)
class Following:
    """Describes the nodes behind a convolution, and the other tensors that they use."""

    traced: fx.GraphModule
    convolution: fx.Node
    nodes: tuple[fx.Node, ...]  # nodes that depend on the convolution, in order
    extra: tuple[fx.Node, ...]  # tensors that are passed or computed before, which these nodes use
    result: fx.Node

    def model(self, dtype: torch.dtype) -> fx.GraphModule:
        """Returns the traced model with parameters and buffers of a type."""
        return copy.deepcopy(self.traced).to(dtype)

    def function(self, model: fx.GraphModule) -> Callable[..., Any]:
        """Returns what follows as a function of the convolution's result and of `extra`."""
        modules = dict(model.named_modules())

        def tail(z: Tensor, *extra: Any) -> Any:
            env: dict[fx.Node, Any] = {self.convolution: z, **dict(zip(self.extra, extra, strict=True))}

            def value(node: fx.Node) -> Any:
                if node.op == "get_attr" and node not in env:
                    env[node] = attribute(model, str(node.target))
                return env[node]

            for node in self.nodes:
                args, options = fx.node.map_arg((node.args, node.kwargs), value)
                target: Any = node.target
                if node.op == "call_module":
                    target = modules[target]
                elif node.op == "call_method":
                    target = getattr(args[0], target)
                    args = args[1:]
                env[node] = target(*args, **options)
            return env[self.result]

        return tail

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The settings of the modules that follow, by the path of the module."""
        modules = dict(self.traced.named_modules())
        paths = dict.fromkeys(str(node.target) for node in self.nodes if node.op == "call_module")
        found = {path: plain_settings(modules[path]) for path in paths}
        return {path: settings for path, settings in found.items() if settings}


def find(traced: fx.GraphModule, convolution: fx.Node) -> Following | str:
    """Returns what follows a convolution up to the model's result, or why it cannot be told."""
    after = behind(traced, convolution)
    output = next(node for node in traced.graph.nodes if node.op == "output")
    result = output.args[0]
    if not isinstance(result, fx.Node) or result not in after:
        return "the model does not return one tensor that follows from the convolution"
    inputs = dict.fromkeys(each for node in after for each in node.all_input_nodes)
    extra = [each for each in inputs if each not in after and each.op != "get_attr" and each is not convolution]
    if any("tensor_meta" not in each.meta or not hasattr(each.meta["tensor_meta"], "shape") for each in extra):
        return "what follows uses a value from before the convolution that is no tensor"
    return Following(traced, convolution, tuple(after), tuple(extra), result)


def behind(traced: fx.GraphModule, convolution: fx.Node) -> dict[fx.Node, None]:
    """Returns the nodes that depend on a convolution, or come after it and depend on parameters alone, in order."""
    found: dict[fx.Node, None] = {}
    given: set[fx.Node] = set()  # nodes that depend on the model's inputs
    passed = False
    for node in traced.graph.nodes:
        inputs = node.all_input_nodes
        passed = passed or node is convolution
        if node.op == "placeholder" or any(each in given for each in inputs):
            given.add(node)
        if node.op in ("output", "get_attr") or node is convolution:
            continue
        if any(each is convolution or each in found for each in inputs) or (passed and node not in given):
            found[node] = None
    return found


def attribute(model: nn.Module, path: str) -> Any:
    """Returns a parameter, buffer or attribute by its path."""
    found: Any = model
    for name in path.split("."):
        found = getattr(found, name)
    return found


def plain_settings(module: nn.Module) -> dict[str, Any]:
    """Returns the numbers, words and tuples that a module has as attributes, and its mode if that matters."""
    found = {
        name: tuple(value) if isinstance(value, tuple) else value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training" and isinstance(value, PLAIN)
    }
    return {**found, "training": module.training} if isinstance(module, MODAL) else found


def paths_of(model: nn.Module, tensors: Sequence[Tensor]) -> dict[int, str] | None:
    """Returns the paths of tensors in a model, by their identity; None if one of them is not in the model."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    known = {id(tensor): path for path, tensor in reversed(named)}
    if any(id(tensor) not in known for tensor in tensors):
        return None
    return {id(tensor): known[id(tensor)] for tensor in tensors}
