"""Says what the functions, methods, operators and modules of PyTorch's Python API do to tensors.

For a node of a torch.fx graph it tells whether a tail can hold the node, whether its result is a new tensor, and what
it writes to. Names that are not listed here count as unknown: they may do anything. This module knows names and
arguments, and nothing of shapes or graphs.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn


class Kind(Enum):
    """Says what the result of a node is."""

    FRESH = "a new tensor"
    CAST = "its operand in another type, or its operand itself"
    VIEW = "a view of its first operand, or its first operand itself"
    IN_PLACE = "its first operand, after it was written to"
    SIZE = "no tensor, but sizes or other properties of one"
    SOURCE = "a tensor from outside of the graph"
    UNKNOWN = "anything, after any effect"


@dataclass(frozen=True)
class Known:
    """Describes a node."""

    kind: Kind
    held: bool = False  # whether a tail can hold it
    word: str = ""  # a name for people; views have none
    writes: fx.Node | None = None  # the operand that is written to
    states: frozenset[Any] = frozenset()  # nodes or modules whose running statistics it may update
    returns_tuple: bool = False
    inner: bool = False  # whether a tail can hold the node only if it holds one behind it, too


_SPACES: tuple[Any, ...] = (torch, F, torch._C._nn, operator, torch.special)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operators that tails hold, and whose result is a new tensor.
_POINTWISE = _words("""
    abs absolute add sub subtract rsub mul multiply div divide true_divide truediv neg negative reciprocal square sqrt
    rsqrt pow exp expm1 log log1p sin cos tanh sigmoid erf floor ceil round sign minimum maximum clamp clip clamp_min
    clamp_max where masked_fill lerp addcmul addcdiv gt ge lt le eq ne greater greater_equal less less_equal
    logical_and logical_or logical_not relu relu6 leaky_relu prelu elu celu selu gelu silu mish hardtanh hardswish
    hardsigmoid softplus softsign tanhshrink softshrink hardshrink logsigmoid threshold expit clone
    """)
_NORMS = frozenset(("batch_norm", "instance_norm", "group_norm", "layer_norm"))
_REDUCTIONS = _words("""
    sum mean amax amin max min argmax argmin logsumexp softmax log_softmax norm normalize var std var_mean
    avg_pool3d max_pool3d adaptive_avg_pool3d adaptive_max_pool3d
    """)
_HELD = _POINTWISE | _NORMS | _REDUCTIONS
_TUPLES = frozenset(("var_mean",))
# Operators that tails do not hold, and whose result is a new tensor.
_OTHER_FRESH = _words("""
    cat concat concatenate stack linear bilinear matmul mm bmm baddbmm addmm einsum tensordot cumsum cumprod
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d interpolate upsample pixel_shuffle
    avg_pool1d avg_pool2d max_pool1d max_pool2d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d
    scaled_dot_product_attention embedding one_hot zeros_like ones_like full_like empty_like zeros ones full arange
    gather index_select roll flip topk sort nonzero bitwise_and bitwise_or bitwise_xor remainder fmod floor_divide
    tan atan sinh cosh log2 log10 exp2 isnan isfinite fmin fmax local_response_norm
    grid_sample affine_grid repeat prod outer cosine_similarity
    """)
_CASTS = frozenset(("to", "type_as", "float", "double", "half", "bfloat16"))
# Operators that tails hold, and whose result may be their first operand or a view of it.
_HELD_VIEWS = _words("""
    view reshape flatten unflatten squeeze unsqueeze expand expand_as view_as reshape_as contiguous broadcast_to
    positive pos identity detach permute transpose movedim moveaxis swapaxes swapdims
    """)
_OTHER_VIEWS = _words("""
    t mT narrow select chunk split tensor_split unbind pad
    diagonal unfold repeat_interleave tile cpu cuda real
    """)
_SIZES = _words("size dim ndimension numel stride is_contiguous element_size is_floating_point get_device")
_ATTRIBUTES = _words("shape ndim dtype device is_cuda layout itemsize nbytes is_sparse")
_DROPOUTS = _words("dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout")
IN_PLACE_OPERATORS = {
    operator.iadd: "add",
    operator.isub: "sub",
    operator.imul: "mul",
    operator.itruediv: "div",
    operator.ipow: "pow",
}
# Operators by which numbers are made of sizes.
_OF_SIZES = {
    operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.neg,
}  # fmt: skip
_PLAIN_OPERATORS = {operator.not_, operator.is_, operator.is_not, operator.index, operator.contains, operator.mod}

# Modules that tails hold.
_HELD_MODULES: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardtanh,
    nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.Sigmoid, nn.Tanh, nn.Tanhshrink, nn.Softshrink,
    nn.Hardshrink, nn.LogSigmoid, nn.Threshold, nn.BatchNorm3d, nn.InstanceNorm3d, nn.GroupNorm, nn.LayerNorm,
    nn.Softmax, nn.LogSoftmax, nn.AvgPool3d, nn.MaxPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d,
)  # fmt: skip
_DROPOUT_MODULES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# Modules that tails do not hold, that return a new tensor and write to nothing but their own statistics.
_OTHER_MODULES: tuple[type[nn.Module], ...] = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
    nn.Bilinear, nn.BatchNorm1d, nn.BatchNorm2d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.Upsample,
    nn.UpsamplingNearest2d, nn.PixelShuffle, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.Embedding,
)  # fmt: skip
_NORM_MODULES = (
    nn.BatchNorm3d,
    nn.InstanceNorm3d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
)
_VIEW_MODULES: tuple[type[nn.Module], ...] = (nn.Identity, nn.Flatten, nn.Unflatten)

UNKNOWN = Known(Kind.UNKNOWN)


@lru_cache(maxsize=1)
def _functions() -> dict[Any, str]:
    """Returns the listed functions with their names."""
    names = _HELD | _OTHER_FRESH | _CASTS | _HELD_VIEWS | _OTHER_VIEWS | _DROPOUTS
    found: dict[Any, str] = {}
    for space in _SPACES:
        for name in names:
            for each in (name, f"{name}_"):
                function = getattr(space, each, None)
                if callable(function) and not isinstance(function, type):
                    found.setdefault(function, each)
    found.update({operator.getitem: "getitem", operator.floordiv: "floor_divide", operator.matmul: "matmul"})
    found.update({operator.add: "add", operator.sub: "sub", operator.mul: "mul", operator.truediv: "div"})
    return found


@lru_cache(maxsize=1)
def _places() -> dict[Any, dict[str, int]]:
    """Returns where a listed function of `torch.nn.functional` takes `inplace`, `training` and `return_indices`."""
    found: dict[Any, dict[str, int]] = {}
    for function in _functions():
        if getattr(function, "__module__", None) == F.__name__ and inspect.isfunction(function):
            found[function] = {name: i for i, name in enumerate(inspect.signature(function).parameters)}
    # These two choose between functions by `return_indices`, and have no signature of their own.
    pools: Any = {F.max_pool3d: F.max_pool3d_with_indices, F.adaptive_max_pool3d: F.adaptive_max_pool3d_with_indices}
    for function, chosen in pools.items():
        found[function] = {name: i for i, name in enumerate(inspect.signature(chosen).parameters)}
    for function in (torch.batch_norm, torch.instance_norm):
        found[function] = {"running_mean": 3, "running_var": 4}
    return found


def known(node: fx.Node, modules: Mapping[str, nn.Module], training: bool | None = None) -> Known:
    """Returns what is known of a node; `modules` are the modules that `call_module` nodes name.

    `training` is the mode of the modules, or None if each is in its own.
    """
    if node.op in ("placeholder", "get_attr"):
        return Known(Kind.SOURCE)
    if node.op == "call_module":
        module = modules.get(str(node.target))
        return UNKNOWN if module is None else of_module(node, module, training)
    if node.op == "call_method":
        return _of_method(node)
    if node.op == "call_function":
        return _of_function(node)
    return Known(Kind.SIZE) if node.op == "output" else UNKNOWN


def name_of(kind: type) -> str:
    """Returns the name of a module's class as its function would be written: LeakyReLU is leaky_relu."""
    name = re.sub(r"(?<=[a-z])[123]d$", "", kind.__name__)
    for word in ("SiLU", "PReLU", "GELU", "CELU", "SELU", "ELU", "ReLU"):
        name = name.replace(word, f"_{word.lower()}")
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_").replace("__", "_")


