"""Writes recorded steps as lines of Python: calls of the file's operations, and PyTorch's operators between them.

This module knows operators and names, not what they compute.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .passes import NotExportableError, Operation
from .recording import Recording, Ref, Step

aten = torch.ops.aten

INLINE = 60  # columns up to which an expression may grow before it gets a line and a name of its own
INFIX = {aten.add: "+", aten.sub: "-", aten.mul: "*", aten.div: "/", aten.mm: "@", aten.bmm: "@", aten.pow: "**"}
VIEWS = (aten.view, aten._unsafe_view, aten.reshape)
LISTED = {**dict.fromkeys(VIEWS, "reshape"), aten.expand: "expand", aten.permute: "permute"}
CHEAP = (*LISTED, aten.unsqueeze, aten.squeeze, aten.detach, aten.alias, aten.select, aten.slice)
MADE = (aten.zeros, aten.ones, aten.full, aten.empty, aten.arange, aten.scalar_tensor, aten.empty_strided)
FUNCTIONS = (aten.stack, aten.cat, aten.where, aten.var_mean)  # whose methods are missing or take other arguments
DROPPED = ("layout", "pin_memory", "non_blocking", "implicit")


@dataclass(frozen=True)
class Text:
    """Holds an expression; one with an operator between operands needs parentheses inside another."""

    text: str
    infix: bool = False

    @property
    def inside(self) -> str:
        return f"({self.text})" if self.infix else self.text


class Writer:
    """Writes some of a recording's steps; `known` are the tensors that have names before."""

    def __init__(self, recording: Recording, known: Mapping[Ref, str], like: str) -> None:
        self.recording, self.like = recording, like  # the name of a tensor with the device and the type of new ones
        self.device = f"{like}.device"
        self.values: dict[Ref, Text] = {ref: Text(name) for ref, name in known.items()}
        self.taken = set(known.values())
        self.lines: list[str] = []
        self.viewed: dict[Ref, Ref] = {}  # tensors that are written as another one in a new shape

    def write(self, steps: Sequence[Step], needed: Collection[Ref]) -> None:
        """Writes steps as lines. Tensors in `needed` are used after them and get names."""
        uses = _uses(steps)
        written = {ref for step in self.recording.steps for ref in step.writes}
        for step in steps:
            if self._is_same(step):
                self.values[step.results[0]] = self._value(step.args[0])
                continue
            if step.target is aten.unbind.int and step.args[1:] in ((), (0,)):
                self._unbound(step)
                continue
            text = self._step(step)
            single = len(step.results) == 1 and not step.writes and not isinstance(step.target, Operation)
            ref = step.results[0]
            calm = not written & {*step.refs, ref}
            if single and calm and uses.get(ref, 0) <= 1 and ref not in needed and len(text.text) < INLINE:
                self.values[ref] = text
                if step.target.overloadpacket in VIEWS:
                    self.viewed[ref] = step.args[0]
                continue
            if step.writes and not isinstance(step.target, Operation):
                self.lines.append(text.text)
                continue
            names = [self._name(ref, step) for ref in step.results]
            self.lines.append(f"{', '.join(names)} = {text.text}")

    def of(self, value: Any) -> str:
        """Writes a result of the recording, tensors or nothing."""
        if isinstance(value, Ref):
            return self._value(value).text
        if isinstance(value, (tuple, list)):
            return ", ".join(self.of(each) for each in value)
        return repr(value)

    def _name(self, ref: Ref, step: Step) -> str:
        if ref in self.values and step.writes:
            return self.values[ref].text
        if isinstance(step.target, Operation):
            stem = step.target.results[step.results.index(ref)].name
        else:
            stem = {aten.stack: "vectors"}.get(step.target.overloadpacket, "value")
        self.values[ref] = Text(self._free(stem))
        return self.values[ref].text

    def _is_same(self, step: Step) -> bool:
        """Tells whether a step gives its operand again, in the same shape and type."""
        if isinstance(step.target, Operation) or step.writes or not step.args or not isinstance(step.args[0], Ref):
            return False
        packet = step.target.overloadpacket
        before, after = (self.recording.tensor(ref) for ref in (step.args[0], step.results[0]))
        if packet in (aten.detach, aten.alias):
            return True
        if packet is aten.div and len(step.args) == 2 and step.args[1] == 1:
            return before.dtype == after.dtype
        if packet is aten.permute:
            return list(step.args[1]) == list(range(before.dim()))
        return packet in (*VIEWS, aten.expand) and before.shape == after.shape

    def _unbound(self, step: Step) -> None:
        """Names the parts of a tensor along its first dimension by their index."""
        whole = self._value(step.args[0])
        if not whole.text.isidentifier():
            name = self._free("parts")
            self.lines.append(f"{name} = {whole.text}")
            whole = Text(name)
        self.values.update({ref: Text(f"{whole.text}[{i}]") for i, ref in enumerate(step.results)})

    def _free(self, stem: str) -> str:
        name = next(each for each in (stem, *(f"{stem}_{i}" for i in range(2, 1000))) if each not in self.taken)
        self.taken.add(name)
        return name

    # ---- expressions

    def _value(self, value: Any) -> Text:
        if isinstance(value, Ref):
            if value in self.values:
                return self.values[value]
            if value in self.recording.constants:
                data = self.recording.constants[value]
                if self.recording.tensor(value).is_meta:
                    return self._placed(data)
                kind = "" if data.dtype in (torch.int64, torch.bool) else f", dtype={data.dtype}"
                return Text(f"torch.tensor({data.tolist()}{kind})")
            raise NotExportableError("what follows the convolution uses a tensor that is no parameter of the model")
        if isinstance(value, (tuple, list)):
            return Text(f"[{', '.join(self._value(each).text for each in value)}]")
        if isinstance(value, float) and not math.isfinite(value):
            return Text(f'float("{value}")')
        if isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.memory_format)):
            return Text(repr(value))
        raise NotExportableError(f"what follows the convolution has the constant {value!r}")

    def _placed(self, data: Tensor) -> Text:
        """Writes numbers of a graph that are on the device, 0, 1, 2 and so on if they are these."""
        flat = data.reshape(-1).tolist()
        given = f"arange({len(flat)}" if flat == list(range(len(flat))) else f"tensor({flat}"
        return Text(f"torch.{given}, device={self.device}).reshape({', '.join(map(str, data.shape))})")

    def _step(self, step: Step) -> Text:
        if isinstance(step.target, Operation):
            over = "_" if step.writes else ""
            given = ", ".join(self._value(each).text for each in step.args)
            return Text(f"kernels.{step.target.name}{over}({given})")
        packet = step.target.overloadpacket
        args, options = list(step.args), {k: v for k, v in step.options.items() if k not in DROPPED and v is not None}
        if packet in INFIX and len(args) == 2 and not options:
            left, right = (self._value(each).inside for each in args)
            return Text(f"{left} {INFIX[packet]} {right}", infix=True)
        if packet is aten.neg:
            return Text(f"-{self._value(args[0]).inside}", infix=True)
        if packet is aten._to_copy:
            return self._cast(args[0], options)
        if packet in LISTED:
            sizes = ", ".join(map(str, args[1]))
            if packet in VIEWS:
                args[0] = self.viewed.get(args[0], args[0])
            return Text(f"{self._value(args[0]).inside}.{LISTED[packet]}({sizes})")
        if packet is aten.slice and len(args) >= 4 and (len(args) < 5 or args[4] == 1):
            dim, start = args[1], args[2]
            size = self.recording.tensor(step.results[0]).shape[dim]
            return Text(f"{self._value(args[0]).inside}.narrow({dim}, {start}, {size})")
        return self._call(step, packet, args, options)

    def _cast(self, source: Any, options: dict[str, Any]) -> Text:
        """Writes a cast to another type, or a copy to the device of the input."""
        before, given = self.recording.tensor(source), []
        if "device" in options and options["device"] != before.device:
            given.append(self.device)
        if "dtype" in options and options["dtype"] != before.dtype:
            own = f"torch.{self.recording.variant.dtype}"
            given.append(repr(options["dtype"]).replace(own, f"{self.like}.dtype" if "16" in own else own))
        if "memory_format" in options and options["memory_format"] is not torch.preserve_format:
            given.append(f"memory_format={options['memory_format']}")
        return Text(f"{self._value(source).inside}.to({', '.join(given)})")

    def _call(self, step: Step, packet: Any, args: list[Any], options: dict[str, Any]) -> Text:
        """Writes a call: a method where a tensor has one of this name, otherwise PyTorch's function or operator."""
        name = packet.__name__
        options.pop("device", None)
        more = [f"{key}={self._value(each).text}" for key, each in options.items()]
        if packet in MADE:
            given = [self._value(each).text for each in args]
            return Text(f"torch.{name}({', '.join([*given, *more, f'device={self.device}'])})")
        if (
            isinstance(args[0], Ref)
            and hasattr(Tensor, name)
            and not name.startswith("_")
            and packet not in FUNCTIONS
        ):
            given = [self._value(each).text for each in args[1:]]
            return Text(f"{self._value(args[0]).inside}.{name}({', '.join([*given, *more])})")
        given = [self._value(each).text for each in args]
        overload = step.target._overloadname
        where = f"torch.{name}" if packet in FUNCTIONS else ""
        where = where or f"torch.ops.aten.{name}" + (f".{overload}" if overload != "default" else "")
        return Text(f"{where}({', '.join([*given, *more])})")


