"""Makes a convolution and what follows it the operations of a file, and the lines of Python that call them.

The library divides what follows into an epilogue and passes (`tails/`); `recording` writes down what it launches.
Where the library has passes for the gradients of a tail, the file has them too; otherwise PyTorch differentiates the
written tail, behind the convolution's own gradient kernels.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...planning.planner import Refused
from ...tails import algebra
from ...tails.lowering import NUMBERS
from ...tails.recording import Differentiable
from ...tails.running import Prepared
from ...tails.stages import stages
from ...tails.tracing import CannotTrace, trace
from ...torch_ops import checks
from ...torch_ops.checks import Convolution
from ...torch_ops.pytorch_ops import result_strides
from ..bench.layers import Layer
from . import passes
from .following import Following, paths_of
from .passes import STRIDES, NotExportableError, Operation, Variant
from .recorded_text import Writer, divided
from .recording import Operations, Recording, Ref


@dataclass
class Chain:
    """Holds a convolution with what follows it, ready to be written."""

    names: list[str]  # the tensors that the file's function takes: x, weight, bias, then others
    paths: dict[str, str]  # the paths of those that are parameters or buffers behind the convolution
    shapes: dict[str, tuple[int, ...]]  # the shapes of all but x, weight and bias
    operations: list[Operation]
    aligned: list[str]  # tensors that kernels read besides x, weight and bias
    counted: list[str]  # tensors of whole numbers
    branches: list[Branch]
    left: tuple[str, ...]  # operators that PyTorch computes behind the passes
    moved: str  # what moved into the weight

    @property
    def trains(self) -> bool:
        """Says whether the file has kernels for the gradients of what follows the convolution."""
        return all(branch.training is not None for branch in self.branches)


@dataclass
class Branch:
    """Holds the lines of a call for some of the types and layouts that the file holds."""

    chosen: list[tuple[str, str]]  # types with their layouts
    constants: Constants | None
    inferred: list[str]  # lines without gradients
    training: Training | None


@dataclass
class Constants:
    """Holds the lines that compute what depends on parameters alone."""

    lines: list[str]
    names: list[str]  # the parameters that they take
    results: list[str]


@dataclass
class Training:
    """Holds the lines of a call with gradients, and of its gradients."""

    forward: list[str]
    result: str
    saved: dict[str, str]  # what the gradients need, besides x, weight and the parameters, by its name in `backward`
    backward: list[str]  # takes these, and the gradient dy of the result
    volume: bool  # the result has five dimensions
    dz: str  # the gradient of z
    gradients: dict[str, str]  # the gradients of parameters, by name
    used: list[str]  # parameters that the gradients need


def chain(layer: Layer, following: Following, variants: Sequence[Variant], forward_only: bool) -> Chain | str:
    """Returns a convolution with what follows it, or why it is left to PyTorch."""
    try:
        found = {each: _Maker(layer, following, each).make(not forward_only) for each in variants}
        if len({each.trains for each in found.values()}) > 1:  # one variant has no kernels for gradients
            found = {each: _Maker(layer, following, each).make(trains=False) for each in variants}
        return _merged(found)
    except CannotTrace as error:
        return f"what follows cannot be traced: {error}"
    except Refused as error:
        return f"no kernel has this epilogue: {error}"
    except NotExportableError as error:
        return str(error)


def operations(chain: Chain, layer: Layer, variants: Sequence[Variant], forward_only: bool) -> list[Operation]:
    """Returns the operations of a file with a chain: the chain's own, and those of the convolution's gradients."""
    if forward_only:
        return chain.operations
    forward, *gradients = passes.operations(layer, variants)
    known = {variant for each in chain.operations if each.name == "forward" for variant in each.plans}
    plans = {variant: plan for variant, plan in forward.plans.items() if variant not in known}
    plain = [replace(forward, plans=plans)] if plans and not chain.trains else []
    return [*chain.operations, *plain, *gradients]


def _merged(found: Mapping[Variant, Chain]) -> Chain:
    """Returns one chain for all variants, whose lines branch where types or layouts have different ones."""
    first = next(iter(found.values()))
    called = [{each.name for each in chain.operations} for chain in found.values()]
    tensors = [(chain.names, chain.shapes, chain.moved) for chain in found.values()]
    branches: list[Branch] = []
    for chain in found.values():
        (own,) = chain.branches
        same = next((each for each in branches if replace(each, chosen=own.chosen) == own), None)
        if same is None:
            branches.append(own)
        else:
            same.chosen += [each for each in own.chosen if each not in same.chosen]
    chosen = [each for branch in branches for each in branch.chosen]
    if (
        len(set(chosen)) < len(chosen)
        or any(each != called[0] for each in called)
        or tensors != tensors[:1] * len(tensors)
    ):
        raise NotExportableError("the file's types, layouts and GPUs take different kernels: export one at a time")
    aligned = list(dict.fromkeys(name for chain in found.values() for name in chain.aligned))
    left = tuple(dict.fromkeys(name for chain in found.values() for name in chain.left))
    made = _one_for_all([chain.operations for chain in found.values()])
    return replace(first, operations=made, aligned=aligned, left=left, branches=branches)


def _one_for_all(found: Sequence[Sequence[Operation]]) -> list[Operation]:
    """Returns the operations of all variants; those that differ in their plans only are one."""
    merged: dict[tuple[Any, ...], Operation] = {}
    for name in (each.name for each in found[0]):
        every = [each for operations in found for each in operations if each.name == name]
        over = any(each.only_in_place or each.in_place for each in every)
        only = all(each.only_in_place for each in every)
        for each in every:
            key = name, each.operands, each.results
            plans = {**merged[key].plans, **each.plans} if key in merged else each.plans
            merged[key] = replace(each, plans=plans, in_place=over and not only, only_in_place=only)
    return list(merged.values())


class _Maker:
    def __init__(self, layer: Layer, following: Following, variant: Variant) -> None:
        self.following, self.variant = following, variant
        dtype = self.dtype = getattr(torch, variant.dtype)
        self.model = following.model(dtype)
        self.convolution: Convolution = layer.settings
        self.x, self.weight = self._meta(layer.input_shape), self._meta(layer.weight_shape)
        self.bias = torch.empty(layer.out_channels, dtype=dtype, device="meta") if layer.bias else None
        self.extra = [self._meta(tuple(node.meta["tensor_meta"].shape)) for node in following.extra]
        self.prepared = self._prepared(layer)
        self.names = self._names()
        self.operations = Operations(variant)

    def _meta(self, shape: tuple[int, ...]) -> Tensor:
        """Returns a tensor without data in the variant's memory format."""
        if len(shape) != 5:
            return torch.empty(shape, dtype=self.dtype, device="meta")
        return torch.empty_strided(shape, STRIDES[self.variant.layout](shape), dtype=self.dtype, device="meta")

    def _prepared(self, layer: Layer) -> Prepared:
        geometry = checks.check_forward(self.x, self.weight, self.bias, self.convolution)
        shape = (layer.batch, geometry.out_channels, *geometry.output_size(layer.size))
        strides = result_strides(shape, self.x, self.weight)
        graph = trace(
            self.following.function(self.model), shape, strides, self.dtype, torch.device("meta"), self.extra
        )
        self.traced = graph
        own = algebra.Layer(layer.size, layer.kernel, self.convolution)
        return Prepared(stages(graph, layer=own))

    def _names(self) -> dict[str, Tensor]:
        """Returns the tensors that the file's function takes, by name."""
        nodes = self.prepared.stages.graph.graph.nodes
        graph = self.prepared.stages.graph
        captured = {id(t): t for t in (getattr(graph, str(n.target)) for n in nodes if n.op == "get_attr")}
        paths = paths_of(self.model, list(captured.values()))
        if paths is None:
            raise NotExportableError("what follows the convolution uses a tensor that is no parameter of the model")
        found: dict[str, Tensor] = {"x": self.x, "weight": self.weight}
        if self.bias is not None:
            found["bias"] = self.bias
        self.paths: dict[str, str] = {}
        for key, tensor in captured.items():
            name = paths[key].replace(".", "_")
            name = f"model_{name}" if name in (*found, *RESERVED) else name
            found[name], self.paths[name] = tensor, paths[key]
        for node, tensor in zip(self.following.extra, self.extra, strict=True):
            name = node.name if node.name not in (*found, *RESERVED) else f"passed_{node.name}"
            found[name] = tensor
        return found

    def make(self, trains: bool) -> Chain:
        extra = [name for name, tensor in self.names.items() if any(tensor is each for each in self.extra)]
        recording = Recording(self.operations, self.names)
        prepared = self.prepared
        call = self.x, self.weight, self.bias, self.convolution
        recording.run(lambda: prepared.run(*call, self.extra, (self.weight, self.bias), runner=recording))
        if not isinstance(recording.results, Ref):
            raise NotExportableError("what follows the convolution has several results")
        constants, lines = self._inferred(recording, extra)
        own = copy.deepcopy(self.operations)
        passes = Differentiable(self.traced, ()) if trains and not self.extra else None
        training = None
        if passes is not None and passes.possible:
            try:
                training = self._training(passes)
            except NotExportableError:  # PyTorch differentiates what follows
                self.operations = own
        s = prepared.stages
        return Chain(
            names=list(self.names),
            paths=self.paths,
            shapes={name: tuple(t.shape) for name, t in self.names.items() if name in (*self.paths, *extra)},
            operations=self.operations.all,
            aligned=self._aligned(recording),
            counted=[name for name, tensor in self.names.items() if not tensor.is_floating_point()],
            branches=[Branch([(self.variant.dtype, self.variant.layout)], constants, lines, training)],
            left=s.rounds.left_names,
            moved="" if s.moved is None else s.moved.text,
        )

    def _aligned(self, recording: Recording) -> list[str]:
        """Returns the tensors besides x, weight and bias that kernels read as they are passed."""
        launched = [ref for step in recording.steps if isinstance(step.target, Operation) for ref in step.refs]
        names = [recording.inputs[ref] for ref in dict.fromkeys(launched) if ref in recording.inputs]
        return [name for name in names if name not in ("x", "weight", "bias")]

    def _inferred(self, recording: Recording, extra: Sequence[str]) -> tuple[Constants | None, list[str]]:
        """Returns what parameters alone give, and the lines of a call without gradients."""
        moving = [ref for ref, name in recording.inputs.items() if name == "x" or name in extra]
        first, rest = divided(recording, moving)
        later = {ref for step in rest for ref in step.refs} | {recording.results}
        made = [ref for step in first for ref in step.results if ref in later]
        writer = Writer(recording, recording.inputs, "weight")
        writer.write(first, made)
        results = [writer.values[ref].text for ref in made]
        words = set(re.findall(r"\w+", " ".join([*writer.lines, *results])))
        taken = [name for name in recording.inputs.values() if name in words]
        known = {**recording.inputs, **{ref: writer.values[ref].text for ref in made}}
        others = Writer(recording, known, "x")
        others.write(rest, [recording.results])
        lines = [*others.lines, f"return {others.of(recording.results)}"]
        if not made:
            return None, lines
        return Constants(writer.lines, taken, results), lines

    def _training(self, passes: Differentiable) -> Training:
        """Returns the lines of a call with gradients, whose passes read z, and the lines of the gradients."""
        if passes.part.rest or len(passes.part.boundary) != 1:
            raise NotExportableError("PyTorch computes a part of what follows the convolution")
        inputs = self.names
        recording = Recording(self.operations, inputs)
        call = self.x, self.weight, self.bias, self.convolution

        def forward() -> tuple[Tensor, ...]:
            (result,), z, saved = passes.run(*call, (), runner=recording)
            return result, z, *saved

        recording.run(forward)
        tensors = [recording.tensor(ref) for ref in recording.results]
        y, z, *saved = tensors
        writer = Writer(recording, recording.inputs, "x")
        writer.write(recording.steps, recording.results)
        held = {"z": z, **{f"saved_{i}": each for i, each in enumerate(saved)}}
        kept = dict(zip(held, [writer.of(ref) for ref in recording.results[1:]], strict=True))
        grad = self._meta(tuple(y.shape)).to(y.dtype)
        others = {name: tensor for name, tensor in inputs.items() if name not in ("x", "weight", "bias")}
        back = Recording(self.operations, {**held, "dy": grad, **others})
        gradients = passes.gradient.graph
        for node in gradients.graph.nodes:
            if NUMBERS in node.meta:
                back.constants[back.ref(getattr(gradients, str(node.target)))] = node.meta[NUMBERS]
        back.run(lambda: passes.gradients([grad], [z, *saved], (), runner=back))
        lines = Writer(back, back.inputs, "x")
        lines.write(back.steps, [ref for ref in back.results if ref is not None])
        dz, *rest = (None if ref is None else lines.of(ref) for ref in back.results)
        if dz is None:
            raise NotExportableError("the convolution's result has no gradient")
        read = {back.inputs[ref] for step in back.steps for ref in step.refs if ref in back.inputs}
        wanted = {id(each): text for each, text in zip(passes.wanted, rest, strict=True)}
        found = {name: wanted[id(tensor)] or "None" for name, tensor in others.items() if id(tensor) in wanted}
        return Training(
            forward=writer.lines,
            result=writer.of(recording.results[0]),
            saved={name: text for name, text in kept.items() if name in read},
            backward=lines.lines,
            volume=y.dim() == 5,
            dz=dz,
            gradients=found,
            used=[name for name in others if name in read],
        )


# Names that the file's functions use themselves.
RESERVED = (
    *("kernels", "layout", "ctx", "saved", "dy", "dz", "y", "z", "value", "vectors", "sums", "statistics"),
    *("torch", "nn"),
)
