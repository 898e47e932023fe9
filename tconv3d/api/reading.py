"""Reads the `forward` of a module: runs it once with symbols for tensors, and writes down what it does as a graph.

The module itself is replaced by a stand-in, which sees every attribute that `forward` reads. What the graph depends
on is thereby known (`Conditions`): values of attributes, children, global variables. Modules that are called are
nodes of the graph, except for those that the caller wants opened: the modules of a sequence run in a row, and the
forward of a user's own module is read like the first one. Nothing of PyTorch is patched, so other threads may
run.

A `forward` is read only if its graph surely computes the same as long as the conditions hold. Everything that is not
known to be harmless is refused with the reason (`CannotRead`): control flow by values of tensors or by their sizes,
attributes that are written, context managers, exceptions that are caught, calls of functions that are not PyTorch's
and not the user's own code, random numbers and flags of Python. This module knows nothing of convolutions.
"""

from __future__ import annotations

import dis
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Attribute, GraphAppendingTracer, Proxy
from torch.nn.modules.module import Module
from torch.overrides import TorchFunctionMode

from .conditions import Conditions
from .python_code import CannotRead, Watch

TENSOR = object()  # stands for an argument that is a tensor
_PYTORCHS = (nn.Module, nn.Sequential, object)  # classes that nobody adds attributes to
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_STEADY = ("torch.nn.modules.", f"{__package__}.modules")  # classes that replace none of their attributes in a call


class Read:
    """Holds what was read of a module's forward."""

    def __init__(self, module: nn.Module) -> None:
        self.graph = fx.Graph()
        self.conditions = Conditions(module.__dict__)
        self.modules: dict[str, nn.Module] = {}  # the modules that the graph names
        self.opened: list[nn.Module] = []  # modules that were looked into


def read(
    module: nn.Module,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    opened: Callable[[nn.Module], bool | None],
    training: bool | None = None,
) -> Read:
    """Returns what `function(module, *arguments)` does; `TENSOR` stands for a tensor among the arguments.

    `function` is the forward of the module's class, or `nn.Sequential.forward`. `opened` tells which modules are
    looked into: True for sequences, False for others, and None for modules that become nodes. `training` is the mode
    of all modules, or None if each is in its own.
    """
    reader = _Reader(module, opened, training)
    found = reader.read
    names = list(inspect.signature(function).parameters)[1:]
    given = [
        reader.source(reader.read.graph.placeholder(name)) if value is TENSOR else value
        for name, value in zip(names, arguments, strict=True)
    ]
    me = reader.stand_in(module, "")
    try:
        if function is nn.Sequential.forward:
            result = reader.in_a_row(module, "", *given)
        else:
            result = reader.run(function, me, *given)
        found.graph.output(reader.create_arg(result))
    except CannotRead as error:
        error.conditions = found.conditions
        raise
    except Exception as error:  # a user's code may raise anything when it meets symbols
        raise CannotRead(f"{type(error).__name__}: {error}".splitlines()[0], found.conditions) from error
    finally:
        reader.forget()
    found.graph.lint()
    return found


class _Symbol(Proxy):
    """Stands for a value of a call; a tensor, if it comes from outside."""

    def __init__(self, node: fx.Node, tracer: _Reader, is_tensor: bool = False) -> None:
        super().__init__(node, tracer)
        self.__dict__["is_known_tensor"] = is_tensor

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that the user's code sees: `isinstance` asks for it."""
        reader: Any = self.tracer
        if not reader.watch.asks_for_a_class(sys._getframe(1)):
            return type(self)
        if self.__dict__["is_known_tensor"]:
            return Tensor
        raise CannotRead("it asks for the class of a result")

    def __getattr__(self, name: str) -> Any:
        if not hasattr(Tensor, name):
            reader: Any = self.tracer
            if reader.watch.is_users(sys._getframe(1)):
                raise CannotRead(f"it asks for {name} of a tensor, which somebody may have set")
            raise AttributeError(f"'Tensor' object has no attribute '{name}'")
        if not callable(getattr(Tensor, name)):  # read now: an operator in place may change it
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return _SymbolAttribute(self, name)

    def __iter__(self) -> Iterator[Any]:
        """Iterates where the user's code unpacks a known number of results.

        torch.fx does so too, but keeps the frames of all callers, and with them the model, until Python looks for
        circles.
        """
        me: Any = self
        caller = sys._getframe(1)
        unpacked = [each for each in dis.get_instructions(caller.f_code) if each.offset == caller.f_lasti]
        if unpacked and unpacked[0].opname == "UNPACK_SEQUENCE":
            return iter([me[index] for index in range(unpacked[0].argval)])
        found: Iterator[Any] = self.tracer.iter(self)
        return found

    def __str__(self) -> str:
        reader: Any = self.tracer
        if reader.watch.is_users(sys._getframe(1)):
            raise CannotRead("it makes text of a tensor or its sizes")
        return super().__repr__()

    __repr__ = __str__

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("tracer", "node"):
            object.__setattr__(self, name, value)
        else:
            raise CannotRead(f"it sets the attribute {name} of a tensor")


