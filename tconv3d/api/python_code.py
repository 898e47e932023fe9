"""Watches Python code that runs with symbols, and refuses what could run otherwise in another call.

While a function runs, every Python function that the user's code calls is looked at before it starts, and so is
every function of C. What the code reads besides its arguments (global variables, closures, attributes of modules and
classes) becomes a condition if it cannot change unseen, and is refused otherwise. This module knows the Python
language and which files of PyTorch do nothing but hand symbols on; it knows nothing of graphs.
"""

from __future__ import annotations

import builtins
import dis
import enum
import operator
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .conditions import Conditions, is_constant


class CannotRead(RuntimeError):
    """Says why a forward cannot be read."""

    conditions: Conditions  # which were met until then

    def __init__(self, why: str, conditions: Conditions | None = None) -> None:
        super().__init__(why)
        if conditions is not None:
            self.conditions = conditions


_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
# Files of PyTorch whose functions hand a symbol on and do nothing else.
_HANDED_ON = tuple(_TORCH + name for name in ("nn" + os.sep + "functional.py", "functional.py", "fx" + os.sep))
_JIT = _TORCH + "_jit_internal.py"  # only two functions of this file are known, see `_is_handed_on`
_ENUM = (enum.__file__, types.__file__)
_TRUSTED = ("torch", "math", "operator", "typing", "collections", "itertools", "builtins", "enum", "__future__")
_ALLOWED = frozenset(
    getattr(builtins, name)
    for name in (
        "len", "isinstance", "issubclass", "getattr", "hasattr", "min", "max", "sum", "abs", "any", "all", "sorted",
        "reversed", "round", "range", "enumerate", "zip", "map", "filter", "list", "tuple", "dict", "set",
        "frozenset", "int", "float", "bool", "str", "slice", "super", "iter", "next", "divmod", "pow", "object",
    )
)  # fmt: skip
_CONTAINERS = (str, bytes, int, float, bool, list, dict, tuple, set, frozenset, slice, range, torch.Size)
_REFUSED = {
    "BEFORE_WITH": "it has a with statement",
    "SETUP_WITH": "it has a with statement",
    "LOAD_SPECIAL": "it has a with statement",
    "BEFORE_ASYNC_WITH": "it has a with statement",
    "PUSH_EXC_INFO": "it catches exceptions",
    "SETUP_FINALLY": "it catches exceptions",
    "STORE_ATTR": "it sets an attribute",
    "DELETE_ATTR": "it deletes an attribute",
    "STORE_GLOBAL": "it sets a global variable",
    "DELETE_GLOBAL": "it deletes a global variable",
    "IMPORT_NAME": "it imports a module",
}
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_MARKS = {"_torchscript_modifier"}  # attributes of functions that TorchScript alone reads


class _Frozen:
    """Refuses to be written: what the copy of a list or a dictionary would otherwise lose."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise CannotRead("it writes to a list or a dictionary that it finds in an attribute")


_WRITERS = (
    "append extend insert remove pop clear sort reverse update setdefault popitem "
    "__setitem__ __delitem__ __iadd__ __imul__ __ior__"
)
_FrozenList: type[list[Any]] = type("_FrozenList", (_Frozen, list), dict.fromkeys(_WRITERS.split(), _Frozen._refuse))
_FrozenDict: type[dict[Any, Any]] = type(
    "_FrozenDict", (_Frozen, dict), dict.fromkeys(_WRITERS.split(), _Frozen._refuse)
)


class _Cell:
    """Lets a condition look into a closure as into a dictionary."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def get(self, name: str, default: Any) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # it is empty by now
            return default