# ---- gates: numbers per channel that are computed from means over space, by which every channel is scaled


def squeezes(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Tells whether a node leaves one number of every channel's volume."""
    if node.op == "call_module":
        module = modules.get(str(node.target))
        pools = isinstance(module, (nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d))
        return pools and getattr(module, "output_size", None) in _ONE
    name = str(node.target) if node.op == "call_method" else _function_name(node)
    rest = (*node.args[1:], *node.kwargs.values())
    if name in ("adaptive_avg_pool3d", "adaptive_max_pool3d"):
        return rest[:1] in [(each,) for each in _ONE]
    listed = [each for each in rest if isinstance(each, (tuple, list)) and all(isinstance(i, int) for i in each)]
    return name in ("mean", "amax", "sum") and len(listed) == 1 and sorted(dim % 5 for dim in listed[0]) == [2, 3, 4]


def mixes(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Tells whether a node is a linear layer or a convolution, which a tail can hold between numbers per channel."""
    if node.op == "call_module":
        return type(modules.get(str(node.target))) in (nn.Linear, nn.Conv3d)
    return _function_name(node) in ("linear", "conv3d")


_ONE = (1, (1, 1, 1), [1, 1, 1])


def _function_name(node: fx.Node) -> str:
    target: Any = node.target
    return _functions().get(target, "") if node.op == "call_function" and _hashable(target) else ""


# ---- modules


def of_module(node: fx.Node, module: nn.Module, training: bool | None = None) -> Known:
    """Returns what is known of a call of a module with one positional argument."""
    kind = _inherited(type(module))
    word = name_of(kind)
    if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
        return Known(Kind.UNKNOWN, word=kind.__name__)
    if kind.forward is nn.Sequential.forward:
        return _in_a_row(node, module, training)
    if kind in _DROPOUT_MODULES:
        mode = module.training if training is None else training
        return _dropped(node, bool(mode and module.p), bool(module.inplace))
    if kind in _VIEW_MODULES:
        return Known(Kind.VIEW, held=True)
    if kind in _HELD_MODULES:
        pairs = bool(getattr(module, "return_indices", False))
        states = frozenset({module}) if kind in _NORM_MODULES else frozenset()
        if kind in _NORM_MODULES and module.momentum is None:  # a number in a tensor then says how calls are averaged
            return Known(Kind.FRESH, word=word, states=states)
        if getattr(module, "inplace", False):
            return Known(Kind.IN_PLACE, True, word, writes=node.args[0])
        return Known(Kind.FRESH, not pairs, word, states=states, returns_tuple=pairs)
    if kind in _OTHER_MODULES:
        return Known(Kind.FRESH, word=word, states=frozenset({module}) if kind in _NORM_MODULES else frozenset())
    return Known(Kind.UNKNOWN, word=kind.__name__)


# What a class may define and still compute what its base class computes.
_HARMLESS = _words("__init__ __module__ __doc__ __qualname__ __annotations__ __static_attributes__ __firstlineno__")


def _inherited(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns the class of PyTorch from which a class inherits all but its constructor, or the class itself."""
    own = kind
    while not own.__module__.startswith("torch.") and len(own.__bases__) == 1 and _HARMLESS.issuperset(vars(own)):
        (own,) = own.__bases__
    return own if own.__module__.startswith("torch.") else kind


def _in_a_row(node: fx.Node, modules: nn.Module, training: bool | None) -> Known:
    """Returns what is known of a sequence of modules that is called as one module."""
    parts = [of_module(node, each, training) for each in modules.children()]
    if any(part.kind is Kind.UNKNOWN for part in parts):
        return Known(Kind.UNKNOWN, word=type(modules).__name__)
    first = next((i for i, part in enumerate(parts) if part.kind is Kind.FRESH), len(parts))
    writes = any(part.writes is not None for part in parts[:first])  # later ones write to a new tensor
    states = frozenset().union(*(part.states for part in parts))
    kind = Kind.FRESH if first < len(parts) else Kind.IN_PLACE if writes else Kind.VIEW
    return Known(kind, word=type(modules).__name__, writes=node.args[0] if writes else None, states=states)  # type: ignore[arg-type]


def _dropped(node: fx.Node, random: bool, in_place: bool) -> Known:
    """Returns what is known of a dropout, which returns its operand itself unless it is `random`."""
    if not random:
        return Known(Kind.VIEW, held=True)
    first = node.args[0] if node.args else node.kwargs.get("input")
    if in_place:
        return Known(Kind.IN_PLACE, word="dropout", writes=first if isinstance(first, fx.Node) else None)
    return Known(Kind.FRESH, word="dropout")


# ---- methods and functions


def _of_method(node: fx.Node) -> Known:
    name, first = str(node.target), node.args[0] if node.args else None
    if name in _SIZES:
        return Known(Kind.SIZE, held=True)
    if not isinstance(first, fx.Node) or node.kwargs.get("out") is not None:
        return UNKNOWN
    if name.endswith("_") and not name.endswith("__"):
        plain = name[:-1]
        held = plain in _POINTWISE
        if plain in _HELD | _OTHER_FRESH or plain in ("copy", "fill", "zero"):
            return Known(Kind.IN_PLACE, held, plain, writes=first)
        return UNKNOWN
    return _of_name(name, node, ())


def _of_function(node: fx.Node) -> Known:
    target: Any = node.target
    if target is getattr:
        listed = len(node.args) == 2 and node.args[1] in _ATTRIBUTES
        return Known(Kind.SIZE, held=True) if listed else UNKNOWN
    if _gives_sizes(node):
        return Known(Kind.SIZE, held=True)
    first: Any = node.args[0] if node.args else node.kwargs.get("input")
    if target in IN_PLACE_OPERATORS:
        # On numbers, sizes for example, these compute a new number.
        return Known(Kind.IN_PLACE, True, IN_PLACE_OPERATORS[target], writes=first) if _node(first) else UNKNOWN
    if target is operator.setitem:
        return Known(Kind.IN_PLACE, word="setitem", writes=first) if _node(first) else UNKNOWN
    if _hashable(target) and target in _PLAIN_OPERATORS:
        return Known(Kind.SIZE, held=False)
    name = _functions().get(target) if _hashable(target) else None
    if name is None or node.kwargs.get("out") is not None:
        return UNKNOWN
    if name.endswith("_"):
        held = name[:-1] in _POINTWISE
        return Known(Kind.IN_PLACE, held, name[:-1], writes=first) if _node(first) else UNKNOWN
    given = _given(node)
    if name in _DROPOUTS:
        random = given("training", True) is not False and given("p", 0.5) != 0
        return _dropped(node, random, given("inplace", False) is not False)
    if given("inplace", False) is not False:
        return Known(Kind.IN_PLACE, name in _HELD, name, writes=first) if _node(first) else UNKNOWN
    states = (given("running_mean", None), given("running_var", None)) if name in _NORMS else ()
    return _of_name(name, node, states)


def _of_name(name: str, node: fx.Node, states: Iterable[Any]) -> Known:
    if name == "getitem" or name == "__getitem__":
        return Known(Kind.VIEW, held=_only_adds_dimensions(node) or _takes_of_tuple(node))
    if name == "clone" and (len(node.args) > 1 or node.kwargs):  # it may ask for another layout
        return Known(Kind.FRESH, word=name)
    if name in _CASTS:
        return Known(Kind.CAST, held=not _moves(node), word="to")
    if name in _HELD_VIEWS:
        return Known(Kind.VIEW, held=True)
    if name in _OTHER_VIEWS:
        return Known(Kind.VIEW, word=name)
    if name in _HELD:
        pairs = name in _TUPLES or _has_pairs(name, node)
        plain = not (name == "where" and len(node.args) == 1)
        return Known(
            Kind.FRESH if plain else Kind.UNKNOWN,
            plain,
            name,
            states=frozenset(each for each in states if isinstance(each, fx.Node)),
            returns_tuple=pairs,
        )
    return Known(Kind.FRESH, word=name) if name in _OTHER_FRESH else UNKNOWN


def _gives_sizes(node: fx.Node) -> bool:
    """Tells whether a node takes sizes of tensors, or computes numbers of such sizes alone."""
    if node.op == "call_method" or node.target is getattr:
        return str(node.target) in _SIZES or node.args[-1] in _ATTRIBUTES
    return node.target in _OF_SIZES and bool(node.all_input_nodes) and all(map(_gives_sizes, node.all_input_nodes))


def _has_pairs(name: str, node: fx.Node) -> bool:
    """Tells whether `max` or `min` is asked for values and their indices, or a pool for its indices."""
    if name in ("max", "min"):
        numbers = [each for each in (*node.args[1:2], node.kwargs.get("dim")) if isinstance(each, int)]
        return bool(numbers)
    return _given(node)("return_indices", False) is not False


def _takes_of_tuple(node: fx.Node) -> bool:
    """Tells whether a node takes an element of what an operator with several results returns."""
    source, index = node.args[0], node.args[1]
    if not isinstance(source, fx.Node) or not isinstance(index, int):
        return False
    name = str(source.target) if source.op == "call_method" else _functions().get(source.target)
    return name is not None and (name in _TUPLES or (name in ("max", "min") and _has_pairs(name, source)))


def _only_adds_dimensions(node: fx.Node) -> bool:
    """Tells whether an index keeps all elements, such as `[:, :, None]`."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(each is None or each is Ellipsis or each == slice(None) for each in index)


def _moves(node: fx.Node) -> bool:
    """Tells whether a cast may go to another device: `to` of anything but a type."""
    if str(node.target) not in ("to", "type_as") and node.op == "call_method":
        return False
    rest = (*node.args[1:], *node.kwargs.values())
    return not all(isinstance(each, (torch.dtype, bool)) for each in rest)


def _given(node: fx.Node) -> Callable[[str, Any], Any]:
    """Returns what looks up an argument of a function of `torch.nn.functional` by name, with a default."""
    places = _places().get(node.target, {}) if node.op == "call_function" else {}

    def given(name: str, default: Any) -> Any:
        if name in node.kwargs:
            return node.kwargs[name]
        place = places.get(name)
        return node.args[place] if place is not None and place < len(node.args) else default

    return given


def _node(value: Any) -> bool:
    return isinstance(value, fx.Node)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
