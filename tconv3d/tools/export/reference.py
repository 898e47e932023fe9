"""Reads a reference, a Python text with `Model`, `get_inputs` and `get_init_inputs`, and says what can be exported.

    found = reference.read(text)
    found.layer, found.eps     # the transposed convolution, with the ReLU and GroupNorm behind it, if they follow
    found.model                # the text with `ModelNew`: the constructor of `Model`, a forward on the kernels

The model's forward is traced by torch.fx on tensors without data. What it computes before and after stays PyTorch's.
This module does not know kernels.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional

from ..bench.layers import Layer
from . import following
from .following import Following, plain_settings
from .passes import EPS, NotExportableError
from .wrapping import wrapped

NEEDED = ("Model", "get_inputs", "get_init_inputs")
_RELUS = (torch.relu, functional.relu, "relu")
_CONVOLUTIONS = (functional.conv_transpose3d, torch.conv_transpose3d)
_NORMS = (functional.group_norm, torch.group_norm)
_INFIX = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.pow: "**",
    operator.floordiv: "//", operator.mod: "%", operator.gt: ">", operator.lt: "<", operator.matmul: "@",
}  # fmt: skip
PROVIDED = {"torch", "nn", "Tensor", "Any", "functools", "functional"}  # names that the exported file imports itself


@dataclass(frozen=True)
class Reference:
    layer: Layer
    eps: float
    dtype: torch.dtype
    layout: str
    title: str  # first line of the reference's docstring, or nothing
    match: _Match
    text: str

    @property
    def model(self) -> str:
        """The text of `ModelNew`, whose forward runs PyTorch behind the kernels, and of all else in the reference."""
        return self.written()[0]

    @property
    def following(self) -> Following | str | None:
        """What follows the convolution, or why that cannot be told; None for nothing, and for a fused block."""
        after = self.match.last.users
        if self.layer.norm_groups or all(each.op == "output" for each in after):
            return None
        return self.match.following

    def written(self, chain: Sequence[str] | None = None, differentiable: bool = True) -> tuple[str, str]:
        """Returns the text of `ModelNew` and of all else in the reference, and the imports that this text needs.

        `chain` are the paths of the parameters that the file's function for what follows the convolution takes, if it
        has one. If that is not `differentiable`, PyTorch runs behind the convolution in calls with gradients.
        """
        return _rewritten(self.text, ast.parse(self.text), self.match.forward(chain, differentiable))


def read(text: str, evaluated: bool = False) -> Reference:
    """Reads a reference; `evaluated` puts its model in evaluation mode.

    Raises `NotExportableError` where the model does not have one transposed 3D convolution that can be traced.
    """
    namespace: dict[str, Any] = {"__name__": "reference", "torch": torch, "nn": nn, "Tensor": Tensor, "Any": Any}
    exec(compile(text, "reference", "exec"), namespace)
    missing = [name for name in NEEDED if name not in namespace]
    if missing:
        raise NotExportableError(f"a reference defines {', '.join(NEEDED)}; this one has no {', '.join(missing)}")
    found = _Match(*_traced(namespace, evaluated))
    tree = ast.parse(text)
    title = (ast.get_docstring(tree) or "").split("\n")[0]
    return Reference(found.layer, found.eps, found.dtype, found.layout, title, found, text)


def _traced(namespace: dict[str, Any], evaluated: bool) -> tuple[fx.GraphModule, dict[str, Any]]:
    """Traces the model, and runs the trace on tensors that have shapes but no data.

    Returns the traced model, and the numbers, words and tuples that its forward reads of the model.
    """
    with torch.device("meta"):
        model: nn.Module = namespace["Model"](*namespace["get_init_inputs"]())
        inputs = [each.to("meta") if isinstance(each, Tensor) else each for each in namespace["get_inputs"]()]
    model = model.to("meta").train(model.training and not evaluated)
    try:
        with _watched(model) as read:
            traced = fx.symbolic_trace(model)
    except (TypeError, RuntimeError, fx.proxy.TraceError) as error:
        raise NotExportableError(f"the model's forward cannot be traced by torch.fx: {error}") from error
    ShapeProp(traced).propagate(*inputs)
    return traced, {name: value for name, value in plain_settings(model).items() if name in read}


@contextmanager
def _watched(model: nn.Module) -> Iterator[set[str]]:
    """Gives the names of the attributes that are read of a model meanwhile."""
    kind, read = type(model), set[str]()

    class Watched(kind):  # type: ignore[misc,valid-type]
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    model.__class__ = Watched
    try:
        yield read
    finally:
        model.__class__ = kind


class _Match:
    """Finds the convolution of a traced model, and the ReLU and GroupNorm that the fused kernels can run with it."""

    def __init__(self, traced: fx.GraphModule, own: dict[str, Any]) -> None:
        self.traced, self.own = traced, own
        self.modules = dict(traced.named_modules())
        found = [node for node in traced.graph.nodes if self._is(node, nn.ConvTranspose3d, _CONVOLUTIONS)]
        if len(found) != 1:
            raise NotExportableError(f"expected a model with one transposed 3D convolution, got {len(found)}")
        self.convolution: fx.Node = found[0]
        self.input: Any = self.convolution.args[0]
        settings, self.tensors = self._settings()
        meta = self.input.meta["tensor_meta"]
        if len(meta.shape) != 5:
            raise NotExportableError(f"expected an input of 5 dimensions, got {tuple(meta.shape)}")
        batch, channels, *size = meta.shape
        weight = self._tensor(self.tensors[0]).shape
        groups = settings.pop("groups")
        bias = len(self.tensors) > 1
        self.layer = Layer(
            batch,
            channels,
            weight[1] * groups,
            _triple(size),
            _triple(weight[2:]),
            groups=groups,
            bias=bias,
            **settings,
        )
        self.eps, self.dtype = EPS, meta.dtype
        last = meta.memory_format is torch.channels_last_3d
        self.layout = "channels_last_3d" if last else "contiguous"
        self.last = self.convolution
        self.checked = {self.convolution.target: "SETTINGS"} if self.convolution.op == "call_module" else {}
        self._find_norm()

    @cached_property
    def following(self) -> Following | str:
        return following.find(self.traced, self.convolution)

    def _is(self, node: fx.Node, module: type[nn.Module], functions: Sequence[Any]) -> bool:
        if node.op == "call_module":
            return type(self.modules[str(node.target)]) is module
        return node.op in ("call_function", "call_method") and node.target in functions

    def _settings(self) -> tuple[dict[str, Any], list[str]]:
        """Returns the settings of the convolution, and the expressions of its weight and bias."""
        node = self.convolution
        if node.op == "call_module":
            module = self.modules[str(node.target)]
            assert isinstance(module, nn.ConvTranspose3d)
            if len(node.args) + len(node.kwargs) > 1:
                raise NotExportableError("the convolution gets an output_size when it is called")
            names = ("stride", "padding", "output_padding", "dilation", "groups")
            path = _path(str(node.target))
            tensors = [f"{path}.weight", *([f"{path}.bias"] if module.bias is not None else [])]
            return {name: getattr(module, name) for name in names}, tensors
        order = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
        given: dict[str, Any] = dict(zip(order, node.args, strict=False)) | dict(node.kwargs)
        self.input = given["input"]
        found = {name: _triple(given.get(name, usual)) for name, usual in _DEFAULTS.items()}
        parameters = [given["weight"], *([given["bias"]] if given.get("bias") is not None else [])]
        if any(not isinstance(each, fx.Node) or each.op != "get_attr" for each in parameters):
            raise NotExportableError("weight and bias of the convolution must be parameters of the model")
        return {**found, "groups": given.get("groups", 1)}, [_path(str(each.target)) for each in parameters]

    def _tensor(self, path: str) -> Tensor:
        found: Any = self.traced
        for name in re.findall(r"\w+", path)[1:]:
            found = found[int(name)] if name.isdigit() else getattr(found, name)
        assert isinstance(found, Tensor)
        return found

    def _only_user(self, node: fx.Node) -> fx.Node | None:
        return next(iter(node.users)) if len(node.users) == 1 else None

    def _find_norm(self) -> None:
        """Takes ReLU and GroupNorm into the layer if they follow the convolution and nothing else reads it."""
        relu = self._only_user(self.convolution)
        if relu is None or not self._is(relu, nn.ReLU, _RELUS) or relu.args[0] is not self.convolution:
            return
        norm = self._only_user(relu)
        if norm is None or not self._is(norm, nn.GroupNorm, _NORMS) or norm.args[0] is not relu:
            return
        if norm.op == "call_module":
            module = self.modules[str(norm.target)]
            assert isinstance(module, nn.GroupNorm)
            groups, eps, path = module.num_groups, module.eps, _path(str(norm.target))
            tensors = [f"{path}.weight", f"{path}.bias"] if module.affine else []
        else:
            names = ("input", "num_groups", "weight", "bias", "eps")
            given: dict[str, Any] = dict(zip(names, norm.args, strict=False)) | norm.kwargs
            groups, eps = given["num_groups"], given.get("eps", EPS)
            parameters = [given.get("weight"), given.get("bias")]
            is_held = all(isinstance(each, fx.Node) and each.op == "get_attr" for each in parameters)
            tensors = [_path(str(each.target)) for each in parameters if each is not None] if is_held else []
        if not tensors:
            return
        self.layer, self.eps, self.last = replace(self.layer, norm_groups=groups), eps, norm
        self.tensors += tensors
        if norm.op == "call_module":
            self.checked[norm.target] = "NORM_SETTINGS"

    # ---- the new forward

    def settings(self, chain: bool) -> dict[str, dict[str, Any]]:
        """Returns numbers and words that the file has as constants, by the path of the module that has them."""
        found = {"": self.own} if self.own else {}
        return found | (self.following.settings if chain and isinstance(self.following, Following) else {})

    def forward(self, chain: Sequence[str] | None, differentiable: bool) -> list[str]:
        """Returns the lines of a forward that calls the kernels of the file (`Reference.written`)."""
        lines = [f"check_settings({_path(str(target))}, {name})" for target, name in self.checked.items()]
        if self.settings(chain is not None):
            lines.append("for path, settings in MODEL_SETTINGS.items():")
            lines.append("    check_settings(self.get_submodule(path), settings)")
        nodes = [node for node in self.traced.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
        behind = [node for node in nodes if node in following.behind(self.traced, self.convolution)]
        before = [node for node in nodes if node is not self.convolution and node not in behind]
        names: dict[fx.Node, str] = {}
        if before:
            lines.append("# PyTorch computes what comes before the convolution.")
            lines += self._lines(before, names, nodes[nodes.index(self.convolution) :])
        if chain is None:
            return lines + self._behind(behind, names)
        assert isinstance(self.following, Following)
        extra = [self._argument(each, names) for each in self.following.extra]
        x = self._argument(self.input, names)
        call = f"chain({', '.join([x, *self.tensors, *map(_path, chain), *extra])})"
        if not differentiable:
            lines.append(f"if records_gradients({', '.join([x, *extra])}, *self.parameters()):")
            lines += [f"    {line}" for line in self._behind(behind, dict(names))]
        return [*lines, f"return {call}"]

    def _behind(self, behind: Sequence[fx.Node], names: dict[fx.Node, str]) -> list[str]:
        """Returns the lines from the convolution to the result, with PyTorch's operators behind the convolution."""
        kind = "block" if self.layer.norm_groups else "convolve"
        text = f"{kind}({', '.join([self._argument(self.input, names), *self.tensors])})"
        result = next(node for node in self.traced.graph.nodes if node.op == "output").args[0]
        if result is self.last:
            return [f"return {text}"]
        rest = list(behind)[list(behind).index(self.last) + 1 :] if self.last in behind else list(behind)
        names[self.last] = self._name(self.last)
        lines = [f"{names[self.last]} = {text}", "# PyTorch computes what follows."]
        lines += self._lines(rest, names)
        last = self._argument(result, names)
        if lines[-1].startswith(f"{last} = "):
            return [*lines[:-1], f"return {lines[-1].removeprefix(f'{last} = ')}"]
        return [*lines, f"return {last}"]

    def _lines(self, nodes: Sequence[fx.Node], names: dict[fx.Node, str], moved: Sequence[fx.Node] = ()) -> list[str]:
        """Returns one line of PyTorch for every node; `moved` nodes have come before others."""
        lines = []
        for node in nodes:
            text = self._call(node, names)
            names[node] = self._name(node, moved=node in moved)
            lines.append(f"{names[node]} = {text}")
        return lines

    def _name(self, node: fx.Node, moved: bool = False) -> str:
        return "x" if len(node.users) == 1 and self._is_chain(node) and not moved else node.name

    def _is_chain(self, node: fx.Node) -> bool:
        """Says whether a value can be called x: the next operation is the only one that takes it."""
        order = [each for each in self.traced.graph.nodes if each.op not in ("placeholder", "get_attr")]
        first = next(each for each in self.traced.graph.nodes if each.op == "placeholder")
        later = order[order.index(node) + 1 :]
        return self._only_user(node) is later[0] and not any(user in later for user in first.users)

    def _call(self, node: fx.Node, names: dict[fx.Node, str]) -> str:
        given = [self._argument(each, names) for each in node.args]
        given += [f"{name}={self._argument(each, names)}" for name, each in node.kwargs.items()]
        if node.op == "call_module":
            return f"{_path(str(node.target))}({', '.join(given)})"
        if node.op == "call_method":
            return f"{given[0]}.{node.target}({', '.join(given[1:])})"
        target: Any = node.target
        if target is getattr:
            return f"{given[0]}.{node.args[1]}"
        if target in _INFIX:
            return f"{given[0]} {_INFIX[target]} {given[1]}"
        if target is operator.getitem:
            return f"{given[0]}[{given[1]}]"
        name = getattr(target, "__name__", "")
        if getattr(torch, name, None) is target and hasattr(Tensor, name) and isinstance(node.args[0], fx.Node):
            return f"{given[0]}.{name}({', '.join(given[1:])})"
        for prefix, space in (("torch", torch), ("functional", functional)):
            if getattr(space, name, None) is target:
                return f"{prefix}.{name}({', '.join(given)})"
        if getattr(__builtins__, name, None) is target or name in ("max", "min", "abs", "neg"):
            return f"{name if name != 'neg' else '-'}({', '.join(given)})"
        raise NotExportableError(f"the model's forward calls {target}, which cannot be written into a file")

    def _argument(self, value: Any, names: dict[fx.Node, str]) -> str:
        if isinstance(value, fx.Node):
            if value.op == "get_attr":
                return _path(str(value.target))
            return names.get(value, value.name)
        if isinstance(value, tuple):
            inner = ", ".join(self._argument(each, names) for each in value)
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        if isinstance(value, list):
            return f"[{', '.join(self._argument(each, names) for each in value)}]"
        if isinstance(value, slice):
            return f"slice({value.start}, {value.stop}, {value.step})"
        if isinstance(value, (int, float, bool, str, type(None), torch.dtype)):
            return repr(value)
        raise NotExportableError(
            f"the model's forward has the constant {value!r}, which cannot be written into a file"
        )


