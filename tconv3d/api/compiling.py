"""Fuses transposed convolutions with what follows them in graphs of `torch.compile`.

Dynamo hands a graph of PyTorch's Python API to a backend. Chains in it (`tails/chains.py`) become calls of one
operator each (`tails/compiled.py`), before PyTorch differentiates the graph; the rest is compiled as usual.

- `torch.compile(model, backend="tconv3d")` takes every transposed convolution, and gives the rest to Inductor.
- With the default backend, Inductor calls `FusingPass` on every graph. It takes the convolutions of this library,
  which `accelerate` puts into a model.

This module knows graphs, and nothing of kernels or stages.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.utils._triton import has_triton

from ..tails import programs, vocabulary
from ..tails.chains import Chain, find, memory_of_example, replace
from ..tails.compiled import ChainCall, kinds_of, under_autocast
from ..torch_ops import ops
from ..torch_ops.backend import current_backend
from ..torch_ops.casting import autocast_type, casts
from ..torch_ops.checks import Convolution, convolution_of

log = logging.getLogger("tconv3d.compile")

BACKEND = "tconv3d"
OURS = torch.ops.tconv3d.conv_transpose3d.default
PYTORCHS = (torch.conv_transpose3d, torch.nn.functional.conv_transpose3d)
MOST_BEGINNINGS = 6  # shorter and shorter beginnings of a chain that are tried
SETTINGS = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}


class NotFused(Exception):
    """Says why a chain stays as it is."""


def fuse_chains(graph: fx.Graph, all_convolutions: bool) -> list[str]:
    """Replaces the chains of a graph of Dynamo by fused calls, in place, and returns what was done with each.

    Convolutions of this library begin a chain; with `all_convolutions` those of PyTorch do so too.
    """
    taken = (OURS, *PYTORCHS) if all_convolutions else (OURS,)
    said = [each for part in _inner_graphs(graph) for each in fuse_chains(part, all_convolutions)]
    if not any(node.target in taken for node in graph.nodes if node.op == "call_function"):
        return said

    def is_convolution(node: fx.Node) -> bool:
        return node.op == "call_function" and node.target in taken and _is_volume(node)

    _make_numbers_constant(graph)
    casting = _autocast_of(graph)
    found = find(graph, is_convolution, memory=memory_of_example)
    new: list[str] = []
    calls: dict[Chain, tuple[ChainCall, tuple[Any, ...]]] = {}
    for chain in found.chains:
        reasons: list[str] = []
        for part in chain.beginnings(MOST_BEGINNINGS):
            try:
                calls[part] = _call(part, casting[part.convolution])
            except NotFused as why:
                reasons.append(str(why))
            else:
                shorter = "" if part is chain else f" as far as {part.words} ({reasons[0]})"
                new.append(f"{chain.words}: fused{shorter}")
                break
        else:
            new.append(f"{chain.words}: not fused, {reasons[0]}")
    new += [f"{node.name}: not fused, {why}" for node, why in found.alone.items()]
    replace(graph, list(calls), calls.__getitem__)
    for each in new:
        log.info(each)
    if graph.owning_module is not None:
        graph.owning_module.recompile()
    return [*said, *new]


def _inner_graphs(graph: fx.Graph) -> list[fx.Graph]:
    """Returns the graphs that nodes of a graph run, such as the body of a checkpoint."""
    module = graph.owning_module
    names = {str(node.target) for node in graph.nodes if node.op == "get_attr"} if module is not None else set()
    parts = [getattr(module, name, None) for name in sorted(names)]
    return [part.graph for part in parts if isinstance(part, fx.GraphModule)]


# ---- one chain


def _call(chain: Chain, autocast: torch.dtype | None) -> tuple[ChainCall, tuple[Any, ...]]:
    """Returns the call that replaces a chain, and its arguments."""
    if chain.attributes:
        raise NotFused("its tail reads attributes of the graph")
    input, weight, bias, convolution = _operands(chain.convolution)
    kinds = tuple(map(_kind, chain.passed))
    steady = frozenset(place for place, node in enumerate(chain.passed) if _is_steady(node))
    written = _written(chain)
    try:
        text = programs.write(chain.tail(), kinds, steady, written, autocast)
    except programs.CannotWrite as why:
        raise NotFused(str(why)) from why
    graph = chain.convolution.graph
    recording = torch.is_grad_enabled() or any(node.target is torch._C._set_grad_enabled for node in graph.nodes)
    slots = _examined(text, [input, weight, bias], convolution, chain.passed, recording)
    return ChainCall(text, convolution, slots), (input, weight, bias, *chain.passed)


def _operands(node: fx.Node) -> tuple[Any, Any, Any, Convolution]:
    names = ("input", "weight", "bias", *SETTINGS)
    given = {**SETTINGS, "bias": None, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    settings: list[Any] = [given[name] for name in SETTINGS]
    if any(isinstance(each, (fx.Node, str)) for each in torch.utils._pytree.tree_leaves(settings)):
        raise NotFused("the settings of the convolution are no numbers")
    return given["input"], given["weight"], given["bias"], convolution_of(*settings)


def _is_volume(node: fx.Node) -> bool:
    value = _example(node)
    return isinstance(value, Tensor) and value.dim() == 5


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _kind(node: fx.Node) -> str:
    value = _example(node)
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return "int"
    raise NotFused(f"{node.name}, which its tail takes, is neither a tensor nor an integer")


def _is_steady(node: fx.Node) -> bool:
    """Tells whether a tensor is probably the same in all calls: a parameter, or numbers per channel from outside."""
    value = _example(node)
    if node.op != "placeholder" or not isinstance(value, Tensor):
        return False
    return isinstance(value, torch.nn.Parameter) or value.dim() <= 1


def _written(chain: Chain) -> tuple[int, ...]:
    """Returns the places of running statistics that the tail updates."""
    states = {state for node in chain.nodes if _updates(node) for state in vocabulary.known(node, {}).states}
    return tuple(place for place, node in enumerate(chain.passed) if node in states)


def _updates(node: fx.Node) -> bool:
    """Tells whether a norm may update its running statistics."""
    names = {"batch_norm": ("training", 5), "instance_norm": ("use_input_stats", 5)}
    found = names.get(getattr(node.target, "__name__", ""))
    if found is None:
        return False
    name, place = found
    return bool(node.kwargs.get(name, node.args[place] if len(node.args) > place else name == "use_input_stats"))


def _examined(
    text: str,
    operands: Sequence[fx.Node | None],
    convolution: Convolution,
    passed: Sequence[fx.Node],
    recording: bool,
) -> int:
    """Returns how many sums a call saves for its gradients; raises `NotFused` if the tail cannot run in passes.

    The tail is divided into stages for the sizes that Dynamo has seen.
    """
    program = programs.read(text)
    examples: list[Any] = [None if node is None else _example(node) for node in operands]
    input = examples[0]
    why = ops.why_not_ours(input)
    if why is not None:
        raise NotFused(why)
    with torch._guards.tracing(None), under_autocast(program, input.device.type), torch.no_grad():
        with FakeTensorMode(allow_non_fake_inputs=True):
            x, weight, bias = (_sized(each, program.autocast) for each in examples)
            extra = [_sized(_example(node)) for node in passed]
        kind = kinds_of(text).find(x, weight, bias, convolution, extra)
        if isinstance(kind, str):
            raise NotFused(kind)
        left = kind.prepared.stages.rounds.left
        if any(isinstance(v := node.meta.get("val"), Tensor) and 2 * v.numel() >= x.numel() for node in left):
            raise NotFused(f"PyTorch computes {', '.join(kind.prepared.stages.rounds.left_names)}")
        tensors = [_example(node) for node in passed if isinstance(_example(node), Tensor)]
        wanted = any(isinstance(each, Tensor) and each.requires_grad for each in (*examples, *tensors))
        if not wanted or not recording:
            return 0
        with torch.enable_grad():
            passes = kind.recorded_for(tuple(each.requires_grad for each in tensors))
        if not passes.possible or passes.part.rest:
            raise NotFused("PyTorch computes a part of its gradients")
        if not passes.gradient.complete:  # parameters without a gradient must get none, rather than zeros
            raise NotFused("no gradient flows through its tail to the convolution or to another operand")
        values = [node.meta["val"] for node, _ in passes.gradient.saved]
        return sum(len(each) if isinstance(each, (tuple, list)) else 1 for each in values)


def _sized(value: Any, autocast: torch.dtype | None = None) -> Any:
    """Returns an example of a tensor, in the type that autocast gives it, or of a number, with the sizes seen."""
    if isinstance(value, torch.SymInt):
        return value.node.require_hint() if hasattr(value.node, "require_hint") else value.node.hint
    if not isinstance(value, Tensor):
        return value
    cast = autocast is not None and casts(value, autocast, value.device.type)
    shape, strides = (tuple(_sized(each) for each in several) for several in (value.shape, value.stride()))
    return torch.empty_strided(shape, strides, dtype=autocast if cast else value.dtype, device=value.device)


# ---- the graph around chains


def _autocast_of(graph: fx.Graph) -> dict[fx.Node, torch.dtype | None]:
    """Returns for every convolution the type of autocast that is switched on where it stands in the graph."""
    found: dict[fx.Node, torch.dtype | None] = {}
    regions: list[tuple[str, torch.dtype | None]] = []
    for node in graph.nodes:
        if node.target is _enter_autocast:
            where, dtype, enabled = (*node.args, None, None, True)[:3] if len(node.args) < 3 else node.args[:3]
            chosen = dtype or torch.get_autocast_dtype(str(where))
            regions.append((str(where), chosen if enabled else None))
        elif node.target is _exit_autocast:
            regions.pop()
        elif isinstance(value := _example(node), Tensor):
            where = value.device.type
            inner = [dtype for device, dtype in regions if device == where]
            found[node] = inner[-1] if inner else autocast_type(where)
    return found


def _make_numbers_constant(graph: fx.Graph) -> None:
    """Replaces floating-point numbers that Dynamo treats as arguments of the graph by their values.

    With `dynamic=True` the eps of a norm is such a number. Reading its value makes Dynamo compile again when it
    changes. Nobody but operators that tails hold may use it.
    """
    for node in list(graph.nodes):
        value = _example(node)
        if node.op != "call_method" or node.target != "item" or not isinstance(value, torch.SymFloat):
            continue
        if all(vocabulary.known(user, {}).held for user in node.users):
            for user in list(node.users):
                user.args, user.kwargs = _with_constant((user.args, user.kwargs), node, float(value))
            graph.erase_node(node)


def _with_constant(arguments: Any, node: fx.Node, value: float) -> Any:
    return fx.node.map_arg(arguments, lambda each: value if each is node else each)


# ---- who calls it


def backend(module: fx.GraphModule, examples: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compiles a graph of Dynamo for `torch.compile(model, backend="tconv3d")`.

    The graph goes to Inductor, or to `aot_eager` with a warning if Inductor has no compiler for the device.
    """
    fuse_chains(module.graph, all_convolutions=True)
    module.recompile()
    why = _why_not_inductor(examples)
    if why is None:
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(module, list(examples), **options)
        return compiled
    warnings.warn(f"tconv3d: {why}, so the graph runs without Inductor (aot_eager)", stacklevel=2)
    eager: Any = torch._dynamo.lookup_backend("aot_eager")
    return eager(module, list(examples))


