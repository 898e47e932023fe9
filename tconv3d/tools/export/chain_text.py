"""Writes the Python of a convolution with what follows it: the function that `ModelNew` calls, and its gradients."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import product

from ..bench.layers import Layer
from .chain import Chain, Training
from .wrapping import wrapped

CHAIN = '''def chain({parameters}) -> Tensor:
    """The transposed convolution of x and what follows it, by the kernels of this file{without}."""
    if torch.is_autocast_enabled(DEVICE):
        raise RuntimeError("this file does not know autocast: cast input and parameters to one type")
    check({typed})
{check_shapes}{choice}    return inferred({arguments})
'''
CHOICE = """    if records_gradients({arguments}):
        return Chain.apply({arguments})
"""
APPLIED = """

class Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, {parameters}) -> Tensor:
{forward}
{backward}
"""
RECORDED = """        layout = layout_of(x)
{ready}        kernels = compiled(x, layout)
        ctx.layout = layout
{lines}"""
RECORDED_LINES = """{lines}        ctx.save_for_backward({saved})
        return {result}
"""
BACKWARD = """    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        {saved} = ctx.saved_tensors
        dy = {ready}
        kernels = compiled(x, ctx.layout)
        wanted = ctx.needs_input_grad
{lines}"""
BACKWARD_LINES = """{lines}{together}        return (
            kernels.input_grad({dz}, weight) if wanted[0] else None,
            kernels.weight_grad({dz}, x) if wanted[1] else None,
{bias_gradient}{others}        )
"""
INFERRED = '''

def inferred({parameters}) -> Tensor:
    """A call that records no gradients."""
    layout = layout_of(x)
{ready}    kernels = compiled(x, layout)
{lines}
'''
KEPT = '''
KEPT: dict[str, Any] = {{}}  # what `prepared` computed last, and from which parameters


def kept({first}*parameters: Tensor) -> tuple[Tensor, ...]:
    """What `prepared` computes, again only after a parameter was written or replaced."""
    if any(each.is_inference() for each in parameters):  # such tensors do not count how often they are written
        return prepared({given}*parameters)
    seen = {seen}
    if KEPT.get("seen") != seen:
        held = parameters, [each.detach() for each in parameters]  # so that no other tensor gets their addresses
        KEPT.update(seen=seen, held=held, found=prepared({given}*parameters))
    return KEPT["found"]


def prepared({first}{parameters}) -> tuple[Tensor, ...]:
    """What depends on parameters alone: weights that have what follows in them, and vectors."""
{lines}
'''
CHECK_SHAPES = """

