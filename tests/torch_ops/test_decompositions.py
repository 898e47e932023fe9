"""Programs that know PyTorch's operators only: ONNX and quantization, without taking the layers out of the model."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers import Layer
from torch import Tensor, nn

import tconv3d

LAYER = Layer(4, 6, (3, 2, 3), (3, 2, 3), (2, 1, 2), (1, 0, 1), (1, 0, 0), groups=2)


def model(groups: int = 2) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.ConvTranspose3d(4, 4, 2, stride=2),
        nn.Tanh(),
        nn.Sequential(nn.ConvTranspose3d(4, 6, 3, padding=1, groups=groups), nn.ReLU(), nn.GroupNorm(3, 6)),
        tconv3d.ConvTranspose3dReLU(6, 4, 2, output_padding=1, stride=2, dilation=2),
        tconv3d.ConvTranspose3dReLUGroupNorm(4, 4, 2, num_groups=2),
    )
    return tconv3d.accelerate(layers).eval()


def volume(seed: int = 0, batch: int = 2) -> Tensor:
    return torch.randn(batch, 4, 2, 3, 2, generator=torch.Generator().manual_seed(seed))


def targets(program: Any) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.fixture
def in_emulator() -> Iterator[None]:
    with tconv3d.use_backend("emulator"), torch.backends.cudnn.flags(allow_tf32=False):
        yield


# ---- the table


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d], ids=str)
def test_every_operator_has_a_decomposition_that_computes_the_same(
    memory_format: torch.memory_format, in_emulator: None
) -> None:
    table = tconv3d.decompositions()
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("tconv3d::")}
    chains = {name for name in registered if name.startswith("tconv3d::chain")}  # compiled graphs alone have them
    assert {operator.name() for operator in table} == registered - chains
    x, w, b = LAYER.operands(torch.float64, "cpu")
    x = x.contiguous(memory_format=memory_format)
    y = torch.relu(F.conv_transpose3d(x, w, b, *LAYER.settings)).contiguous(memory_format=memory_format)
    dy, gamma, beta = torch.randn_like(y), *torch.randn(2, 6, dtype=torch.float64)
    values = y.reshape(2, 3, -1)
    statistics = torch.stack([values.mean(2), (values.var(2, correction=0) + 1e-5).rsqrt()])
    arguments: dict[str, tuple[Any, ...]] = {
        "conv_transpose3d": (x, w, b, *LAYER.settings),
        "conv_transpose3d_relu": (x, w, None, *LAYER.settings),
        "conv_transpose3d_relu_group_norm": (x, w, b, gamma, beta, 3, 1e-5, torch.float64, *LAYER.settings),
        "conv_transpose3d_relu_statistics": (x, w, b, 3, 1e-5, *LAYER.settings),
        "normalize": (y, statistics, gamma, None, torch.float64),
        "relu_group_norm_grad": (dy, y, statistics, gamma, torch.float64, (True, True, True)),
        "conv_transpose3d_input_grad": (dy, w, LAYER.size, *LAYER.settings),
        "conv_transpose3d_weight_grad": (dy, x, LAYER.kernel, *LAYER.settings),
        "conv_transpose3d_bias_grad": (dy,),
    }
    for operator, function in table.items():
        call = arguments[operator.name().removeprefix("tconv3d::")]
        torch.testing.assert_close(function(*call), operator(*call))


def test_an_exported_program_without_this_librarys_operators(in_emulator: None) -> None:
    network = model()
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(network, (volume(),), dynamic_shapes=({0: batch},))
    assert sum("tconv3d" in target for target in targets(program)) == 4
    plain = program.run_decompositions(tconv3d.decompositions())
    assert targets(plain).count("aten.conv_transpose3d.input") == 4
    assert not [target for target in targets(plain) if "tconv3d" in target]
    core = program.run_decompositions({**dict(torch.export.default_decompositions()), **tconv3d.decompositions()})
    assert targets(core).count("aten.convolution.default") == 4
    for seed in (1, 2):
        x = volume(seed, batch=seed + 2)
        for each in (program, plain, core):
            torch.testing.assert_close(each.module()(x), network(x), rtol=1e-4, atol=1e-5)


def test_the_global_table_stays_as_it_is() -> None:
    """Where the variable CI is set, Inductor refuses operators that are in it."""
    exporter = importlib.import_module("torch.onnx._internal.exporter._decomp")
    ours = set(tconv3d.decompositions())
    assert ours <= set(exporter.create_onnx_friendly_decomposition_table(set()))
    assert ours.isdisjoint(torch._decomp.decomposition_table)


# ---- ONNX


def run_onnx(program: Any, x: Tensor) -> Tensor:
    """Runs an ONNX model by the reference implementation of ONNX."""
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(program.model_proto)
    (name,) = (one.name for one in program.model_proto.graph.input)
    return torch.from_numpy(evaluator.run(None, {name: x.numpy()})[0])


@pytest.mark.parametrize("source", ["model", "exported program"])
def test_onnx(source: str, in_emulator: None) -> None:
    pytest.importorskip("onnxscript")
    network, x = model(groups=1), volume()  # the reference implementation of ONNX has no groups
    exported: Any = torch.export.export(network, (x,)) if source == "exported program" else network
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's exporter uses parts of PyTorch that are deprecated
        program = torch.onnx.export(exported, (x,), dynamo=True, verbose=False)
    assert program is not None
    assert [node.op_type for node in program.model.graph].count("ConvTranspose") == 4
    for seed in (0, 1):
        x = volume(seed)
        torch.testing.assert_close(run_onnx(program, x), network(x).detach(), rtol=1e-4, atol=1e-4)


# ---- quantization


def test_quantization(in_emulator: None) -> None:
    """A quantizer that knows PyTorch's operators finds the convolutions of an accelerated model."""
    pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e", exc_type=ImportError)  # needs a recent PyTorch
    from torchao.quantization.pt2e import HistogramObserver, MinMaxObserver
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

    class EightBits(Quantizer):
        """Quantizes inputs and weights of transposed convolutions."""

        def annotate(self, graph: Any) -> Any:
            of_input = QuantizationSpec(torch.uint8, HistogramObserver, 0, 255, torch.per_tensor_affine)
            of_weight = QuantizationSpec(torch.int8, MinMaxObserver, -127, 127, torch.per_tensor_symmetric)
            for node in graph.graph.nodes:
                if node.target is torch.ops.aten.conv_transpose3d.input:
                    inputs = {node.args[0]: of_input, node.args[1]: of_weight}
                    node.meta["quantization_annotation"] = QuantizationAnnotation(inputs, None, _annotated=True)
            return graph

        def validate(self, graph: Any) -> None:
            pass

    network, x = model(), volume()
    program = torch.export.export(network, (x,)).run_decompositions(tconv3d.decompositions())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare_pt2e(program.module(), EightBits())
        for seed in range(4):
            prepared(volume(seed))
        quantized = convert_pt2e(prepared)
    assert (
        sum("dequantize_per_tensor" in target for target in targets(quantized)) == 8
    )  # inputs and weights of 4 layers
    exact, got = network(x).detach(), quantized(x).detach()
    error = float((got - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.1, error
