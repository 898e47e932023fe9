"""Checks a call's arguments, and raises PyTorch's exception types with the expected and the actual value.

No other module rejects a call. The checks run before anything is planned or launched, and only for new shapes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ..planning.geometry import Geometry, Triple

Convolution = tuple[Triple, Triple, Triple, int, Triple]  # stride, padding, output_padding, groups, dilation


def integer(value: object, name: str, function: str = "conv_transpose3d") -> int:
    """Returns an int for every value that PyTorch accepts as one: also NumPy's and tensors, no bool, no float."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    try:
        if isinstance(value, bool):
            raise TypeError
        return int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{function}(): expected {name} to be an integer, but got {name}={value!r}") from None


def number(value: object, name: str) -> float:
    """Returns the value if PyTorch accepts it as a float, and raises otherwise."""
    if isinstance(value, (float, int, torch.SymFloat)):
        return value  # type: ignore[return-value]
    raise TypeError(f"expected {name} to be a number, but got {name}={value!r}")


def triple(value: int | Sequence[int], name: str) -> Triple:
    """Returns (depth, height, width), given one integer for all three dimensions or a sequence of 1 or 3 integers."""
    if type(value) is tuple and len(value) == 3 and type(value[0]) is type(value[1]) is type(value[2]) is int:
        return value
    if not isinstance(value, (tuple, list)):
        one = integer(value, name)
        return (one, one, one)
    values = tuple(integer(v, name) for v in value)
    if len(values) == 1:
        values = values * 3
    if len(values) != 3:
        raise RuntimeError(
            f"expected {name} to be a single integer value or a list of 3 values to match the convolution "
            f"dimensions (depth, height, width), but got {name}={list(values)}"
        )
    return values


def convolution_of(
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    output_padding: int | Sequence[int],
    groups: int,
    dilation: int | Sequence[int],
) -> Convolution:
    """Returns the settings of a call, with a triple for each setting that has one value per dimension."""
    return (
        triple(stride, "stride"),
        triple(padding, "padding"),
        triple(output_padding, "output_padding"),
        integer(groups, "groups"),
        triple(dilation, "dilation"),
    )