class Watch:
    """Watches one run of the user's code."""

    def __init__(
        self, conditions: Conditions, method_of: Callable[[types.CodeType], types.FunctionType | None]
    ) -> None:
        self._conditions, self._method_of = conditions, method_of
        self._users: set[types.CodeType] = set()  # code that was looked at
        self._nested: set[types.CodeType] = set()  # code inside of it, whose free variables are local ones
        self._known: dict[types.CodeType, types.FunctionType] = {}
        self._classes: set[type] = set()  # classes whose attributes are conditions
        self._running = False
        self._called: Any = None  # the function of C that the user's code is calling

    def run(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Calls a Python function of the user."""
        if not isinstance(function, types.FunctionType):
            raise CannotRead("it is no plain function")
        self.knows(function)
        if self._running:
            return function(*arguments, **keywords)
        if sys.getprofile() is not None:
            raise CannotRead("a profiler of Python code is running")
        self._running = True
        sys.setprofile(self._event)
        try:
            return function(*arguments, **keywords)
        finally:
            sys.setprofile(None)
            self._running = False

    def forget(self) -> None:
        """Lets go of everything that was seen."""
        for held in (self._users, self._nested, self._known, self._classes):
            held.clear()
        del self._conditions, self._method_of

    def is_users(self, frame: types.FrameType) -> bool:
        """Tells whether a frame runs code of the user."""
        return frame.f_code in self._users

    def asks_for_a_class(self, frame: types.FrameType) -> bool:
        """Tells whether a frame runs code of the user that asks for the class of an object.

        PyTorch's functions ask too. They must get the true answer, because they read the memory of what they take for
        a tensor.
        """
        return self.is_users(frame) and self._called in (None, isinstance)

    def knows(self, function: types.FunctionType) -> None:
        """Makes conditions of what a function brings along: its closure, and the defaults of its arguments."""
        if function.__code__ in self._known or _is_handed_on(function.__code__):
            return
        if hasattr(function, "__wrapped__"):
            raise CannotRead(f"{function.__name__} is wrapped by a decorator")
        if not _MARKS.issuperset(function.__dict__):
            raise CannotRead(f"{function.__name__} has attributes, which may change unseen")
        self._conditions.length(function.__dict__)
        self._known[function.__code__] = function
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if not all(map(is_constant, defaults)):
            raise CannotRead(f"a default argument of {function.__name__} is no constant")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                try:
                    value = cell.cell_contents
                except ValueError:
                    raise CannotRead(f"the variable {name} of a closure has no value") from None
                self.value(_Cell(cell), name, value)

    def value(self, place: Any, name: str, value: Any, replaced: bool = False) -> Any:
        """Makes a condition of a value that was found, and returns what the code gets if it is `replaced`.

        A list or a dictionary is replaced by a copy that cannot be written.
        """
        if replaced and type(value) in (list, dict) and _has_constants(value):
            self._conditions.equal(value, type(value)(value))
            self._conditions.same(place, name, value)
            return _FrozenList(value) if type(value) is list else _FrozenDict(value)
        if isinstance(value, types.FunctionType):
            self.knows(value)
        elif isinstance(value, types.BuiltinFunctionType):
            if not _is_harmless(value):
                raise CannotRead(f"it uses {name}, of which nothing is known")
        elif isinstance(value, types.ModuleType):
            if not _is_trusted(value):
                raise CannotRead(f"it uses the module {name} as a value")
            return value
        elif isinstance(value, type):
            self._class(value)
        elif not is_constant(value):
            raise CannotRead(f"it reads {name}, a {type(value).__name__} that may change unseen")
        self._conditions.same(place, name, value)
        return value

    def _class(self, kind: type) -> None:
        """Makes conditions of the attributes of a class, which the code may read by any way from here on."""
        for base in kind.__mro__:
            if base in self._classes or issubclass(base, enum.Enum) or base.__module__.split(".")[0] in _TRUSTED:
                continue
            self._classes.add(base)
            self._conditions.length(base.__dict__)
            for name, found in list(base.__dict__.items()):
                # Methods and other descriptors are seen when they are called.
                if name.startswith("__") or name == "_abc_impl" or hasattr(type(found), "__get__"):
                    continue
                if type(found) in (list, dict) and _has_constants(found):
                    self._conditions.equal(found, type(found)(found))
                    self._conditions.same(base.__dict__, name, found)
                elif is_constant(found) or isinstance(found, type):
                    self.value(base.__dict__, name, found)
                else:
                    raise CannotRead(f"it uses the class {kind.__name__}, whose {name} may change unseen")

    # ---- what runs

    def _event(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code, caller = frame.f_code, frame.f_back
            if code not in self._users and (
                code in self._known or (caller is not None and caller.f_code in self._users)
            ):
                self._look_at(code, frame)
            if code in self._users:
                self._called = None
        elif frame.f_code in self._users:
            self._called = argument if event == "c_call" else None
            if event == "c_call" and not _is_harmless(argument):
                raise CannotRead(f"it calls {getattr(argument, '__qualname__', argument)}, of which nothing is known")

    def _look_at(self, code: types.CodeType, frame: types.FrameType) -> None:
        file = code.co_filename
        if file.startswith(_OURS) or _is_handed_on(code) or file in _ENUM:
            return
        if file.startswith(_TORCH):
            raise CannotRead(f"it calls {code.co_name} of {os.path.relpath(file, _TORCH)}")
        library = os.path.dirname(os.__file__) + os.sep
        if file.startswith(library) and "site-packages" not in file:
            raise CannotRead(f"it calls {code.co_name} of {os.path.basename(file)}")
        if code not in self._known and code not in self._nested:
            method = self._method_of(code)  # reached by `super()`
            if method is None:
                raise CannotRead(f"how it finds {code.co_name} cannot be seen")
            self.knows(method)
        self._scan(code, frame.f_globals)
        self._users.add(code)

    def _scan(self, code: types.CodeType, variables: dict[str, Any]) -> None:
        self._nested.update(each for each in code.co_consts if isinstance(each, types.CodeType))
        instructions = list(dis.get_instructions(code))
        for index, instruction in enumerate(instructions):
            name = instruction.opname
            if name in _REFUSED:
                raise CannotRead(_REFUSED[name])
            if name == "STORE_DEREF" and instruction.argval in code.co_freevars and code not in self._nested:
                raise CannotRead(f"it sets {instruction.argval}, a variable of a closure")
            if name in _ATTRIBUTE and instruction.argval.startswith("__"):
                raise CannotRead(f"it reads {instruction.argval}")
            if name in ("LOAD_GLOBAL", "LOAD_NAME"):
                self._global(instruction.argval, variables, instructions[index + 1 : index + 8])
            elif name == "IS_OP" or name.endswith(("_IF_NONE", "_IF_NOT_NONE")):
                _check_identity(code, instructions[:index], name)

    def _global(self, name: str, variables: dict[str, Any], following: Sequence[dis.Instruction]) -> None:
        if name not in variables:
            found = getattr(builtins, name, None)
            harmless = found in _ALLOWED or (isinstance(found, type) and issubclass(found, BaseException))
            if found is not None and not harmless:
                raise CannotRead(f"it uses {name}()")
            return
        place: Any = variables
        value = variables[name]
        rest = iter(following)
        while isinstance(value, types.ModuleType) and not _is_trusted(value):
            attribute = next(rest, None)
            if attribute is None or attribute.opname not in _ATTRIBUTE:
                raise CannotRead(f"it uses the module {name} as a value")
            self._conditions.same(place, name, value)
            place, name = vars(value), attribute.argval
            if name not in place:
                raise CannotRead(f"it reads {name} of a module, which is computed")
            value = place[name]
        self.value(place, name, value)
        attribute = next(rest, None)
        while isinstance(value, types.ModuleType) and attribute is not None and attribute.opname in _ATTRIBUTE:
            place, name, attribute = vars(value), attribute.argval, next(rest, None)  # somebody may replace it
            if name not in place:
                return
            value = place[name]
            self._conditions.same(place, name, value)
        if attribute is None or attribute.opname not in _ATTRIBUTE or not isinstance(value, type):
            return
        if not issubclass(value, enum.Enum) and not value.__module__.startswith("torch"):
            self._class_attribute(value, attribute.argval)

    def _class_attribute(self, owner: type, name: str) -> None:
        place = next((base.__dict__ for base in owner.__mro__ if name in base.__dict__), None)
        if place is None:
            raise CannotRead(f"it reads {name} of the class {owner.__name__}, which is computed")
        found = place[name]
        if isinstance(found, staticmethod):
            self.value(place, name, found.__func__)
            return
        self.value(place, name, found)


def _check_identity(code: types.CodeType, before: Sequence[dis.Instruction], name: str) -> None:
    """Refuses comparisons with `is` unless an argument or an attribute of `self` is compared with None.

    A symbol is never None, but a result of a module that it stands for may be.
    """
    rest = list(before)
    if name == "IS_OP":
        if rest and (rest[-1].opname != "LOAD_CONST" or rest[-1].argval is not None):
            raise CannotRead("it compares objects with `is`")
        rest.pop()
    attributes = 0
    while rest and rest[-1].opname in _ATTRIBUTE:
        rest.pop()
        attributes += 1
    loaded = _names(rest[-1])[-1] if rest and rest[-1].opname.startswith("LOAD_FAST") else None
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    stored = {name for each in dis.get_instructions(code) if "STORE_FAST" in each.opname for name in _names(each)}
    if loaded not in arguments or loaded in stored:
        raise CannotRead("it compares a result with None")
    if attributes and loaded != arguments[0]:
        raise CannotRead("it compares an attribute of an argument with None")


def _names(instruction: dis.Instruction) -> tuple[str, ...]:
    """Returns the variables of an instruction; newer versions of Python have instructions with two."""
    return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)


def _has_constants(value: Any) -> bool:
    return all(map(is_constant, value)) and (type(value) is list or all(map(is_constant, value.values())))


def _is_handed_on(code: types.CodeType) -> bool:
    if code.co_filename == _JIT:
        return code.co_name in ("is_scripting", "fn")
    return code.co_filename.startswith(_HANDED_ON)


def _is_trusted(module: types.ModuleType) -> bool:
    return module.__name__.split(".")[0] in _TRUSTED


def _is_harmless(function: Any) -> bool:
    """Tells whether a function of C hands symbols on, or computes with Python's own numbers and containers."""
    if _in_allowed(function):
        return True
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    spaces: tuple[Any, ...] = (torch._C._VariableFunctions, torch._C._nn, torch.special)
    if any(getattr(space, name, None) == function for space in spaces):
        return True
    if getattr(function, "__module__", None) in ("_operator", "math") or function in vars(operator).values():
        return True
    kind = getattr(function, "__objclass__", None) or (owner if isinstance(owner, type) else type(owner))
    return kind in (*_CONTAINERS, _FrozenList, _FrozenDict) and owner is not None


def _in_allowed(function: Any) -> bool:
    try:
        return function in _ALLOWED
    except TypeError:  # it cannot be hashed
        return False
