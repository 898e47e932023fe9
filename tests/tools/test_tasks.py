"""The reference tasks: what they promise to a benchmark, and that Model and ModelNew agree."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import tconv3d
from tconv3d.tools import tasks
from tconv3d.torch_ops.backend import Backend

pytestmark = pytest.mark.usefixtures("strict_float32")
EMPTY = inspect.Parameter.empty
SIMPLE = {"in_channels": EMPTY, "out_channels": EMPTY, "kernel_size": EMPTY}
STRIDED = {**SIMPLE, "stride": 1, "padding": 0, "output_padding": 0}

# Input shape, constructor (name: default, in order), and the shape of the output at full size.
SPECIFIED: dict[str, tuple[tuple[int, ...], dict[str, Any], tuple[int, ...]]] = {
    "grouped_strided": ((4, 32, 32, 64, 128), {**STRIDED, "groups": 1, "bias": False}, (4, 32, 63, 127, 255)),
    "large_volume": (
        (8, 48, 96, 96, 96),
        {**STRIDED, "dilation": 1, "groups": 1, "bias": False},
        (8, 24, 98, 98, 98),
    ),
    "asymmetric_kernel": (
        (16, 32, 64, 64, 64),
        {
            **SIMPLE,
            "stride": (1, 1, 1),
            "padding": (0, 0, 0),
            "output_padding": (0, 0, 0),
            "groups": 1,
            "bias": False,
        },
        (16, 64, 66, 68, 68),
    ),
    "relu_group_norm": ((16, 64, 32, 32, 32), {**SIMPLE, "groups": EMPTY, "bias": False}, (16, 128, 34, 34, 34)),
}

# The layer each task stands for: in, out, kernel, stride, padding, output padding, dilation, groups.
ONE, NONE = (1, 1, 1), (0, 0, 0)
LAYERS = {
    "grouped_strided": (32, 32, (3, 3, 3), (2, 2, 2), ONE, NONE, ONE, 4),
    "large_volume": (48, 24, (3, 3, 3), ONE, NONE, NONE, ONE, 1),
    "asymmetric_kernel": (32, 64, (3, 5, 5), ONE, NONE, NONE, ONE, 1),
    "relu_group_norm": (64, 128, (3, 3, 3), ONE, NONE, NONE, ONE, 1),
}


def convolution(model: nn.Module) -> nn.ConvTranspose3d:
    (layer,) = (module for module in model.modules() if isinstance(module, nn.ConvTranspose3d))
    return layer


def test_the_specified_tasks_are_all_there() -> None:
    assert tuple(SPECIFIED) == tasks.NAMES
    with pytest.raises(ValueError, match=r"no_such_task.*grouped_strided"):
        tasks.load("no_such_task")


@pytest.mark.parametrize("name", tasks.NAMES)
def test_constructor_and_inputs_are_as_specified(name: str) -> None:
    task = tasks.load(name)
    shape, constructor, output = SPECIFIED[name]
    for kind in (task.Model, task.ModelNew):
        parameters = inspect.signature(kind).parameters.values()
        assert [(p.name, p.default) for p in parameters] == list(constructor.items())
    assert inspect.signature(task.get_inputs).parameters["shape"].default == shape
    with torch.device("meta"):  # full size without its gigabytes
        (x,) = task.get_inputs()
        model = task.Model(*task.get_init_inputs())
    assert x.shape == shape
    assert x.dtype == torch.float32
    assert model(x).shape == output
    layer = convolution(model)
    sizes = layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding
    assert (*sizes, layer.output_padding, layer.dilation, layer.groups) == LAYERS[name]
    assert layer.bias is None


@pytest.mark.parametrize("name", tasks.NAMES)
def test_model_is_pytorchs_and_model_new_is_ours(name: str) -> None:
    task = tasks.load(name)
    arguments = task.get_init_inputs()
    assert type(convolution(task.Model(*arguments))) is nn.ConvTranspose3d
    assert isinstance(convolution(task.ModelNew(*arguments)), tconv3d.ConvTranspose3d)


@pytest.mark.parametrize("name", tasks.NAMES)
def test_state_dict_loads_both_ways(name: str) -> None:
    task = tasks.load(name)
    arguments = task.get_init_inputs()
    for source, target in ((task.Model, task.ModelNew), (task.ModelNew, task.Model)):
        giver, taker = source(*arguments), target(*arguments)
        assert not torch.equal(convolution(giver).weight, convolution(taker).weight)
        taker.load_state_dict(giver.state_dict(), strict=True)
        assert torch.equal(convolution(giver).weight, convolution(taker).weight)


def test_relu_group_norm_names_its_submodules() -> None:
    task = tasks.load("relu_group_norm")
    model = task.ModelNew(*task.get_init_inputs())
    assert [name for name, _ in model.named_children()] == ["conv_transpose", "group_norm"]
    norm = model.get_submodule("group_norm")
    assert isinstance(norm, nn.GroupNorm)
    assert (norm.num_groups, norm.num_channels) == (8, 128)
    assert (model(task.get_inputs(task.REDUCED)[0]) < 0).any(), "GroupNorm comes after ReLU, not before"


@pytest.mark.parametrize("backend", ["torch", "emulator"])
@pytest.mark.parametrize("name", tasks.NAMES)
def test_model_new_computes_what_model_computes(name: str, backend: Backend) -> None:
    task = tasks.load(name)
    arguments = task.get_init_inputs()
    torch.manual_seed(3)
    model, new = task.Model(*arguments).double(), task.ModelNew(*arguments)
    new.load_state_dict(model.state_dict())
    (x,) = task.get_inputs(task.REDUCED)
    assert x.shape[1] == task.SHAPE[1], "a reduced task keeps its channels"
    inputs = x.double().requires_grad_(), x.requires_grad_()
    expected = model(inputs[0])
    grad = torch.randn_like(expected)
    expected.backward(grad)
    with tconv3d.use_backend(backend):
        result = new(inputs[1])
        result.backward(grad.float())
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip([inputs[1], *new.parameters()], [inputs[0], *model.parameters()], strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-3)