def kind_of(value: object) -> str:
    """Describes an argument in words, for an error message."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"


def check_model(model: object, function: str) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{function}() expected model to be an nn.Module, but got {kind_of(model)}")


def check_callable(value: object, name: str, function: str) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{function}() expected {name} to be a function or None, but got {value!r}")


def are_tensors(input: object, weight: object, bias: object) -> bool:
    """Tells whether the operands are tensors. No other check runs in every call."""
    return isinstance(input, Tensor) and isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))


def check_tensors(input: object, weight: object, bias: object) -> None:
    """Raises unless the operands are tensors."""
    for name, value in (("input", input), ("weight", weight), ("bias", bias)):
        if not isinstance(value, Tensor) and not (name == "bias" and value is None):
            raise TypeError(
                f"conv_transpose3d(): expected {name} to be a Tensor, but got {name} of type {type(value).__name__}"
            )


def check_settings(convolution: Convolution, window: bool = False) -> None:
    """Checks the settings of a call. Those of a `window` (`Axis.window`) may have any padding and output padding."""
    stride, padding, output_padding, groups, dilation = convolution
    for name, values in zip(
        ("stride", "padding", "output_padding", "dilation"), (*convolution[:3], dilation), strict=True
    ):
        if max(values) >= 2**31:
            raise RuntimeError(f"expected {name} to be below 2^31, got {name}={list(values)}")
    if min(padding) < 0 and not window:
        raise RuntimeError(f"negative padding is not supported, got padding={list(padding)}")
    if min(output_padding) < 0 and not window:
        raise RuntimeError(f"negative output_padding is not supported, got output_padding={list(output_padding)}")
    if min(stride) <= 0:
        raise RuntimeError(f"non-positive stride is not supported, got stride={list(stride)}")
    if min(dilation) <= 0:
        raise RuntimeError(f"dilation should be greater than zero, got dilation={list(dilation)}")
    if groups <= 0:
        raise RuntimeError(f"non-positive groups is not supported, got groups={groups}")
    if not window and any(o >= max(s, d) for o, s, d in zip(output_padding, stride, dilation, strict=True)):
        raise RuntimeError(
            "output padding must be smaller than either stride or dilation, but got "
            f"output_padding={list(output_padding)}, stride={list(stride)}, dilation={list(dilation)}"
        )


def check_rank(input: Tensor, weight: Tensor) -> None:
    if input.dim() not in (4, 5):
        raise RuntimeError(
            "Expected 4D (unbatched) or 5D (batched) input to conv_transpose3d, but got input of size: "
            f"{list(input.shape)}"
        )
    if weight.dim() != 5:
        raise RuntimeError(
            "expected weight to be 5D (in_channels, out_channels / groups, depth, height, width), but got weight "
            f"of size {list(weight.shape)}"
        )


def check_same_kind(first: Tensor, second: Tensor, first_name: str, second_name: str) -> None:
    if first.dtype != second.dtype:
        raise RuntimeError(
            f"{first_name} type ({first.dtype}) and {second_name} type ({second.dtype}) should be the same"
        )
    if first.device != second.device:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {first_name} is on {first.device} and "
            f"{second_name} is on {second.device}"
        )


def check_forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution, window: bool = False
) -> Geometry:
    """Checks a forward pass: input [N, C_in, D, H, W], weight [C_in, C_out/groups, kD, kH, kW], bias [C_out]."""
    check_rank(input, weight)
    check_settings(convolution, window)
    check_same_kind(input, weight, "Input", "weight")
    if bias is not None:
        check_same_kind(input, bias, "Input", "bias")
    geometry = check_channels(weight, convolution)
    if input.shape[1] != geometry.in_channels:
        raise RuntimeError(
            f"Given transposed=1, weight of size {list(weight.shape)}, expected input{list(input.shape)} to have "
            f"{geometry.in_channels} channels, but got {input.shape[1]} channels instead"
        )
    if bias is not None and tuple(bias.shape) != (geometry.out_channels,):
        raise RuntimeError(
            f"Given transposed=1, weight of size {list(weight.shape)}, expected bias to be 1-dimensional with "
            f"{geometry.out_channels} elements, but got bias of size {list(bias.shape)} instead"
        )
    check_sizes(geometry, tuple(input.shape[2:]))
    return geometry


def check_channels(weight: Tensor, convolution: Convolution) -> Geometry:
    stride, padding, output_padding, groups, dilation = convolution
    in_channels, out_per_group, *kernel = weight.shape
    if any(extent <= 0 for extent in weight.shape):
        raise RuntimeError(f"expected a weight with no empty dimension, but got weight of size {list(weight.shape)}")
    if in_channels % groups:
        raise RuntimeError(
            f"Given transposed=1, groups={groups}, expected weight to be divisible by {groups} at dimension 0, but "
            f"got weight of size {list(weight.shape)} instead"
        )
    return Geometry.make(
        in_channels, out_per_group * groups, tuple(kernel), stride, padding, output_padding, groups, dilation
    )


def check_sizes(geometry: Geometry, input_size: tuple[int, ...]) -> None:
    if any(extent <= 0 for extent in input_size):
        raise RuntimeError(f"Expected a volume with no empty dimension, but got input of size {list(input_size)}")
    output_size = geometry.output_size(input_size)
    if any(extent <= 0 for extent in output_size):
        raise RuntimeError(
            f"Given input size per channel: {list(input_size)}. Calculated output size per channel: "
            f"{list(output_size)}. Output size is too small"
        )


def check_norm(
    input: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    num_groups: int,
    convolution: Convolution,
) -> None:
    """Checks a GroupNorm of the convolution's result: input [N, C_in, D, H, W], norm_weight and norm_bias [C_out]."""
    tracing = torch._C._get_tracing_state()
    if tracing is not None:  # torch.jit.trace would warn about every comparison of sizes
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
        try:
            return check_norm(input, weight, norm_weight, norm_bias, num_groups, convolution)
        finally:
            torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]
    channels = weight.shape[1] * convolution[3]
    for name, tensor in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected {name} to be a Tensor, but got {name} of type {type(tensor).__name__}")
        if tuple(tensor.shape) != (channels,):
            raise RuntimeError(
                f"Expected {name} to be a vector of size equal to the number of channels of the convolution, but got "
                f"{name} of shape {list(tensor.shape)} and {channels} channels"
            )
        if tensor.device != input.device:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but Input is on {input.device} and {name} is on "
                f"{tensor.device}"
            )
    check_norm_types(input, norm_weight, norm_bias)
    check_norm_groups(channels, num_groups)
    if input.shape[0] == 1 and channels == num_groups:
        size = check_channels(weight, convolution).output_size(tuple(input.shape[2:]))
        if size == (1, 1, 1):
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {[1, num_groups, *size]}"
            )


def check_norm_types(input: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None) -> None:
    """Requires, like PyTorch's GroupNorm, parameters of the input's type, or of float32 if the input has 16 bits."""
    device, normalized = input.device.type, input.dtype
    if torch.is_autocast_enabled(device):
        if device == "cuda":
            return  # autocast runs GroupNorm in float32
        normalized = normalized if normalized is torch.float64 else torch.get_autocast_dtype(device)
    allowed = [normalized] + [torch.float32] * (normalized in (torch.float16, torch.bfloat16))
    for name, tensor in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if tensor is not None and tensor.dtype not in allowed:
            expected = " or ".join(map(str, allowed))
            raise RuntimeError(
                f"Input type ({normalized}) and {name} type ({tensor.dtype}) should be the same: expected {expected}"
            )
    if norm_weight is not None and norm_bias is not None:
        check_same_kind(norm_weight, norm_bias, "norm_weight", "norm_bias")


def check_norm_groups(channels: int, num_groups: int) -> None:
    if num_groups <= 0:
        raise RuntimeError(f"Expected num groups to be greater than 0, got {num_groups}")
    if channels % num_groups:
        raise RuntimeError(
            f"Expected number of channels in input to be divisible by num_groups, but got {channels} channels and "
            f"num_groups={num_groups}"
        )


def check_grad_output(
    geometry: Geometry, grad_output: Tensor, input_size: tuple[int, ...], batch: int | None = None
) -> None:
    """Checks grad_output [N, C_out, oD, oH, oW]. N must be `batch`, unless `batch` is None."""
    expected = (geometry.out_channels, *geometry.output_size(input_size))
    if tuple(grad_output.shape[1:]) != expected or batch not in (None, grad_output.shape[0]):
        raise RuntimeError(
            f"expected grad_output to have shape [{'N' if batch is None else batch}, "
            f"{', '.join(map(str, expected))}], but got {list(grad_output.shape)}"
        )