def check_shapes(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != SHAPES[name]:
            raise ValueError(f"this file was exported for {name} of shape {SHAPES[name]}, got {tuple(tensor.shape)}")
"""


def chain_text(chain: Chain, layer: Layer, together: bool, forward_only: bool, no_backward: str) -> str:
    """Returns the functions of a chain; `together` says whether one operation computes all of its gradients."""
    arguments, parameters = ", ".join(chain.names), _parameters(chain.names)
    applied = forward_only or chain.trains
    calls = ", ".join(f"{name}={name}" for name in chain.shapes)
    ready = _ready(chain, layer)
    text = CHAIN.format(
        arguments=arguments,
        parameters=parameters,
        without="" if applied else ", without gradients",
        typed=", ".join(name for name in chain.names if name not in chain.counted),
        check_shapes=f"    check_shapes({calls})\n" if calls else "",
        choice=CHOICE.format(arguments=arguments) if applied else "",
    )
    if applied:
        text += APPLIED.format(
            parameters=parameters,
            forward=_recorded(chain, ready) if chain.trains else f"        return inferred({arguments})\n",
            backward=_backward(chain, layer, together) if chain.trains else no_backward,
        )
    kept, prepared = _kept(chain)
    inferred = [_indented([*call, *branch.inferred], 4) for call, branch in zip(kept, chain.branches, strict=True)]
    lines = _branched(chain, inferred, "x", "layout").rstrip("\n")
    text += INFERRED.format(parameters=parameters, ready=_indented(ready, 4), lines=lines) + prepared
    text += CHECK_SHAPES if calls else ""
    return "\n".join(wrapped(text.rstrip("\n").split("\n")))


def shapes_text(chain: Chain) -> str:
    """Returns the constant with the shapes of parameters and inputs besides those of the convolution."""
    if not chain.shapes:
        return ""
    return "SHAPES = {\n" + "".join(f'    "{name}": {shape},\n' for name, shape in chain.shapes.items()) + "}\n"


def _parameters(names: Sequence[str]) -> str:
    return ", ".join(f"{name}: Tensor" for name in names)


def _ready(chain: Chain, layer: Layer) -> list[str]:
    """Returns the lines that lay tensors out as the kernels read them."""
    bias = [("bias", "dense(bias)")] if layer.bias else []
    both = [("x", "ready(x, layout)"), ("weight", "ready(weight, layout)"), *bias]
    lines = [f"{', '.join(name for name, _ in both)} = {', '.join(text for _, text in both)}"]
    return lines + [
        f"{name} = {'ready(' + name + ', layout)' if len(chain.shapes[name]) == 5 else 'dense(' + name + ')'}"
        for name in chain.aligned
    ]


def _branched(chain: Chain, texts: Sequence[str], tensor: str, layout: str) -> str:
    """Returns the texts of the branches, each of which ends in a return; all but the last have a condition."""
    every = [each for branch in chain.branches for each in branch.chosen]
    chosen: dict[str, list[tuple[str, str]]] = {}
    for text, branch in zip(texts, chain.branches, strict=True):
        chosen.setdefault(text, []).extend(branch.chosen if text else [])
    *first, last = [text for text in chosen if text] or [""]
    found = ""
    for text in first:
        indent = " " * (len(text) - len(text.lstrip()))
        found += f"{indent}if {_condition(chosen[text], every, tensor, layout)}:\n{textwrap.indent(text, ' ' * 4)}"
    return found + last


def _condition(chosen: Sequence[tuple[str, str]], every: Sequence[tuple[str, str]], tensor: str, layout: str) -> str:
    """Writes that a tensor has one of the chosen types and layouts."""
    types, layouts = (list(dict.fromkeys(each[i] for each in chosen)) for i in (0, 1))
    if set(product(types, layouts)) != set(chosen):
        pairs = ", ".join(f'(torch.{dtype}, "{name}")' for dtype, name in chosen)
        return f"({tensor}.dtype, {layout}) in ({pairs})"
    conditions = []
    if set(types) != {dtype for dtype, _ in every}:
        listed = ", ".join(f"torch.{dtype}" for dtype in types)
        conditions.append(f"{tensor}.dtype in ({listed})" if len(types) > 1 else f"{tensor}.dtype == {listed}")
    if set(layouts) != {name for _, name in every}:
        conditions.append(f'{layout} == "{layouts[0]}"')
    return " and ".join(conditions)


def _trainings(chain: Chain) -> list[Training]:
    return [branch.training for branch in chain.branches if branch.training is not None]


def _recorded(chain: Chain, ready: Sequence[str]) -> str:
    texts = [
        RECORDED_LINES.format(
            lines=_indented(each.forward, 8),
            saved=", ".join(["x", "weight", *each.saved.values(), *each.used]),
            result=each.result,
        )
        for each in _trainings(chain)
    ]
    return RECORDED.format(ready=_indented(ready, 8), lines=_branched(chain, texts, "x", "layout"))


def _backward(chain: Chain, layer: Layer, together: bool) -> str:
    trainings = _trainings(chain)
    saved = [[*each.saved, *each.used] for each in trainings]
    same = all(each == saved[0] for each in saved)
    texts = []
    for names, training in zip(saved, trainings, strict=True):
        unpacked = "" if same else f"        {_tuple(names)} = saved\n"
        texts.append(unpacked + _gradient_lines(chain, training, layer, together))
    return BACKWARD.format(
        saved=", ".join(["x", "weight", *(saved[0] if same else ["*saved"])]),
        ready="ready(dy, ctx.layout)" if trainings[0].volume else "dense(dy)",
        lines=_branched(chain, texts, "x", "ctx.layout"),
    ).rstrip("\n")


def _gradient_lines(chain: Chain, training: Training, layer: Layer, together: bool) -> str:
    others = [training.gradients.get(name, "None") for name in chain.names if name not in ("x", "weight", "bias")]
    count = 3 if layer.bias else 2
    further = f", {', '.join(others)}" if others else ""
    called = f"kernels.backward({training.dz}, x, weight)"
    at_once = f"""        if all(wanted[:{count}]):
            return {f"*{called}{further}" if others else called}
"""
    return BACKWARD_LINES.format(
        lines=_indented(training.backward, 8),
        together=at_once if together else "",
        dz=training.dz,
        bias_gradient=f"            kernels.bias_grad({training.dz}) if wanted[2] else None,\n" if layer.bias else "",
        others="".join(f"            {each},\n" for each in others),
    )


def _kept(chain: Chain) -> tuple[list[list[str]], str]:
    """Returns the line of each branch that takes what depends on parameters alone, and the functions it calls."""
    constants = [branch.constants for branch in chain.branches]
    names = [name for name in chain.names if any(each and name in each.names for each in constants)]
    if not names:
        return [[] for _ in constants], ""
    texts = [_indented([*each.lines, f"return {_tuple(each.results)}"], 4) if each else "" for each in constants]
    lines = _branched(chain, texts, names[0], "layout")
    given = "layout, " if 'layout == "' in lines or ", layout) in" in lines else ""
    first = "layout: str, " if given else ""
    call = f"kept({given}{', '.join(names)})"
    calls = [[f"{_tuple(each.results)} = {call}"] if each else [] for each in constants]
    each = "(id(each), each.data_ptr(), each._version) for each in parameters"
    seen = f"[{given}*({each})]" if given else f"[{each}]"
    text = KEPT.format(first=first, given=given, seen=seen, parameters=_parameters(names), lines=lines.rstrip("\n"))
    return calls, f"\n{text}"


def _tuple(names: Sequence[str]) -> str:
    return f"({names[0]},)" if len(names) == 1 else ", ".join(names)


def _indented(lines: Sequence[str], columns: int) -> str:
    return textwrap.indent("".join(f"{line}\n" for line in lines), " " * columns)
