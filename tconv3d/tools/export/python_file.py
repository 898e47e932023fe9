"""Writes the exported Python file from a reference and its operations."""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Sequence
from typing import Any

from ... import __version__
from ..bench.layers import Layer
from .chain import Chain
from .chain_text import chain_text, shapes_text
from .cuda_source import cuda_source, described
from .host_source import function_names, host_source
from .passes import ANY, DEVICES, Operation, Variant, macro, variants_of
from .reference import Reference
from .wrapping import wrapped

FILE = '''"""{title}

{settings}
One file: PyTorch 2.9 or newer, nvcc and a C++ compiler are all it needs.

    model = ModelNew(*get_init_inputs()).cuda()
    y = model(*(x.cuda() for x in get_inputs()))

How it is computed, by kernels that are compiled when they are first needed, by load_inline:

{how}
{fixed}Written by tconv3d {version}:

    {command}
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
{once}from torch.utils.cpp_extension import load_inline
{imports}
SHAPE = {shape}  # [N, C_in, D, H, W], the shape of the convolution's input
WEIGHT_SHAPE = {weight_shape}
{settings_of_modules}PRECISIONS = ({precisions})
LAYOUTS = {{{layouts}}}
{capabilities}DEVICE = "cuda"


{model}


# ---- The operation{with_gradients}.


{operation}


{check_settings}def check(x: Tensor, *parameters: Tensor) -> None:
    weight = parameters[0]
    for name, tensor, shape in (("inputs", x, SHAPE), ("weights", weight, WEIGHT_SHAPE)):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"this file was exported for {{name}} of shape {{shape}}, got {{tuple(tensor.shape)}}")
    if x.device.type != DEVICE or weight.device != x.device:
        found = f"{{x.device}} and {{weight.device}}"
        raise ValueError(f"expected input and parameters on one {{DEVICE}} device, got {{found}}")
    if len({{tensor.dtype for tensor in (x, *parameters)}}) > 1:
        found = ", ".join(str(tensor.dtype) for tensor in (x, *parameters))
        raise TypeError(f"expected input and parameters of one type, got {{found}}")


def precision_of(dtype: torch.dtype) -> str:
    """The precision for tensors of a type{follows}."""
    name = str(dtype).removeprefix("torch.")
{tf32}    if name not in PRECISIONS:
        held = " ".join(PRECISIONS)
        raise TypeError(f"this file holds {{held}}, not {{name}}: export it with --dtype {{held}} {{name}}")
    return name


def layout_of(x: Tensor) -> str:
    """The layout of a tensor; one that is in no layout at all is copied to the file's first."""
    formats = {{"contiguous": torch.contiguous_format, "channels_last_3d": torch.channels_last_3d}}
    found = [name for name, each in formats.items() if x.is_contiguous(memory_format=each)]
    held = [name for name in found if name in LAYOUTS] if found else list(LAYOUTS)
    if not held:
        raise ValueError(f"this file holds no kernels for {{found[0]}} tensors: export it with --layout {{found[0]}}")
    return held[0]


def ready(tensor: Tensor, layout: str) -> Tensor:
    """The tensor as the kernels read it: in one of the layouts, at an address that is a multiple of 16 bytes."""
    tensor = written(tensor).contiguous(memory_format=LAYOUTS[layout])
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone(memory_format=torch.preserve_format)


{records}{dense}def written(tensor: Tensor) -> Tensor:
    """The tensor with its elements in memory: PyTorch may have left out a minus sign (z.conj().imag) or zeros."""
    return tensor.clone() if tensor.is_neg() or tensor._is_zerotensor() else tensor


def compiled(x: Tensor, layout: str) -> Any:
    return extension(x.get_device(), precision_of(x.dtype), layout)


@functools.cache
def extension(device: int, precision: str, layout: str) -> Any:
    """The kernels for one GPU, precision and layout."""
    major, minor = torch.cuda.get_device_capability(device)
{choose_gpu}    arch = "90a" if (major, minor) == (9, 0) else f"{{major}}{{minor}}"
{defines}    return load_inline(
        name=f"{name}_{{precision}}_{{layout}}_sm{{arch}}",
        cpp_sources=[CPP_SOURCE],
        cuda_sources=[CUDA_SOURCE],
{functions}
        extra_cflags=["-O2"{more}],
        extra_cuda_cflags=["-O3", "-std=c++20", f"-gencode=arch=compute_{{arch}},code=sm_{{arch}}"{more}],
        no_implicit_headers=True,
    )


# ---- The sources.

CPP_SOURCE = r"""
{cpp}"""

CUDA_SOURCE = r"""
{cuda}"""
'''

