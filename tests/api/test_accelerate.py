"""Swapping the layers of a model in place: what changes is the arithmetic, and nothing else; and back again."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from swaps import Louder, assert_same_results, copied, gradients, kinds, needs_kernels, pickled, saved
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm

import tconv3d
from tconv3d.api import gains, survey


class Decoder(nn.Module):
    """Layers in every kind of container, under a forward that uses each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ConvTranspose3d(2, 4, 2, stride=2)
        self.list = nn.ModuleList([nn.ConvTranspose3d(4, 4, 3, padding=1, groups=2)])
        self.dict = nn.ModuleDict({"up": nn.Sequential(nn.ConvTranspose3d(4, 3, 1, bias=False), nn.ReLU())})
        self.norm = nn.BatchNorm3d(3)
        self.plain = nn.Conv3d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.norm(self.dict["up"](self.list[0](self.first(x)))))


PLACES = ("first", "list.0", "dict.up.0")


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(3)
    return Decoder()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The weight shapes of the calls that reach this library."""
    seen: list[tuple[int, ...]] = []
    run = tconv3d.conv_transpose3d

    def counted(input: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        seen.append(tuple(weight.shape))
        return run(input, weight, *rest)

    monkeypatch.setattr("tconv3d.api.modules.conv_transpose3d", counted)
    return seen


def test_every_layer_is_swapped_in_place(model: Decoder, calls: list[Any]) -> None:
    before = kinds(model)
    objects = dict(model.named_modules())
    assert tconv3d.accelerate(model) is model
    assert {name for name, kind in kinds(model).items() if kind is tconv3d.ConvTranspose3d} == set(PLACES)
    assert all(module is objects[name] for name, module in model.named_modules())
    model(torch.randn(1, 2, 2, 3, 2))
    assert len(calls) == 3
    assert tconv3d.restore(model) is model
    assert kinds(model) == before


def test_restoring_leaves_no_trace(model: Decoder) -> None:
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    text = repr(model)
    tconv3d.restore(tconv3d.accelerate(model))
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        assert all(module.__dict__[key] is value for key, value in before[name].items())
    assert repr(model) == text


def test_restoring_what_was_never_swapped_changes_nothing(model: Decoder) -> None:
    model.list[0] = tconv3d.ConvTranspose3d(4, 4, 3, padding=1)  # built as ours: it is not accelerate's to undo
    before = kinds(model)
    assert kinds(tconv3d.restore(model)) == before
    assert kinds(tconv3d.restore(tconv3d.accelerate(model))) == before


def test_accelerating_twice_is_accelerating_once(model: Decoder) -> None:
    before = kinds(model)
    tconv3d.accelerate(tconv3d.accelerate(model))
    report = tconv3d.plan_swaps(model)
    assert [layer.reason for layer in report.layers] == ["it is tconv3d's already"] * 3
    assert kinds(tconv3d.restore(model)) == before


@needs_kernels
def test_outputs_and_gradients_are_the_same(model: Decoder, ours: str, calls: list[Any]) -> None:
    model = model.to(ours)
    x = torch.randn(2, 2, 2, 3, 3, device=ours)
    before = gradients(model, x)
    after = gradients(tconv3d.accelerate(model, fuse=False), x)
    assert len(calls) == 3
    assert_same_results(after, before)
    again = gradients(tconv3d.restore(model), x)
    assert_same_results(again, before)  # not bitwise: PyTorch's own kernels are not on a GPU


def test_parameters_and_their_state_stay(model: Decoder) -> None:
    model.first.weight.requires_grad_(False)
    model.list[0].eval()
    before = list(model.named_parameters())
    flags = {name: (module.training) for name, module in model.named_modules()}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    tconv3d.accelerate(model)
    for (name, parameter), (other, same) in zip(model.named_parameters(), before, strict=True):
        assert (name, id(parameter), parameter.requires_grad) == (other, id(same), same.requires_grad)
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert list(model.state_dict()) == list(state)
    Decoder().load_state_dict(model.state_dict())
    model.load_state_dict(state)


def test_an_optimizer_made_before_still_trains_it(model: Decoder) -> None:
    other = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(each.parameters()) for each in (model, other)]
    x = torch.randn(1, 2, 2, 2, 2)
    for step in range(4):
        if step == 1:
            tconv3d.accelerate(model)
        if step == 3:
            tconv3d.restore(model)
        for each, optimizer in zip((model, other), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_hooks_still_fire(model: Decoder) -> None:
    fired: list[str] = []
    model.first.register_forward_pre_hook(lambda module, arguments: fired.append("before"))
    model.first.register_forward_hook(lambda module, arguments, output: fired.append("after"))
    model.first.register_full_backward_hook(lambda module, inputs, outputs: fired.append("backward"))
    model.first.weight.register_hook(lambda grad: fired.append("weight"))
    tconv3d.accelerate(model)
    model(torch.randn(1, 2, 2, 2, 2, requires_grad=True)).sum().backward()
    assert sorted(fired) == ["after", "backward", "before", "weight"]


def test_moving_and_casting_afterwards(model: Decoder) -> None:
    tconv3d.accelerate(model).double()
    assert model.first.weight.dtype == torch.float64
    assert model(torch.randn(1, 2, 2, 2, 2, dtype=torch.float64)).dtype == torch.float64


def test_the_model_may_be_the_layer(calls: list[Any]) -> None:
    layer = nn.ConvTranspose3d(2, 3, 2)
    assert tconv3d.accelerate(layer) is layer
    layer(torch.randn(1, 2, 2, 2, 2))
    assert type(layer) is tconv3d.ConvTranspose3d and len(calls) == 1
    assert type(tconv3d.restore(layer)) is nn.ConvTranspose3d


def test_a_shared_layer_is_one_layer_in_several_places() -> None:
    layer = nn.ConvTranspose3d(2, 2, 1)
    model = nn.ModuleDict({"a": layer, "b": nn.ModuleList([layer])})
    (found,) = tconv3d.plan_swaps(model).layers
    assert found.places == ("a", "b.0")
    tconv3d.accelerate(model)
    assert model["a"] is model["b"][0] is layer  # type: ignore[index]
    assert type(tconv3d.restore(model)["a"]) is nn.ConvTranspose3d


# ---- layers that are not what they seem


def patched() -> nn.Module:
    layer = nn.ConvTranspose3d(2, 2, 2)
    layer.forward = lambda input: input  # type: ignore[method-assign,assignment,misc]
    return layer


def quantized() -> nn.Module:
    quantized = pytest.importorskip("torch.ao.nn.quantized.reference")
    return quantized.ConvTranspose3d(2, 2, 2)


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.ConvTranspose3d(2, 2, 2)))


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "subclass": (lambda: Louder(2, 2, 2), "Louder is a subclass"),
    "parametrized subclass": (lambda: parametrizations.weight_norm(Louder(2, 2, 2)), "Louder is a subclass"),
    "lazy": (lambda: nn.LazyConvTranspose3d(2, 2), "lazy"),
    "ours": (lambda: tconv3d.ConvTranspose3d(2, 2, 2), "already"),
    "patched": (patched, "forward has been replaced"),
    "complex": (lambda: nn.ConvTranspose3d(2, 2, 2, dtype=torch.complex64), "complex64"),
    "quantized": (quantized, "quantized"),
    "TorchScript": (scripted, "TorchScript"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone_and_why(name: str) -> None:
    make, words = LEFT[name]
    model = nn.ModuleList([make()])
    before = kinds(model)
    report = tconv3d.plan_swaps(model)
    assert (len(report.layers), len(report.left)) == (1, 1)
    assert words in report.left[0].reason
    assert words in str(report)
    assert kinds(tconv3d.accelerate(model)) == before
    assert kinds(tconv3d.restore(model)) == before


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_layer_is_swapped_once_it_has_a_shape() -> None:
    layer: nn.Module = nn.LazyConvTranspose3d(2, 2)
    layer(torch.randn(1, 3, 2, 2, 2))
    assert type(tconv3d.accelerate(layer)) is tconv3d.ConvTranspose3d


def test_a_layer_without_data_is_swapped_and_filled_later(calls: list[Any]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.ConvTranspose3d(2, 3, 2))
    tconv3d.accelerate(model)
    assert model(torch.empty(1, 2, 3, 3, 3, device="meta")).shape == (1, 3, 4, 4, 4)
    model.to_empty(device="cpu")
    model.load_state_dict(nn.Sequential(nn.ConvTranspose3d(2, 3, 2)).state_dict())
    assert model(torch.randn(1, 2, 3, 3, 3)).isfinite().all()
    assert len(calls) == 2


def old_weight_norm(layer: nn.Module) -> nn.Module:
    return torch.nn.utils.weight_norm(layer, dim=1)


def pruned(layer: nn.Module) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", amount=0.5)


COMPUTED_WEIGHTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": lambda layer: parametrizations.weight_norm(layer, dim=1),
    "spectral_norm": parametrizations.spectral_norm,
    "old weight_norm": old_weight_norm,
    "old spectral_norm": spectral_norm,
    "pruned": pruned,
}


@needs_kernels
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", COMPUTED_WEIGHTS)
def test_layers_whose_weight_is_computed(name: str, ours: str, calls: list[Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(COMPUTED_WEIGHTS[name](nn.ConvTranspose3d(2, 3, 2, stride=2))).to(ours).eval()
    x = torch.randn(1, 2, 2, 2, 3, device=ours)
    before = gradients(model, x)
    names = list(model.state_dict())
    tconv3d.accelerate(model)
    assert_same_results(gradients(model, x), before)
    assert len(calls) == 1
    assert list(model.state_dict()) == names
    assert not isinstance(tconv3d.restore(model)[0], tconv3d.ConvTranspose3d)
    assert_same_results(gradients(model, x), before)


def test_looking_at_a_layer_does_not_compute_its_weight() -> None:
    """In training, `spectral_norm` updates its buffers whenever the weight is read."""
    model = nn.Sequential(parametrizations.spectral_norm(nn.ConvTranspose3d(2, 4, 2)), nn.ReLU())
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(1, 2, 2, 2, 2)
    with tconv3d.use_backend("emulator"):
        tconv3d.plan_swaps(model, example_input=x)
        tconv3d.accelerate(model, example_input=x)
        tconv3d.explain(model[0], x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parametrizations_come_and_go_on_a_swapped_layer(calls: list[Any]) -> None:
    layer = nn.ConvTranspose3d(2, 3, 2)
    copied = copy.deepcopy(parametrizations.weight_norm(layer))
    tconv3d.accelerate(layer)
    assert not isinstance(copied, tconv3d.ConvTranspose3d), "the copy shares the class that was made for both"
    parametrize.register_parametrization(layer, "bias", nn.Tanh())
    parametrize.remove_parametrizations(layer, "weight")
    x = torch.randn(1, 2, 2, 2, 2)
    expected = torch.conv_transpose3d(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected)
    assert len(calls) == 1
    tconv3d.restore(layer)
    assert parametrize.type_before_parametrizations(layer) is nn.ConvTranspose3d
    torch.testing.assert_close(layer(x), expected)
    parametrize.remove_parametrizations(layer, "bias")
    assert type(layer) is nn.ConvTranspose3d


def test_a_layer_whose_class_has_changed_is_not_restored_by_force(model: Decoder) -> None:
    tconv3d.accelerate(model)
    model.first.__class__ = type("Sharded", (tconv3d.ConvTranspose3d,), {})
    with pytest.raises(RuntimeError, match="Sharded"):
        tconv3d.restore(model)
    assert type(model.list[0]) is tconv3d.ConvTranspose3d, "all or nothing"


# ---- copies, files, compilers


@pytest.mark.parametrize("again", [copied, pickled, saved])
def test_copies_stay_swapped_and_can_be_restored(model: Decoder, again: Any, calls: list[Any]) -> None:
    before = kinds(model)
    tconv3d.accelerate(model)
    other = again(model).eval()
    assert kinds(other) == kinds(model)
    x = torch.randn(1, 2, 2, 2, 2)
    torch.testing.assert_close(other(x), model.eval()(x))
    assert len(calls) == 6
    assert kinds(tconv3d.restore(other)) == before


@pytest.mark.parametrize("when", ["before", "after"])
def test_torch_compile(model: Decoder, when: str, calls: list[Any]) -> None:
    """A model compiled before it was swapped, or restored, does not run what it was."""
    x = torch.randn(1, 2, 2, 2, 2)
    model.eval()
    expected = model(x)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    if when == "before":
        torch.testing.assert_close(compiled(x), expected)
    tconv3d.accelerate(model)
    torch.testing.assert_close(compiled(x), expected)
    assert len(calls) == 3
    tconv3d.restore(model)
    torch.testing.assert_close(compiled(x), expected)
    assert len(calls) == 3


def test_export_after_restoring(model: Decoder) -> None:
    x = torch.randn(1, 2, 2, 2, 2)
    tconv3d.restore(tconv3d.accelerate(model.eval()))
    text = str(torch.export.export(model, (x,)).graph)
    assert "conv_transpose3d" in text and "tconv3d" not in text


def test_no_reference_is_kept(model: Decoder) -> None:
    alive = weakref.ref(model.first)
    tconv3d.accelerate(model, example_input=torch.randn(1, 2, 2, 2, 2))
    del model.first
    gc.collect()
    assert alive() is None


# ---- the report


def test_the_report_says_what_accelerate_does(model: Decoder) -> None:
    model.plain = Louder(3, 2, 1)  # type: ignore[assignment]
    expected = tconv3d.plan_swaps(model)
    heard: list[tconv3d.SwapReport] = []
    tconv3d.accelerate(model, report=heard.append)
    assert heard == [expected]
    assert [layer.places for layer in expected.swapped] == [(name,) for name in PLACES]
    assert [layer.places for layer in expected.left] == [("plain",)]
    lines = str(expected).splitlines()
    assert lines[0] == "3 of 4 ConvTranspose3d swapped"
    words = "swapped  first: ConvTranspose3d(2, 4, kernel_size=(2, 2, 2), stride=(2, 2, 2))"
    assert lines[1].strip() == words
    json.dumps(expected.as_dict())


def test_a_model_without_such_layers() -> None:
    assert str(tconv3d.plan_swaps(nn.Conv3d(1, 1, 1))) == "no ConvTranspose3d in this model"


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dictionary"])
def test_an_example_gives_the_input_shapes(model: Decoder, kind: str) -> None:
    x = torch.randn(1, 2, 3, 4, 5)
    example = {"tensor": x, "tuple": (x,), "dictionary": {"x": x}}[kind]
    report = tconv3d.plan_swaps(model, example_input=example)
    shapes = [layer.input_shapes for layer in report.layers]
    assert shapes == [((1, 2, 3, 4, 5),), ((1, 4, 6, 8, 10),), ((1, 4, 6, 8, 10),)]
    assert report.note == ""


def test_the_example_only_passes_through_in_thought(model: Decoder) -> None:
    state = {key: value.clone() for key, value in model.state_dict().items()}
    large = torch.empty(1, device="meta").expand(64, 2, 512, 512, 512)  # 34 GB, if it were computed
    (first, *_) = survey.input_shapes(model.to("meta"), large).values()
    assert first == ((64, 2, 512, 512, 512),)
    model = Decoder()
    model.load_state_dict(state)
    random = torch.get_rng_state()
    tconv3d.plan_swaps(model, example_input=torch.empty(2, 2, 3, 3, 3))
    assert torch.equal(torch.get_rng_state(), random)
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), f"{key} has changed"
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_example_leaves_nothing_in_a_model_that_names_a_layer_twice() -> None:
    layer = nn.ConvTranspose3d(2, 2, 1)
    model = nn.Sequential(layer, nn.Sequential(layer))
    before = [id(parameter) for parameter in model.parameters()]
    (found,) = tconv3d.plan_swaps(model, example_input=torch.empty(1, 2, 2, 2, 2)).layers
    assert found.input_shapes == ((1, 2, 2, 2, 2),)
    assert [id(parameter) for parameter in model.parameters()] == before
    assert model(torch.ones(1, 2, 2, 2, 2)).sum().isfinite()  # not of a tensor without data


def test_a_model_that_needs_data_has_no_prediction() -> None:
    class Curious(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose3d(2, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x) if x.sum().item() > 0 else x

    report = tconv3d.plan_swaps(Curious(), example_input=torch.randn(1, 2, 2, 2, 2))
    assert len(report.swapped) == 1
    assert "does not run on fake tensors" in report.note


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Invented measurements, in the form of a benchmark's results."""

    def row(layer: str, which: str, channels: int, ours: float, theirs: float, **more: Any) -> dict[str, Any]:
        shape = {"in_channels": channels, "out_channels": channels // 2, "batch": 2, "size": [32, 32, 32]}
        shape |= {"kernel": [2, 2, 2], "stride": [2, 2, 2], "groups": 1}
        kind = {"layer": layer, "pass": which, "dtype": "tf32", "layout": "contiguous", "follow": ""}
        return {**kind, "shape": shape, "ours_ms": ours, "torch_ms": {"default": theirs}, **more}

    rows = [
        row("small", "forward", 16, 1.0, 2.0),
        row("large", "forward", 128, 1.0, 8.0),
        row("large", "backward", 128, 2.0, 9.0),
        row("large", "forward", 128, 1.0, 99.0, dtype="bfloat16"),
        row("failed", "forward", 120, 1.0, 99.0, ours_ms=None),
        row("block", "forward", 120, 1.0, 99.0, follow="relu_group_norm"),
    ]
    found = gains.distil({"machine": {"gpu": "Invented GPU"}, "rows": rows})
    monkeypatch.setattr(gains, "measured", lambda: found)
    convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before, convolutions.fp32_precision = convolutions.fp32_precision, "tf32"
    yield
    convolutions.fp32_precision = before


def test_a_gain_is_that_of_the_nearest_measured_layer(measured: None) -> None:
    model = nn.Sequential(nn.ConvTranspose3d(96, 48, 2, 2), nn.ConvTranspose3d(48, 1, 7, 1))
    report = tconv3d.plan_swaps(model, example_input=torch.empty(2, 96, 24, 32, 32, device="meta"))
    near, far = (layer.gain for layer in report.layers)
    assert near == gains.Gain(8.0, 4.5, "large", "Invented GPU")
    assert far is None
    assert "predicted gain 8.0x (backward 4.5x) as large on Invented GPU" in str(report)
    assert all(layer.gain is None for layer in tconv3d.plan_swaps(model).layers), "no input, no prediction"


def test_without_measurements_there_is_no_prediction(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gains, "measured", lambda: {"gpu": "", "rows": []})
    report = tconv3d.plan_swaps(model, example_input=torch.randn(1, 2, 2, 2, 2))
    assert [layer.gain for layer in report.layers] == [None] * 3
