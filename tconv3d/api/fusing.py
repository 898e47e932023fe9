"""Finds the modules of a model in whose forward transposed convolutions are followed by something that can be fused.

Such a module gets a class that is derived from its own, with another `forward` (`forwards.run`). It keeps its name,
parameters, `state_dict`, hooks and children. Every call checks that all is as it was when the chain was found; if
not, the forward runs as it is written.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._jit_internal import is_scripting
from torch.nn.modules.lazy import LazyModuleMixin

from ..tails.chains import Chain
from . import plain
from .forwards import PLANS, Explored, Plans, Signature, is_sequence, run, run_in_a_row, written_forward
from .modules import ConvTranspose3d
from .plain import BASE
from .python_code import CannotRead

IsUp = Callable[[nn.Module], bool]


# ---- what a model has


@dataclass
class Fusable:
    """Holds what was found in a model: modules to change, and the chain of each convolution or why it has none."""

    modules: list[nn.Module]
    chains: dict[nn.Module, str]  # for example "conv -> batch_norm -> leaky_relu"
    reasons: dict[nn.Module, str]


def find(model: nn.Module, is_up: IsUp) -> Fusable:
    """Returns what can be fused behind the transposed convolutions for which `is_up`, without changing the model.

    Modules are read as they are, and in their other mode (training or evaluation), in which they may have chains too.
    """
    found = Fusable([], {}, {})
    for module in model.modules():
        if not _calls_one(module, is_up):
            continue
        why = _why_not(module)
        other = "in evaluation" if module.training else "in training"
        modes = () if why else ((None, ""), (not module.training, other))
        seen = [_look_at(found, module, is_up, training, when) for training, when in modes]
        if True in seen:
            found.modules.append(module)
        reasons = [why] if why else [each for each in seen if isinstance(each, str)]
        if len(reasons) > len(seen) - 1:  # in no mode can it be read
            text = f"the forward of {type(module).__name__} is not read: {reasons[0]}"
            for layer in _layers_of(module, is_up):
                found.reasons.setdefault(layer, text)
    return found


def _look_at(found: Fusable, module: nn.Module, is_up: IsUp, training: bool | None, when: str) -> bool | str:
    """Adds the chains of typical calls of a module, and tells whether some are its own, or why it cannot be read.

    Chains that are only found in the module's other mode say `when`.
    """
    function = written_forward(type(module))
    explored: list[Explored] = []
    why = ""
    for example in Signature(function).examples():
        try:
            explored.append(Explored(module, function, example, is_up, training))
        except CannotRead as error:
            why = why or str(error)
    if not explored:
        return why
    own = any(_is_own(each, chain) for each in explored for chain in each.chains)
    for each in explored:
        for chain in each.chains if own else ():
            layer = each.convolution(chain.convolution)
            length, words = len(chain.words), f"{chain.words} ({when})" if when else chain.words
            before = found.chains.get(layer, "")
            if (not when and length > len(before)) or not before:
                found.chains[layer] = words
        for node, reason in each.found.alone.items():
            found.reasons.setdefault(each.convolution(node), reason)
    return own


def _calls_one(module: nn.Module, is_up: IsUp) -> bool:
    """Tells whether a module has a transposed convolution among its children, or in a container among them."""
    if is_up(module) or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    return bool(_layers_of(module, is_up))


def _layers_of(module: nn.Module, is_up: IsUp) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for child in module.children():
        if is_up(child):
            layers.append(child)
        elif isinstance(child, (nn.ModuleList, nn.ModuleDict)) or is_sequence(child):
            layers.extend(_layers_of(child, is_up))
    return layers


def _why_not(module: nn.Module) -> str | None:
    """Returns why the forward of a module cannot be replaced, or None if it can."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript has compiled it"
    if isinstance(module, fx.GraphModule):
        return "torch.fx has written it"
    if isinstance(module, LazyModuleMixin):
        return "it is lazy"
    if "forward" in module.__dict__:
        return "it has been replaced on the object"
    if kind.__module__.startswith("torch.") and kind is not nn.Sequential:
        return f"{kind.__name__} is a class of PyTorch"
    function = written_forward(kind)
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        return "it is no plain method"
    if function is nn.Sequential.forward and plain.forward_is_replaced(nn.Sequential):
        return "it has been replaced on the class"
    if function is not nn.Sequential.forward and not Signature(function).fits:
        return "it takes any number of arguments"
    try:
        fused_class(kind)
    except Exception as error:  # a class may ask something of those that are derived from it
        return f"no class can be derived from {kind.__name__}: {error}"
    return None