LEGEND = (
    "In the formulas z is the element that the kernel has, v0, v1 and so on are numbers per channel, t0, t1 elements "
    "of other tensors, and a, b, c numbers that are computed once."
)
ONCE = "The gradients cannot be differentiated again: PyTorch raises an error that says so."
TWICE = "The gradients of gradients, of any order, are computed by the same kernels."
VIEWS = ("view", "reshape", "expand", "permute", "squeeze", "unsqueeze", "getitem")
CHECK_SETTINGS = """def check_settings(module: nn.Module, expected: dict[str, Any]) -> None:
    given = {{name: getattr(module, name) for name in expected if name != "bias"}}
{bias}    if given != expected:
{mode_hint}        raise ValueError(f"this file was exported for {{expected}}, got {{given}}{hint}")


"""
TF32 = """    if name == "float32" and torch.backends.cudnn.conv.fp32_precision == "tf32":
        return "tf32"
"""
FOLLOWS = ": float32 follows torch.backends.cudnn.conv.fp32_precision"
MODE_HINT = """        modal = given.get("training") != expected.get("training")
        hint = ": export it with --eval, or without" if modal else ""
"""
NO_BACKWARD = """    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> None:
        raise RuntimeError("this file was exported with --forward-only: export it without for gradients")"""
CONVOLUTION = '''def convolve(x: Tensor, weight: Tensor{bias_parameter}) -> Tensor:
    """The transposed convolution of x, by the kernels of this file."""
    tensors = [x, weight{bias}]
    if torch.is_autocast_enabled(DEVICE):
        tensors = [tensor.to(torch.get_autocast_dtype(DEVICE)) for tensor in tensors]
    check(*tensors)
    return Convolution.apply(*tensors)


class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor{bias_parameter}) -> Tensor:
        layout = layout_of(x)
{save}        x, weight = ready(x, layout), ready(weight, layout)
        return compiled(x, layout).forward(x, weight{bias_argument})

{backward}'''
CONVOLUTION_BACKWARD = '''    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return Gradients.apply(dy, *ctx.saved_tensors, ctx.layout, ctx.needs_input_grad)


class Gradients(torch.autograd.Function):
    """The wanted gradients of a convolution. Their own gradients are convolutions again, by the same kernels."""

    @staticmethod
    def forward(
        ctx: Any, dy: Tensor, x: Tensor, weight: Tensor, layout: str, wanted: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        ctx.layout = layout
        ctx.save_for_backward(dy, x, weight)
        ctx.set_materialize_grads(False)
        dy, x, weight = ready(dy, layout), ready(x, layout), ready(weight, layout)
        kernels = compiled(dy, layout)
{together}        return (
            kernels.input_grad(dy, weight) if wanted[0] else None,
            kernels.weight_grad(dy, x) if wanted[1] else None,
{bias_gradient}        )

    @staticmethod
    def backward({second_parameters}) -> tuple[Tensor | None, ...]:
        """The gradients of dy, x and weight; those of {first_gradients} are given, or None."""
        dy, x, weight = ctx.saved_tensors
{zeros}        terms = [] if grad_dx is None else [Convolution.apply(grad_dx, weight{zeros_argument})]
        terms += [] if grad_dw is None else [Convolution.apply(x, grad_dw{zeros_argument})]
{bias_term}        dx = dweight = None
        if grad_dw is not None:
            dx = Gradients.apply(dy, x, grad_dw, ctx.layout, (True, False{false}))[0]
        if grad_dx is not None:
            dweight = Gradients.apply(dy, grad_dx, weight, ctx.layout, (False, True{false}))[1]
        return sum(terms[1:], terms[0]) if terms else None, dx, dweight, None, None'''
BLOCK = '''def block(x: Tensor, weight: Tensor{bias_parameter}, scale: Tensor, shift: Tensor) -> Tensor:
    """The transposed convolution of x, a ReLU and a GroupNorm, by the kernels of this file."""
    if torch.is_autocast_enabled(DEVICE):
        raise RuntimeError("this file does not know autocast: cast input and parameters to one type")
    tensors = [x, weight{bias}, scale, shift]
    check(*tensors)
    return Block.apply({recorded}*tensors)


class Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, {recorded_parameter}x: Tensor, weight: Tensor{bias_parameter}, scale: Tensor, shift: Tensor
    ) -> Tensor:
        layout = layout_of(x)
        x, weight, scale, shift = ready(x, layout), ready(weight, layout), dense(scale), dense(shift)
        kernels = compiled(x, layout)
        hidden, statistics = kernels.forward(x, weight{bias_argument})  # after the ReLU
{save}

{backward}'''
BLOCK_SAVE = """        if not recorded:
            return kernels.normalize_(hidden, statistics, scale, shift)
        ctx.layout = layout
        ctx.save_for_backward(x, weight, hidden, statistics, scale)
        return kernels.normalize(hidden, statistics, scale, shift)"""
