"""ConvTranspose3d, ReLU and GroupNorm of a sequence as one block: when they run so, and when each as itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from swaps import Louder, assert_same_results, copied, gradients, kinds, needs_kernels, pickled, saved
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import tconv3d
from tconv3d.api import forwards, fusing


@pytest.fixture(autouse=True, params=["on the CPU", "where kernels run"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences run their triples layer by layer on the CPU, and by a plan of the whole sequence elsewhere."""
    if request.param == "where kernels run":
        monkeypatch.setattr(forwards, "current_backend", lambda: "emulator")


def sequence() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv3d(1, 4, 1),
        nn.ConvTranspose3d(4, 6, 2, stride=(2, 1, 2), groups=2, bias=False),
        nn.ReLU(inplace=True),
        nn.GroupNorm(3, 6, eps=1e-2),
        nn.ConvTranspose3d(6, 2, 3, padding=1),
        nn.ReLU(),
        nn.GroupNorm(1, 2, affine=False),
    )


def fused_runs(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many fused blocks a call of the model runs."""
    ran: list[nn.Module] = []
    run = forwards.convolve_relu_group_norm

    def counted(convolution: nn.Module, *rest: Any) -> Tensor:
        ran.append(convolution)
        return run(convolution, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(forwards, "convolve_relu_group_norm", counted)
        model(x)
    return len(ran)


@needs_kernels
def test_triples_run_as_one_block(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sequence().to(ours)
    before, names = kinds(model), list(model.state_dict())
    x = torch.randn(2, 1, 3, 2, 3, device=ours)
    expected = gradients(model, x)
    assert [layer.fused for layer in tconv3d.plan_swaps(model).layers] == [True, True]
    tconv3d.accelerate(model)
    assert list(model.state_dict()) == names
    assert_same_results(gradients(model, x), expected)
    assert fused_runs(model, x, monkeypatch) == 2
    assert kinds(tconv3d.restore(model)) == before
    assert_same_results(gradients(model, x), expected)


def test_a_block_follows_its_layers_to_another_type() -> None:
    model = tconv3d.accelerate(sequence()).double()
    y = model(torch.randn(1, 1, 2, 2, 2, dtype=torch.float64))
    assert y.dtype == torch.float64


@pytest.mark.parametrize("again", [copied, pickled, saved])
def test_copies_of_a_fused_sequence(again: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tconv3d.accelerate(sequence())
    x = torch.randn(1, 1, 2, 2, 2)
    expected = model(x)
    other = again(model)
    with torch.no_grad():
        model[1].weight.zero_()  # type: ignore[operator]
    torch.testing.assert_close(other(x), expected)
    assert fused_runs(other, x, monkeypatch) == 2
    assert type(tconv3d.restore(other)) is nn.Sequential


def test_a_layer_with_a_hook_is_called_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tconv3d.accelerate(sequence())
    heard: list[nn.Module] = []
    x = torch.randn(1, 1, 2, 2, 2)
    handle = model[2].register_forward_hook(lambda module, arguments, output: heard.append(module))
    assert fused_runs(model, x, monkeypatch) == 1
    assert heard == [model[2]]
    handle.remove()
    assert fused_runs(model, x, monkeypatch) == 2


def test_a_layer_that_is_replaced_afterwards_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tconv3d.accelerate(sequence())
    model[1] = nn.ConvTranspose3d(4, 6, 1)
    model[5] = nn.Identity()
    x = torch.randn(1, 1, 2, 2, 2)
    assert fused_runs(model, x, monkeypatch) == 0
    assert type(model[:2]) is fusing.FusedSequential  # as slices of sequences are of their class
    torch.testing.assert_close(model[:2](x), model[1](model[0](x)))
    tconv3d.restore(model)
    assert type(model) is nn.Sequential


class Own(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


NO_CHAINS: dict[str, Callable[[], nn.Module]] = {
    "a sequence with a forward of its own": lambda: Own(nn.ConvTranspose3d(2, 2, 1), nn.ReLU(), nn.GroupNorm(1, 2)),
    "nothing behind": lambda: nn.Sequential(nn.ReLU(), nn.ConvTranspose3d(2, 2, 1)),
    "parametrized": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.ConvTranspose3d(2, 2, 1)), nn.ReLU(), nn.GroupNorm(1, 2)
    ),
    "left alone": lambda: nn.Sequential(Louder(2, 2, 1), nn.ReLU(), nn.GroupNorm(1, 2)),
}


@pytest.mark.parametrize("name", NO_CHAINS)
def test_what_has_no_chain(name: str) -> None:
    model = NO_CHAINS[name]().eval()
    kind = type(model)
    x = torch.randn(1, 2, 2, 2, 2)
    expected = model(x)
    assert not any(layer.fused for layer in tconv3d.plan_swaps(model).layers)
    tconv3d.accelerate(model)
    assert type(model) is kind
    torch.testing.assert_close(model(x), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="fullgraph through the block is the block's own test there")
def test_torch_compile_of_a_fused_sequence() -> None:
    model = tconv3d.accelerate(sequence())
    x = torch.randn(1, 1, 2, 2, 2)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


# ---- layers that are no longer, or never were, what their classes say


def doubled(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Another `forward` for a layer: twice what it was."""
    before = module.forward
    return lambda input: 2 * before(input)


def replace_forward(layer: nn.Module, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layer, "forward", doubled(layer))


def replace_call_impl(layer: nn.Module, patch: pytest.MonkeyPatch) -> None:
    before = layer._call_impl
    patch.setattr(layer, "_call_impl", lambda input: 2 * before(input))


def replace_class(layer: nn.Module, patch: pytest.MonkeyPatch) -> None:
    class Own(type(layer)):  # type: ignore[misc]
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    patch.setattr(layer, "__class__", Own)


def replace_method(name: str) -> Callable[[nn.Module, pytest.MonkeyPatch], None]:
    """Another method on the layer's very class."""

    def replace(layer: nn.Module, patch: pytest.MonkeyPatch) -> None:
        before = getattr(type(layer), name)
        patch.setattr(type(layer), name, lambda self, input: (2 if self is layer else 1) * before(self, input))

    return replace


CHANGES: dict[str, Callable[[nn.Module, pytest.MonkeyPatch], None]] = {
    "forward of the object": replace_forward,
    "forward of the class": replace_method("forward"),
    "__call__ of the class": replace_method("__call__"),
    "_call_impl of the class": replace_method("_call_impl"),
    "_call_impl of the object": replace_call_impl,
    "a class of its own": replace_class,
    "a forward hook": lambda layer, patch: layer.register_forward_hook(lambda m, a, y: 2 * y) and None,
    "a hook that is always called": lambda layer, patch: (
        layer.register_forward_hook(lambda m, a, y: 2 * y, always_call=True) and None
    ),
    "a hook before": lambda layer, patch: layer.register_forward_pre_hook(lambda m, a: (2 * a[0],)) and None,
}


@pytest.mark.parametrize("position", [1, 2, 3], ids=["convolution", "ReLU", "GroupNorm"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_layer_that_does_something_else_is_called_as_itself(
    name: str, when: str, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(1, 1, 2, 2, 2)
    expected, model = sequence(), sequence()
    with monkeypatch.context() as patch:
        CHANGES[name](expected[position], patch)
        wanted = expected(x).detach()
    if when == "before":
        CHANGES[name](model[position], monkeypatch)
        tconv3d.accelerate(model)
    else:
        tconv3d.accelerate(model)
        CHANGES[name](model[position], monkeypatch)
    torch.testing.assert_close(model(x).detach(), wanted)
    monkeypatch.undo()


def test_a_replaced_forward_that_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tconv3d.accelerate(sequence())
    x = torch.randn(1, 1, 2, 2, 2)
    for position in (1, 2, 3):
        model[position].forward = doubled(model[position])  # type: ignore[method-assign]
        assert fused_runs(model, x, monkeypatch) == 1
        del model[position].forward
    assert fused_runs(model, x, monkeypatch) == 2


@pytest.mark.parametrize("position", [2, 3], ids=["ReLU", "GroupNorm"])
def test_the_report_does_not_call_a_replaced_forward_fused(position: int) -> None:
    model = sequence()
    model[position].forward = doubled(model[position])  # type: ignore[method-assign]
    assert [layer.fused for layer in tconv3d.plan_swaps(model).layers] == [False, True]


@pytest.mark.parametrize("owner", ["object", "class"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_sequence_with_a_replaced_forward(owner: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sequence()
    x = torch.randn(1, 1, 2, 2, 2)
    expected = 2 * model(x)
    if when == "after":
        tconv3d.accelerate(model)
    if owner == "object":
        model.forward = doubled(model)  # type: ignore[method-assign]
    else:
        run = nn.Sequential.forward
        monkeypatch.setattr(nn.Sequential, "forward", lambda self, input: 2 * run(self, input))
    if when == "before":
        tconv3d.accelerate(model)
        assert type(model) is nn.Sequential
    torch.testing.assert_close(model(x), expected)


def test_a_convolution_whose_class_has_another_forward_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    run = nn.ConvTranspose3d.forward
    monkeypatch.setattr(nn.ConvTranspose3d, "forward", lambda self, input: 2 * run(self, input))
    model = tconv3d.accelerate(sequence())
    assert type(model[1]) is nn.ConvTranspose3d
    assert "itself has been replaced" in tconv3d.plan_swaps(model).layers[0].reason


LISTENERS: dict[str, Callable[[Callable[..., None]], Any]] = {
    "forward": nn.modules.module.register_module_forward_hook,
    "before forward": nn.modules.module.register_module_forward_pre_hook,
    "backward": nn.modules.module.register_module_full_backward_hook,
    "before backward": nn.modules.module.register_module_full_backward_pre_hook,
}


@pytest.mark.parametrize("name", LISTENERS)
def test_who_listens_to_all_modules_hears_the_three_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tconv3d.accelerate(sequence())
    model[2], model[5] = nn.ReLU(), nn.ReLU()  # PyTorch's own backward hooks do not go together with inplace
    heard: list[nn.Module] = []
    x = torch.randn(1, 1, 2, 2, 2, requires_grad=True)
    handle = LISTENERS[name](lambda module, *rest: heard.append(module))
    try:
        model(x).sum().backward()
    finally:
        handle.remove()
    assert {id(module) for module in heard} == {id(module) for module in model.modules()}
    assert fused_runs(model, x, monkeypatch) == 2


def test_a_layer_that_was_compiled_alone_runs_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tconv3d.accelerate(sequence())
    model[3].compile(backend="eager")
    x = torch.randn(1, 1, 2, 2, 2)
    assert fused_runs(model, x, monkeypatch) == 1


def test_symbolic_tracing_sees_the_three_layers() -> None:
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return isinstance(module, tconv3d.ConvTranspose3d) or super().is_leaf_module(module, name)

    model = tconv3d.accelerate(sequence())
    graph = Tracer().trace(model)
    assert [node.target for node in graph.nodes if node.op == "call_module"] == list("0123456")
    x = torch.randn(1, 1, 2, 2, 2)
    torch.testing.assert_close(torch.fx.GraphModule(model, graph)(x), model(x))


def test_parametrizations_of_a_fused_norm_and_convolution() -> None:
    model = tconv3d.accelerate(sequence())
    for position in (1, 3):
        nn.utils.parametrize.register_parametrization(model[position], "weight", nn.Tanh())
    x = torch.randn(1, 1, 2, 2, 2)
    expected = nn.Sequential(*(getattr(model, name) for name in "0123456"))  # the seven layers run one by one
    torch.testing.assert_close(model(x), expected(x))
    tconv3d.restore(model)
    torch.testing.assert_close(model(x), expected(x))


def test_a_compiled_sequence_runs_the_fused_operator() -> None:
    model = tconv3d.accelerate(sequence())
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(str(graph.graph))
        return graph.forward

    torch.compile(model, backend=backend, fullgraph=True)(torch.randn(1, 1, 2, 2, 2))
    assert graphs[0].count("conv_transpose3d_relu_group_norm") >= 2


# ---- sharded


@pytest.fixture
def one_process(tmp_path: Any) -> Iterator[Any]:
    """A group of this process alone, with what shards a module over it."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    yield lambda module: fsdp.fully_shard(module, mesh=mesh)
    distributed.destroy_process_group()


def test_restoring_a_sharded_sequence(one_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 1, 2, 2, 2)
    plain = sequence()
    expected = gradients(plain, x)
    model = one_process(tconv3d.accelerate(sequence()))
    assert fused_runs(model, x, monkeypatch) == 2
    tconv3d.restore(model)
    assert type(model).__mro__[1:4] == type(one_process(plain)).__mro__[1:4]
    assert type(model).__name__ == "FSDPSequential"
    assert not any(type(module).__module__.startswith("tconv3d") for module in model.modules())
    assert fused_runs(model, x, monkeypatch) == 0
    y = model(x)
    torch.testing.assert_close(y.detach(), expected[0])
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_restoring_a_sharded_layer(one_process: Any) -> None:
    model = tconv3d.accelerate(sequence())
    one_process(model[1])
    one_process(parametrizations.weight_norm(model[4]))
    one_process(model)
    x = torch.randn(1, 1, 2, 2, 2)
    expected = model(x)
    tconv3d.restore(model)
    assert not any(issubclass(type(module), tconv3d.ConvTranspose3d) for module in model.modules())
    torch.testing.assert_close(model(x), expected)


def test_a_fused_sequence_whose_class_has_changed_is_not_restored_by_force() -> None:
    model = tconv3d.accelerate(sequence())
    model.__class__ = type("Wrapped", (fusing.FusedSequential,), {})
    with pytest.raises(RuntimeError, match="Wrapped"):
        tconv3d.restore(model)
    assert type(model[1]) is tconv3d.ConvTranspose3d, "all or nothing"