def _in_place(function: Callable[..., Any]) -> Callable[[_Symbol, Any], Any]:
    """Returns the method of a symbol for an operator such as `+=`, which writes to a tensor."""
    return lambda symbol, other: symbol.tracer.create_proxy("call_function", function, (symbol, other), {})


for _name in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split():  # noqa: SIM905
    setattr(_Symbol, f"__i{_name}__", _in_place(getattr(operator, f"i{_name}")))


class _SymbolAttribute(Attribute):
    """Stands for an attribute or a method of a value."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        reader: Any = self.tracer
        if not reader.watch.asks_for_a_class(sys._getframe(1)):
            return type(self)
        raise CannotRead("it asks for the class of a tensor's attribute")


class _NoTensors(TorchFunctionMode):
    """Refuses functions of PyTorch that get no symbol: they would be computed now, and not in later calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _has_symbol((args, kwargs)):
            name = getattr(func, "__name__", str(func))
            raise CannotRead(f"it calls {name} without a tensor of the call")
        return func(*args, **kwargs)


def _has_symbol(value: Any) -> bool:
    if issubclass(type(value), Proxy):
        return True
    if isinstance(value, (tuple, list)):
        return any(map(_has_symbol, value))
    if isinstance(value, dict):
        return any(map(_has_symbol, value.values()))
    return isinstance(value, slice) and any(map(_has_symbol, (value.start, value.stop, value.step)))


def _not_opened(module: nn.Module) -> bool | None:
    return None


_PLAIN = (str, int, float, bool, complex, torch.dtype, torch.device, torch.memory_format, torch.layout, type(None))