BLOCK_BACKWARD = """    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, hidden, statistics, scale = ctx.saved_tensors
        dy = ready(dy, ctx.layout)
        kernels = compiled(dy, ctx.layout)
        # dz: of what went into the ReLU.
        dz, dparameters{dbias} = kernels.norm_grad(dy, hidden, statistics, scale)
        wanted = ctx.needs_input_grad[1:]
{together}        return (
            None,
            kernels.input_grad(dz, weight) if wanted[0] else None,
            kernels.weight_grad(dz, x) if wanted[1] else None,
{bias_gradient}            *dparameters,
        )"""
RECORDS = """def records_gradients(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(each.requires_grad for each in tensors)


"""
DENSE = """def dense(tensor: Tensor) -> Tensor:
    tensor = written(tensor).contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


"""


def python_file(
    name: str,
    reference: Reference,
    operations: Sequence[Operation],
    command: str,
    emulated: bool = False,
    chain: Chain | None = None,
    why_not: str = "",
) -> str:
    """Returns the text of the file; `name` begins the name of the compiled extension.

    `chain` is the convolution with what follows it. If it is not given, `why_not` says why PyTorch computes what
    follows, if anything does.
    """
    layer = reference.layer
    variants = variants_of(operations)
    precisions, layouts, gpus = (
        list(dict.fromkeys(getattr(v, each) for v in variants)) for each in ("precision", "layout", "gpu")
    )
    forward_only = not any(operation.name == "weight_grad" for operation in operations)
    cuda, host = cuda_source(operations, emulated=emulated), host_source(operations)
    formats = {"contiguous": "torch.contiguous_format", "channels_last_3d": "torch.channels_last_3d"}
    several = len(variants) > 1
    convolves = chain is None or not (forward_only or chain.trains)
    together = any(each.name == "backward" for each in operations)
    model, imports = reference.written(
        None if chain is None else list(chain.paths.values()), chain is None or not convolves
    )
    settings = _settings(layer) if "SETTINGS)" in model else ""
    settings += _norm_settings(reference) + _model_settings(reference, chain)
    functions = [_operation(layer, together, forward_only)] if convolves else []
    functions += [chain_text(chain, layer, together, forward_only, NO_BACKWARD)] if chain is not None else []
    text = FILE.format(
        title=_title(reference),
        settings=_wrapped(f"A transposed 3D convolution of {layer}.".replace(" on ", " channels on ", 1)).rstrip(
            "\n"
        ),
        how=_how(operations, variants[0]) + _notes(chain, why_not, forward_only, bool(layer.norm_groups)),
        with_gradients="" if forward_only else ", with its gradients",
        fixed=_wrapped(
            "The shape of the input is fixed. The file holds " + _holds(precisions, layouts, gpus, forward_only) + "."
        ).replace("\n  ", "\n"),
        command=command,
        version=__version__,
        imports=f"{imports}\n" if imports else "",
        shape=layer.input_shape,
        weight_shape=layer.weight_shape,
        settings_of_modules=settings,
        precisions=", ".join(f'"{each}"' for each in precisions) + ("," if len(precisions) == 1 else ""),
        layouts=", ".join(f'"{layout}": {formats[layout]}' for layout in layouts),
        capabilities=_capabilities(gpus, several),
        model=model,
        operation="\n\n\n".join(functions),
        check_settings=_check_settings(settings),
        follows=FOLLOWS if "tf32" in precisions else "",
        tf32=TF32 if "tf32" in precisions else "",
        once="from torch.autograd.function import once_differentiable\n"
        if any("@once" in f for f in functions)
        else "",
        records=RECORDS if any("records_gradients(" in each for each in (model, *functions)) else "",
        dense=DENSE if any("dense(" in each for each in functions) else "",
        choose_gpu=_choose_gpu(gpus, several),
        defines=_DEFINES if several else "",
        more=", *defines" if several else "",
        name=f"{name}_{hashlib.sha256((cuda + host).encode()).hexdigest()[:8]}",
        functions=_function_list(operations),
        cpp=host,
        cuda=cuda,
    )
    if "functional." in model:
        text = text.replace(
            "from torch.utils.cpp_extension", "from torch.nn import functional\nfrom torch.utils.cpp_extension", 1
        )
    return text