def _uses(steps: Iterable[Step]) -> dict[Ref, int]:
    found: dict[Ref, int] = {}
    for step in steps:
        for ref in step.refs:
            found[ref] = found.get(ref, 0) + 1
    return found


def divided(recording: Recording, moving: Collection[Ref]) -> tuple[list[Step], list[Step]]:
    """Returns the steps that depend on parameters alone, and those of every call; `moving` are inputs of every call.

    Views of parameters cost nothing; they are in both lists where both need them.
    """
    changing = {*moving, *(ref for step in recording.steps for ref in step.writes)}
    views: set[Ref] = set(recording.inputs)
    constant: list[Step] = []
    others: list[Step] = []
    for step in recording.steps:
        if isinstance(step.target, Operation) or step.writes or any(ref in changing for ref in step.refs):
            changing.update(step.results)
            others.append(step)
            continue
        constant.append(step)
        if step.target.overloadpacket in CHEAP and all(ref in views for ref in step.refs):
            views.update(step.results)
            others.append(step)
    return _needed(constant, {ref for step in others for ref in step.refs} - views), _needed(
        others, {recording.results}
    )


def _needed(steps: Sequence[Step], results: set[Ref]) -> list[Step]:
    """Returns the steps that results need, and those that write."""
    found: list[Step] = []
    for step in reversed(steps):
        if step.writes or results & set(step.results):
            results = results | set(step.refs)
            found.append(step)
    return found[::-1]