def _is_own(explored: Explored, chain: Chain) -> bool:
    """Tells whether a chain is not within one of the sequences that a module has, which run it by themselves."""
    path = str(chain.convolution.target).rpartition(".")[0]
    if not path:
        return True
    container = explored.module.get_submodule(path)
    if not any(container is each for each in explored.read.opened):
        return True
    targets = [str(node.target) for node in chain.nodes if node.op == "call_module"]
    return len(targets) < len(chain.nodes) or not all(target.startswith(f"{path}.") for target in targets)


# ---- classes


class FusedSequential(nn.Sequential):
    """Runs the chains behind the transposed convolutions of a sequence fused."""

    def forward(self, input: Tensor) -> Tensor:
        if is_scripting():  # TorchScript compiles this branch alone, in which the layers run one by one
            for module in self:
                input = module(input)
        else:
            input = _run_sequence(self, input)
        return input


setattr(FusedSequential, BASE, nn.Sequential)
_SEQUENCE = Signature(nn.Sequential.forward)


def _run_sequence(sequence: FusedSequential, input: Tensor) -> Any:
    if torch.compiler.is_compiling() or plain.forward_is_replaced(nn.Sequential):
        return run_in_a_row(sequence, input)
    return run(sequence, nn.Sequential.forward, _SEQUENCE, run_in_a_row, (input,), {})


_derived: weakref.WeakKeyDictionary[type[nn.Module], type[nn.Module]] = weakref.WeakKeyDictionary()


def fused_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns the class of modules of class `kind` whose chains run fused."""
    if kind is nn.Sequential:
        return FusedSequential
    if BASE in kind.__dict__:
        return kind
    found = _derived.get(kind)
    if found is None:
        contents = {
            BASE: kind,
            "forward": _fused_forward(kind),
            "__reduce_ex__": _reduced,
            "__module__": kind.__module__,
        }
        make: Any = type(kind)  # the metaclass
        found = _derived[kind] = make(f"Fused{kind.__name__}", (kind,), contents)
    return found


def _fused_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    """Returns a forward that looks like the one of `kind` to all who read its source: TorchScript compiles that."""
    written: Any = kind.forward
    signature = Signature(written)
    fallback = run_in_a_row if written is nn.Sequential.forward else written
    is_compiling, run_fused = torch.compiler.is_compiling, run

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or kind.forward is not written:
            return (fallback if kind.forward is written else kind.forward)(self, *args, **kwargs)
        return run_fused(self, written, signature, fallback, args, kwargs)

    found = types.FunctionType(forward.__code__, written.__globals__, "forward", None, forward.__closure__)
    return functools.update_wrapper(found, written)


def _reduced(module: nn.Module, protocol: Any) -> Any:
    """Returns what pickles and copies a module with a derived class, which has no name that could be imported."""
    kind = type(module)
    base: Any = next(each for each in kind.__mro__ if BASE in each.__dict__)
    usual: Any = super(base, module).__reduce_ex__(protocol)
    if kind is base and usual[0] is vars(copyreg)["__newobj__"] and usual[1] == (kind,):
        return rebuilt, (kind.__dict__[BASE],), *usual[2:]
    return usual


def rebuilt(kind: type[nn.Module]) -> nn.Module:
    """Returns an empty module with the derived class of `kind`, which pickle fills."""
    found = fused_class(kind)
    return found.__new__(found)


def fuse(module: nn.Module) -> None:
    """Makes a module run its chains fused; a module that does so already gets no further class."""
    if fused_base(module) is None:
        module.__class__ = fused_class(type(module))
        module.__dict__[PLANS] = Plans(module)


def fused_base(module: nn.Module) -> tuple[type[nn.Module], type[nn.Module]] | None:
    """Returns the derived class that a module has and the class it is derived from, or None if it has none."""
    for kind in type(module).__mro__:
        if BASE in kind.__dict__:
            return kind, kind.__dict__[BASE]
    return None


def norms(model: nn.Module) -> dict[nn.Module, nn.GroupNorm]:
    """Returns the convolutions of a fused model whose chain begins with a ReLU and a GroupNorm, with the norm."""
    found: dict[nn.Module, nn.GroupNorm] = {}
    for module in model.modules():
        if fused_base(module) is None:
            continue
        function = written_forward(type(module))
        for example in Signature(function).examples():
            with contextlib.suppress(CannotRead):
                found |= Explored(module, function, example, lambda layer: type(layer) is ConvTranspose3d).norms()
    return found