_DEFINES = """    defines = [f"-D{gpu}", f"-DFOR_{precision.upper()}", f"-DFOR_{layout.upper()}"]
"""


def _function_list(operations: Sequence[Operation]) -> str:
    names = ", ".join(f'"{name}"' for name in function_names(operations))
    return "\n".join(wrapped([f"        functions=[{names}],"]))


def _choose_gpu(gpus: Sequence[str], several: bool) -> str:
    """Writes the choice of kernels by the compute capability of a GPU."""
    held = " ".join(gpus)
    left_out = (
        '        found = f"compute capability {major}.{minor}"\n'
        f'        raise RuntimeError(f"this file was exported with --gpu {held}, got {{found}}: '
        'export it with --gpu any")\n'
    )
    if ANY in gpus:
        check = "    if major < 8:\n"
        left_out = '        raise RuntimeError(f"compute capability 8.0 or higher expected, got {major}.{minor}")\n'
        chosen = f'    gpu = CAPABILITIES.get((major, minor), "{macro(ANY)}")\n' if several else ""
    else:
        check = "    if (major, minor) not in CAPABILITIES:\n"
        chosen = "    gpu = CAPABILITIES[major, minor]\n" if several else ""
    return check + left_out + chosen


def _capabilities(gpus: Sequence[str], several: bool) -> str:
    """Writes which compute capabilities run which kernels; kernels that run on every GPU need no table."""
    if several:
        chosen = [gpu for gpu in reversed(gpus) if gpu != ANY]
        entries = ", ".join(f'{DEVICES[gpu].capability}: "{macro(gpu)}"' for gpu in chosen)
        return f"CAPABILITIES = {{{entries}}}  # compute capability: the macro of the kernels that run there\n"
    entries = ", ".join(f'{DEVICES[gpu].capability}: "{gpu}"' for gpu in gpus)
    return "" if ANY in gpus else f"CAPABILITIES = {{{entries}}}  # compute capability: the name of its GPU\n"


def _check_settings(settings: str) -> str:
    """Writes the function that compares a module's settings with those that the file has in its code."""
    if "SETTINGS" not in settings:
        return ""
    modal, several = '"training"' in settings, settings.count("SETTINGS = ") > 1 or '"bias": ' not in settings
    bias = '        given["bias"] = module.bias is not None\n'
    return CHECK_SETTINGS.format(
        bias=f'    if "bias" in expected:\n{bias}' if several else bias[4:],
        mode_hint=MODE_HINT if modal else "",
        hint="{hint}" if modal else "",
    )


def _title(reference: Reference) -> str:
    if reference.title:
        return _sentence(reference.title)
    if reference.following is not None:
        return "One transposed 3D convolution and what follows it."
    return "One transposed 3D convolution" + (", ReLU and GroupNorm." if reference.layer.norm_groups else ".")


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _how(operations: Sequence[Operation], variant: Variant) -> str:
    """Lists the operations with the kernels that run for a variant."""
    lines = []
    for operation in (each for each in operations if variant in each.plans):
        plan = operation.plans[variant]
        computed = f" Computes {operation.note}." if operation.note else ""
        told = described(plan).replace("a pass over", "a sweep over")  # checkers take the word for Python's
        lines.append(_wrapped(f"- {operation.name.replace('_', ' ')}: {told}{computed}"))
    return "".join([*lines, *([_wrapped(f"- {LEGEND}")] if any(each.note for each in operations) else [])])


def _notes(chain: Chain | None, why_not: str, forward_only: bool, layer_norm: bool) -> str:
    """Says what moves into the weight, and what PyTorch computes."""
    notes = [f"PyTorch computes what follows the convolution, because {why_not}."] if why_not else []
    if not forward_only:
        once = layer_norm or (chain is not None and chain.trains)
        notes.append(ONCE if once else TWICE)
    if chain is not None:
        notes += [f"{_sentence(chain.moved)} moves into the weight, which is computed once."] if chain.moved else []
        left = [each for each in chain.left if each not in VIEWS]
        notes += [f"PyTorch computes behind the kernels: {', '.join(left)}."] if left else []
        if not forward_only and not chain.trains:
            notes.append(
                "In calls with gradients PyTorch computes what follows the convolution, and differentiates it; "
                "the convolution and its gradients are kernels of this file."
            )
    return "".join(_wrapped(f"- {each}") for each in notes)


