"""Writes the Python of a convolution with what follows it: the function that `ModelNew` calls, and its gradients."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ..bench.layers import Layer
from .chain import Chain, Constants, Training
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
{lines}        ctx.layout = layout
        ctx.save_for_backward({saved})
        return {result}
"""
BACKWARD = """    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        {saved} = ctx.saved_tensors
        dy = {ready}
        kernels = compiled(x, ctx.layout)
{lines}        wanted = ctx.needs_input_grad
{together}        return (
            kernels.input_grad({dz}, weight) if wanted[0] else None,
            kernels.weight_grad({dz}, x) if wanted[1] else None,
{bias_gradient}{others}        )"""
INFERRED = '''

def inferred({parameters}) -> Tensor:
    """A call that records no gradients."""
    layout = layout_of(x)
{ready}    kernels = compiled(x, layout)
{lines}
'''
KEPT = '''
KEPT: dict[str, Any] = {{}}  # what `prepared` computed last, and from which parameters


def kept(*parameters: Tensor) -> tuple[Tensor, ...]:
    """What `prepared` computes, again only after a parameter was written or replaced."""
    if any(each.is_inference() for each in parameters):  # such tensors do not count how often they are written
        return prepared(*parameters)
    seen = [(id(each), each.data_ptr(), each._version) for each in parameters]
    if KEPT.get("seen") != seen:
        KEPT.update(seen=seen, parameters=parameters, found=prepared(*parameters))
    return KEPT["found"]


def prepared({parameters}) -> tuple[Tensor, ...]:
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
    applied = forward_only or chain.training is not None
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
        training = chain.training
        text += APPLIED.format(
            parameters=parameters,
            forward=f"        return inferred({arguments})\n" if training is None else _recorded(training, ready),
            backward=no_backward if training is None else _backward(chain, training, layer, together),
        )
    lines = _indented(chain.inferred, 4).rstrip("\n")
    text += INFERRED.format(parameters=parameters, ready=_indented(ready, 4), lines=lines)
    text += _kept(chain.constants) if chain.constants else ""
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


def _recorded(training: Training, ready: Sequence[str]) -> str:
    return RECORDED.format(
        ready=_indented(ready, 8),
        lines=_indented(training.forward, 8),
        saved=", ".join(["x", "weight", *training.saved.values(), *training.used]),
        result=training.result,
    )


def _backward(chain: Chain, training: Training, layer: Layer, together: bool) -> str:
    others = [training.gradients.get(name, "None") for name in chain.names if name not in ("x", "weight", "bias")]
    count = 3 if layer.bias else 2
    further = f", {', '.join(others)}" if others else ""
    called = f"kernels.backward({training.dz}, x, weight)"
    at_once = f"""        if all(wanted[:{count}]):
            return {f"*{called}{further}" if others else called}
"""
    saved = ["x", "weight", *training.saved, *training.used]
    return BACKWARD.format(
        saved=", ".join(saved),
        ready="ready(dy, ctx.layout)" if training.volume else "dense(dy)",
        lines=_indented(training.backward, 8),
        together=at_once if together else "",
        dz=training.dz,
        bias_gradient=f"            kernels.bias_grad({training.dz}) if wanted[2] else None,\n" if layer.bias else "",
        others="".join(f"            {each},\n" for each in others),
    )


def _kept(constants: Constants) -> str:
    return "\n" + KEPT.format(
        parameters=_parameters(constants.names), lines=_indented(constants.lines, 4).rstrip("\n")
    )


def _indented(lines: Sequence[str], columns: int) -> str:
    return textwrap.indent("".join(f"{line}\n" for line in lines), " " * columns)