_DEFAULTS: dict[str, int] = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}


def _triple(value: Any) -> tuple[int, int, int]:
    d, h, w = (value,) * 3 if isinstance(value, int) else tuple(value) * (3 if len(value) == 1 else 1)
    return d, h, w


def _path(target: str) -> str:
    """Writes the path of a module or parameter as an expression: `self.layers[0].weight`."""
    return "self" + "".join(f"[{name}]" if name.isdigit() else f".{name}" for name in target.split("."))


# ---- the text


def _rewritten(text: str, tree: ast.Module, forward: list[str]) -> tuple[str, str]:
    """Returns the reference with `ModelNew` in place of `Model`, its new forward, and the imports it needs."""
    lines = text.split("\n")
    (model,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Model")
    functions = [node for node in model.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    if not functions:
        raise NotExportableError("`Model` inherits its forward; a reference must define it")
    body = functions[0].body
    has_doc = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    first = (body[0].end_lineno or 0) if has_doc else body[0].lineno - 1
    indent = " " * body[0].col_offset
    forward = wrapped(indent + line for line in forward)
    renamed = [_renamed(line) for line in lines[model.lineno - 1 : first]]
    after = [_renamed(line) for line in lines[functions[0].end_lineno : model.end_lineno]]
    new = [*lines[: model.lineno - 1], *renamed, *forward, *after, *lines[model.end_lineno :]]
    shifted = len(forward) - ((functions[0].end_lineno or 0) - first)
    imported = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    docstring = [tree.body[0]] if ast.get_docstring(tree) is not None else []
    kept = list[str]()
    for node in (*docstring, *imported):
        late = node.lineno > model.lineno
        start, end = node.lineno - 1 + late * shifted, (node.end_lineno or 0) + late * shifted
        if not isinstance(node, ast.Expr):
            kept.append("\n".join(new[start:end]))
        new[start:end] = [""] * (end - start)
    rest = "\n".join(new).strip("\n")
    used = set(re.findall(r"\w+", rest))
    needed = [
        line
        for line, node in zip(kept, imported, strict=True)
        if any((a.asname or a.name.split(".")[0]) in used - PROVIDED for a in node.names)
        and getattr(node, "module", "") != "__future__"
    ]
    return re.sub(r"\n{3,}", "\n\n\n", rest), "".join(f"{line}\n" for line in needed)


def _renamed(line: str) -> str:
    return re.sub(r"(?<=class )Model\b|(?<=super\()Model\b|\bModel(?=\.\w)", "ModelNew", line)