def _why_not_inductor(examples: Sequence[Any]) -> str | None:
    """Returns what Inductor lacks to compile for the devices of these tensors, or None."""
    devices = {each.device.type for each in examples if isinstance(each, Tensor)}
    if "cuda" in devices and not has_triton():
        return "Triton is not installed"
    if devices == {"cpu"}:
        from torch._inductor import cpp_builder, exc

        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler:
            return "there is no C++ compiler"
    return None


def register_backend(registry: Any) -> None:
    """Makes the name "tconv3d" known to `torch.compile`; `registry` is PyTorch's module of backends.

    The package's entry point does so too, in processes that have not imported this package.
    """
    if BACKEND not in registry._BACKENDS and BACKEND not in registry._COMPILER_FNS:
        registry.register_backend(backend, name=BACKEND)


class FusingPass:
    """Fuses chains of this library's convolutions in graphs that Inductor compiles."""

    def __init__(self, following: Any = None) -> None:
        self.following = following  # a pass that was there before

    def __call__(self, graph: fx.Graph) -> None:
        fuse_chains(graph, all_convolutions=False)
        if self.following is not None:
            self.following(graph)

    def uuid(self) -> Any:
        """Returns what the result of this pass depends on besides the graph. Inductor's cache on disk needs it."""
        if self.following is None:
            return _sources(), current_backend()
        following = self.following.uuid() if hasattr(self.following, "uuid") else None
        return None if following is None else (_sources(), current_backend(), following)


@lru_cache(1)
def _sources() -> str:
    """Returns a hash of the modules that decide what becomes of a chain."""
    package = Path(__file__).parents[1]
    files = sorted([Path(__file__), *(package / "tails").glob("*.py"), *(package / "torch_ops").glob("*.py")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def install_pass() -> None:
    """Makes Inductor call `FusingPass` on every graph, before a pass that it may have already."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    CustomGraphPass.register(FusingPass)
    if not isinstance(config.pre_grad_custom_pass, FusingPass):
        config.pre_grad_custom_pass = FusingPass(config.pre_grad_custom_pass)