def _model_settings(reference: Reference, chain: Chain | None) -> str:
    """Writes the constants of the model that the file has in its code."""
    found = reference.match.settings(chain is not None)
    lines = [f'    "{path}": {{\n' + _entries(values, 8) + "    },\n" for path, values in found.items()]
    text = "MODEL_SETTINGS = {  # by the path of the module\n" + "".join(lines) + "}\n" if lines else ""
    return text + (shapes_text(chain) if chain is not None else "")


def _settings(layer: Layer) -> str:
    """Returns the settings that a module is compared with, on two lines if they fit."""
    given = layer.arguments
    steps = {name: given.pop(name) for name in ("stride", "padding", "output_padding", "dilation")}
    parts = [", ".join(f'"{name}": {value!r}' for name, value in part.items()) for part in (given, steps)]
    return "".join(f"{line}\n" for line in wrapped([f"SETTINGS = {{{parts[0]}}}", f"SETTINGS |= {{{parts[1]}}}"]))


def _entries(values: dict[str, Any], columns: int) -> str:
    return "".join(f'{" " * columns}"{name}": {value!r},\n' for name, value in values.items())


def _wrapped(text: str) -> str:
    return "".join(f"{line}\n" for line in textwrap.wrap(text, 116, subsequent_indent="  "))


def _holds(precisions: Sequence[str], layouts: Sequence[str], gpus: Sequence[str], forward_only: bool) -> str:
    passes = "the forward direction alone" if forward_only else "forward and backward"
    where = " and ".join("every GPU of compute capability 8.0 and up" if gpu == ANY else gpu for gpu in gpus)
    return f"{passes}, in {' and '.join(precisions)}, for {' and '.join(layouts)} tensors, for {where}"


def _operation(layer: Layer, together: bool, forward_only: bool) -> str:
    """Writes the autograd function; with `together` it computes all gradients by one call if all are wanted."""
    if layer.norm_groups:
        template, backward = BLOCK, BLOCK_BACKWARD
        gradient = "            dbias if wanted[2] else None,\n" if layer.bias else ""
        dbias = "dbias if wanted[2] else None, " if layer.bias else ""
        at_once = f"""        if wanted[0] and wanted[1]:
            return None, *kernels.backward(dz, x, weight), {dbias}*dparameters
"""
        save = (
            BLOCK_SAVE if not forward_only else "        return kernels.normalize_(hidden, statistics, scale, shift)"
        )
    else:
        template, backward = CONVOLUTION, CONVOLUTION_BACKWARD
        gradient = "            kernels.bias_grad(dy) if wanted[2] else None,\n" if layer.bias else ""
        at_once = """        if all(wanted):
            return kernels.backward(dy, x, weight)
"""
        save = "" if forward_only else "        ctx.layout = layout\n        ctx.save_for_backward(x, weight)\n"
    if forward_only:
        backward = NO_BACKWARD
    else:
        backward = backward.format(
            bias_gradient=gradient,
            together=at_once if together else "",
            dbias=", dbias" if layer.bias else "",
            **_second(layer),
        )
    return template.format(
        bias=", bias" if layer.bias else "",
        bias_parameter=", bias: Tensor" if layer.bias else "",
        bias_argument=", dense(bias)" if layer.bias else "",
        save=save,
        backward=backward,
        recorded="" if forward_only else "records_gradients(*tensors), ",
        recorded_parameter="" if forward_only else "recorded: bool, ",
    )


def _second(layer: Layer) -> dict[str, str]:
    """Returns what the second derivatives of a convolution with a bias have, and of one without."""
    names = ["dx", "dw", "db"] if layer.bias else ["dx", "dw"]
    parameters = ", ".join(["ctx: Any", *(f"grad_{name}: Tensor | None" for name in names)])
    zeros = "        zeros = dy.new_zeros(dy.shape[1])  # a bias that adds nothing\n"
    term = "        terms += [] if grad_db is None else [grad_db.reshape(1, -1, 1, 1, 1).expand_as(dy)]\n"
    return {
        "second_parameters": f"\n        {parameters}\n    " if layer.bias else parameters,
        "first_gradients": ", ".join(names[:-1]) + f" and {names[-1]}",
        "zeros": zeros if layer.bias else "",
        "zeros_argument": ", zeros" if layer.bias else "",
        "bias_term": term if layer.bias else "",
        "false": ", False" if layer.bias else "",
    }


def _norm_settings(reference: Reference) -> str:
    layer = reference.layer
    if not layer.norm_groups:
        return ""
    channels = layer.out_channels
    values = (
        f'"num_groups": {layer.norm_groups}, "num_channels": {channels}, "eps": {reference.eps!r}, "affine": True'
    )
    return f"NORM_SETTINGS = {{{values}}}\n"