class _Reader(GraphAppendingTracer):
    """Runs a forward with symbols."""

    def __init__(self, module: nn.Module, opened: Callable[[nn.Module], bool | None], training: bool | None) -> None:
        self.read = Read(module)
        super().__init__(self.read.graph)
        self.record_stack_traces = False
        self.opened, self.training = opened, training
        self.watch = Watch(self.read.conditions, self._method_of)
        self._stand_ins: dict[int, _StandIn] = {}
        self._sources: dict[str, _Symbol] = {}
        self._inside: list[nn.Module] = []  # modules whose forwards run in the place of their calls, just now
        self._called: set[nn.Module] = set()  # modules that were called and may have changed their attributes
        self._read_of: dict[nn.Module, str] = {}  # modules of which tensors were read

    def forget(self) -> None:
        """Lets go of all modules: symbols and the reader hold each other until Python looks for such circles."""
        for each in self._stand_ins.values():
            object.__setattr__(each, "of", None)
        for held in (self._stand_ins, self._sources, self._inside, self._called, self._read_of):
            held.clear()
        self.opened = _not_opened
        self.watch.forget()
        del self.read

    # ---- what torch.fx asks

    def proxy(self, node: fx.Node) -> Proxy:
        return _Symbol(node, self)

    def create_arg(self, a: Any) -> Any:
        if issubclass(type(a), Proxy):
            return a.node
        if type(a) in (tuple, list, torch.Size):
            items = [self.create_arg(each) for each in a]
            return items if type(a) is list else tuple(items)
        if isinstance(a, tuple) and hasattr(a, "_fields"):
            return type(a)(*(self.create_arg(each) for each in a))
        if type(a) is dict and all(isinstance(key, str) for key in a):
            return {key: self.create_arg(value) for key, value in a.items()}
        if isinstance(a, slice):
            return slice(self.create_arg(a.start), self.create_arg(a.stop), self.create_arg(a.step))
        if isinstance(a, _PLAIN) or a is Ellipsis:
            return a
        raise CannotRead(f"it uses a value of the class {type(a).__name__}")

    def to_bool(self, obj: Proxy) -> bool:
        raise CannotRead("it decides by values or sizes of tensors")

    def iter(self, obj: Proxy) -> Iterator[Any]:
        raise CannotRead("it iterates over a tensor or its sizes")

    # ---- modules and their attributes

    def run(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Runs a function of the user, watched."""
        with _NoTensors():
            return self.watch.run(function, *arguments, **keywords)

    def source(self, node: fx.Node) -> Proxy:
        """Returns a symbol for a tensor from outside of the graph."""
        return _Symbol(node, self, is_tensor=True)

    def stand_in(self, module: nn.Module, path: str) -> _StandIn:
        found = self._stand_ins.get(id(module))
        if found is None:
            kind = type(module)
            for name in ("__getattr__", "__getattribute__", "__setattr__"):
                usual = getattr(object if name == "__getattribute__" else Module, name)
                if getattr(kind, name) is not usual:
                    raise CannotRead(f"{kind.__name__} has a {name} of its own")
            found = self._stand_ins[id(module)] = _StandIn(self, module, path)
            self.read.conditions.same(module.__dict__, "_modules", module._modules)
        return found

    def child(self, module: nn.Module, path: str, name: str) -> Any:
        """Returns the stand-in of a child, or None if the place is empty."""
        found = module._modules[name]
        if found is None:
            self.read.conditions.same(module._modules, name, None)
            return None
        self.read.conditions.child(module._modules, name, found)
        return self.stand_in(found, f"{path}.{name}" if path else name)

    def attribute(self, module: nn.Module, path: str, name: str) -> Any:
        """Returns what the user's code gets for an attribute of a module, and makes a condition of it."""
        own, kind, conditions = module.__dict__, type(module), self.read.conditions
        if name == "__class__":
            return kind
        if name == "training" and self.training is not None:
            return self.training
        if name in ("__dict__", "_modules", "_parameters", "_buffers"):
            raise CannotRead(f"it reads {name}")
        place: Any = {}
        for base in kind.__mro__:
            if name in base.__dict__:
                place = base.__dict__
                break
            if base not in _PYTORCHS:
                conditions.absent(base.__dict__, name)
        found = place.get(name)
        if isinstance(found, property):
            conditions.same(place, name, found)
            if found.fget is None:
                raise CannotRead(f"{name} cannot be read")
            return self.run(found.fget, self.stand_in(module, path))
        if name in own:
            return self._value(own, name, own[name], module, path)
        if name in place:
            conditions.absent(own, name)
            if isinstance(found, types.FunctionType):
                return self._method(place, name, found, self.stand_in(module, path))
            if isinstance(found, staticmethod):
                return self._method(place, name, found, None)
            return self._value(place, name, found, module, path)
        for kind_of_tensors in ("_parameters", "_buffers"):
            kept = own[kind_of_tensors]
            if name in kept:
                conditions.same(own, kind_of_tensors, kept)
                return self._value(kept, name, kept[name], module, path)
        if name in module._modules:
            return self.child(module, path, name)
        for kept in (own, own["_parameters"], own["_buffers"], own["_modules"]):
            conditions.absent(kept, name)
        raise AttributeError(f"'{kind.__name__}' object has no attribute '{name}'")

    def _method(self, place: Mapping[str, Any], name: str, found: Any, me: Any) -> Any:
        self.read.conditions.same(place, name, found)
        function = found.__func__ if isinstance(found, staticmethod) else found
        if not isinstance(function, types.FunctionType):
            raise CannotRead(f"{name} is no plain method")
        self.watch.knows(function)
        return function if me is None else types.MethodType(function, me)

    def _value(self, place: Mapping[str, Any], name: str, value: Any, module: nn.Module, path: str) -> Any:
        if isinstance(value, Tensor):
            self.read.conditions.tensor(place, name)
            self._read_of[module] = name
            target = f"{path}.{name}" if path else name
            if target not in self._sources:
                self._sources[target] = _Symbol(self.read.graph.get_attr(target), self, is_tensor=True)
            return self._sources[target]
        if module in self._called:
            raise CannotRead(f"it reads {name} of a module that it has called, which may have changed it")
        if isinstance(value, nn.Module):  # kept behind PyTorch's back, in a list for example
            raise CannotRead(f"{name} is a module that is not registered")
        return self.watch.value(place, name, value, replaced=True)

    def _method_of(self, code: types.CodeType) -> types.FunctionType | None:
        """Returns the method of a module's class that has this code, and makes a condition of it."""
        for kind in {type(_reader_of(each)[1]) for each in self._stand_ins.values()}:
            for base in kind.__mro__:
                for name, found in base.__dict__.items():
                    if isinstance(found, types.FunctionType) and found.__code__ is code:
                        self.read.conditions.same(base.__dict__, name, found)
                        return found
        return None

    # ---- calls

    def call(self, module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        """Records a call of a module, or looks into the module."""
        if not path:
            raise CannotRead("it calls itself")
        in_a_row = self.opened(module)
        if in_a_row is False:
            return self.in_line(module, path, args, kwargs)
        if in_a_row and len(args) == 1 and not kwargs:
            return self.in_a_row(module, path, *args)
        self.read.modules[path] = module
        inside = list(module.modules())
        if not all(type(each).__module__.startswith(_STEADY) for each in inside):
            for each in inside:
                if each in self._read_of:
                    name = self._read_of[each]
                    raise CannotRead(f"it reads {name} of a module that it then calls, which may replace it")
            self._called.update(inside)
        return self.create_proxy("call_module", path, args, kwargs)

    def in_line(self, module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        """Runs the forward of a module in the place of its call."""
        if any(module is each for each in self._inside):
            raise CannotRead("a module calls itself")
        self.read.opened.append(module)
        self._inside.append(module)
        forward = self.attribute(module, path, "forward")
        if not isinstance(forward, types.MethodType):
            raise CannotRead(f"the forward of {type(module).__name__} is no plain method")
        result = self.run(forward.__func__, forward.__self__, *args, **kwargs)
        self._inside.pop()
        return result

    def in_a_row(self, module: nn.Module, path: str, input: Any) -> Any:
        self.read.opened.append(module)
        self.stand_in(module, path)
        for each in self.children(module, path):
            if each is None:
                raise CannotRead("a sequence has an empty place")
            input = each(input)
        return input

    def children(self, module: nn.Module, path: str) -> list[Any]:
        self.read.conditions.order(module._modules)
        return [self.child(module, path, name) for name in list(module._modules)]


def _reader_of(stand_in: Any) -> tuple[_Reader, nn.Module, str]:
    found: tuple[_Reader, nn.Module, str] = object.__getattribute__(stand_in, "of")
    return found


class _StandIn:
    """Takes a module's place while its forward is read."""

    __slots__ = ("__weakref__", "of")

    def __init__(self, reader: _Reader, module: nn.Module, path: str) -> None:
        object.__setattr__(self, "of", (reader, module, path))

    def __getattribute__(self, name: str) -> Any:
        reader, module, path = _reader_of(self)
        if isinstance(module, (nn.ModuleDict,)) and name in ("keys", "values", "items"):
            children = dict(zip(module._modules, reader.children(module, path), strict=True))
            return getattr(children, name)
        return reader.attribute(module, path, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise CannotRead(f"it sets the attribute {name}")

    def __delattr__(self, name: str) -> None:
        raise CannotRead(f"it deletes the attribute {name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reader, module, path = _reader_of(self)
        return reader.call(module, path, args, kwargs)

    def __bool__(self) -> bool:
        return not isinstance(_reader_of(self)[1], _CONTAINERS) or len(self) > 0

    def __len__(self) -> int:
        return len(_listed(self))

    def __iter__(self) -> Iterator[Any]:
        module = _reader_of(self)[1]
        return iter(list(module._modules)) if isinstance(module, nn.ModuleDict) else iter(_listed(self))

    def __contains__(self, name: Any) -> bool:
        reader, module, path = _reader_of(self)
        if not isinstance(module, nn.ModuleDict):
            raise CannotRead("it looks for a value in a module")
        reader.children(module, path)
        return name in module._modules

    def __getitem__(self, index: Any) -> Any:
        module, listed = _reader_of(self)[1], _listed(self)
        if isinstance(module, nn.ModuleDict):
            return listed[list(module._modules).index(index)]
        if not isinstance(index, int):
            raise CannotRead("it takes a part of a list of modules")
        return listed[index]


def _listed(stand_in: _StandIn) -> list[Any]:
    """Returns the stand-ins of a container's children."""
    reader, module, path = _reader_of(stand_in)
    for kind in _CONTAINERS:
        if isinstance(module, kind):
            for name in ("__iter__", "__len__", "__getitem__"):
                if getattr(type(module), name) is not getattr(kind, name):
                    raise CannotRead(f"{type(module).__name__} has a {name} of its own")
            return reader.children(module, path)
    raise CannotRead(f"it uses a {type(module).__name__} as a container")
