"""Networks that nobody here wrote: MONAI's, the same before and after their layers are swapped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import tconv3d
from tconv3d import emulator
from tconv3d.api import survey

pytest.importorskip("monai", reason="the networks come with `pip install monai einops`")
pytest.importorskip("einops", reason="the networks come with `pip install monai einops`")

from monai.networks.nets import AttentionUnet
from swaps import kinds

from benchmarks.monai_networks import NETWORKS

# The transposed convolutions of each network at its tiny size.
LAYERS = {"UNet": 2, "VNet": 4, "DynUNet": 2, "SwinUNETR": 5, "MedNeXt": 3}
# What runs fused in each network; SwinUNETR and DynUNet concatenate behind their convolutions.
CHAINS = {
    "UNet": {"conv -> instance_norm -> prelu"},
    "VNet": {"conv -> batch_norm -> elu"},
    "DynUNet": {""},
    "SwinUNETR": {""},
    "MedNeXt": {"conv -> group_norm", ""},
}
KERNELS = torch.cuda.is_available() or emulator.available()


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest, ours: str) -> Iterator[tuple[str, nn.Module, Tensor]]:
    if not KERNELS:
        pytest.skip("the emulator needs a C++ compiler")
    torch.manual_seed(0)
    model, x = NETWORKS[request.param](tiny=True)
    yield request.param, model.to(ours).eval(), x.to(ours)


def results(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of the input and of every parameter."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = model(x)
    y = y[0] if isinstance(y, (tuple, list)) else y
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape).to(y))
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None and gradients
    return {"output": y.detach(), "input": x.grad, **gradients}


def test_chains_of_an_attention_unet() -> None:
    model = AttentionUnet(3, 1, 2, (4, 8, 16), (2, 2))
    before = kinds(model)
    assert {layer.chain for layer in tconv3d.plan_swaps(model).layers} == {"conv -> batch_norm -> relu"}
    assert kinds(tconv3d.restore(tconv3d.accelerate(model))) == before


@pytest.mark.slow
def test_same_outputs_and_gradients(network: tuple[str, nn.Module, Tensor]) -> None:
    name, model, x = network
    before = results(model, x)
    report: list[tconv3d.SwapReport] = []
    tconv3d.accelerate(model, example_input=x, report=report.append)
    assert (len(report[0].swapped), len(report[0].left)) == (LAYERS[name], 0)
    assert all(layer.input_shapes for layer in report[0].layers)
    assert {layer.chain for layer in report[0].layers} == CHAINS[name]
    assert all(layer.chain or layer.why_alone for layer in report[0].layers)
    assert all(type(layer) is tconv3d.ConvTranspose3d for layer in survey.transposed_convolutions(model))
    after = results(model, x)
    assert after.keys() == before.keys()
    largest = max(float(gradient.norm()) for gradient in before.values())
    for key, expected in before.items():
        difference = float((after[key] - expected).norm())
        # A gradient that is nothing but cancellation (of a bias before a norm) is only small, not the same.
        assert difference <= 1e-3 * float(expected.norm()) + 1e-6 * largest, key
    tconv3d.restore(model)
    assert all(type(layer) is nn.ConvTranspose3d for layer in survey.transposed_convolutions(model))
    assert torch.equal(results(model, x)["output"], before["output"])
