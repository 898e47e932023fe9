"""Chains in graphs of `torch.compile`: values, gradients and statistics, sizes that change, autocast, restoring."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from places import ROOT
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint

import tconv3d
from tconv3d.api import compiling
from tconv3d.tails import programs


class Decoder(nn.Module):
    """Two convolutions with what follows them: statistics that are updated, an activation in place, a residual."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.ConvTranspose3d(4, 8, 2, stride=2, bias=bias)
        self.norm = nn.BatchNorm3d(8)
        self.act = nn.LeakyReLU(0.1, inplace=True)
        self.second = nn.ConvTranspose3d(8, 4, 2, stride=2, bias=bias)
        self.group_norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        y = self.act(self.norm(self.first(x)))
        return torch.tanh(F.silu(self.group_norm(self.second(y))) + skip)


CHAINS = ["conv -> batch_norm -> leaky_relu: fused", "conv -> group_norm -> silu -> add -> tanh: fused"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Makes float32 strict, and compiles graphs that Inductor has kept on disk again."""
    torch._dynamo.reset()
    usual = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    with inductor_config.patch(force_disable_caches=True):
        yield
    torch.backends.cudnn.conv.fp32_precision = usual
    torch._dynamo.reset()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Gives what became of the chains of all graphs so far."""
    caplog.set_level(logging.INFO, logger="tconv3d.compile")
    yield lambda: [each.getMessage() for each in caplog.records if each.name == "tconv3d.compile"]


def plainly(module: fx.GraphModule, examples: list[Any]) -> Any:
    """Fuses chains as the backend does, and runs the rest without Inductor, whose compiler takes seconds."""
    compiling.fuse_chains(module.graph, all_convolutions=True)
    module.recompile()
    return torch._dynamo.lookup_backend("aot_eager")(module, examples)  # type: ignore[call-arg,arg-type]


def operands(size: tuple[int, int, int] = (3, 2, 4), batch: int = 2) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(size[0])
    x = torch.randn((batch, 4, *size), generator=random)
    return x, torch.randn((batch, 4, *(4 * each for each in size)), generator=random)


def step(run: Callable[..., Tensor], model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Returns result, gradients and statistics of one training step."""
    model.zero_grad()
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    y = run(*leaves)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape))
    return [y.detach(), *(each.grad for each in (*leaves, *model.parameters())), *model.buffers()]


def compare(run: Callable[..., Tensor], model: nn.Module, *calls: tuple[Tensor, ...]) -> None:
    """Compares training steps with the same of a copy of the model that PyTorch runs."""
    plain = tconv3d.restore(copy.deepcopy(model))
    for inputs in calls:
        with tconv3d.use_backend("emulator"):
            ours = step(run, model, inputs)
        for one, other in zip(ours, step(plain, plain, inputs), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-4)


def compiled(model: Any, backend: Any = plainly, **options: Any) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True, **options)


@pytest.mark.thorough
def test_the_backend_by_its_name(said: Callable[[], list[str]]) -> None:
    """Two chains, trained; statistics are updated once for each call."""
    model = Decoder()
    compare(compiled(model, "tconv3d"), model, operands())
    assert said() == CHAINS and model.norm.num_batches_tracked == 1


def test_an_accelerated_model_with_the_default_backend(said: Callable[[], list[str]]) -> None:
    model = Decoder()
    tconv3d.accelerate(model)
    compare(compiled(model, "inductor"), model, operands())
    with torch.no_grad(), tconv3d.use_backend("emulator"):  # in evaluation nothing is recorded
        model.eval()
        ours = compiled(model, "inductor")(*operands())
        torch.testing.assert_close(ours, tconv3d.restore(copy.deepcopy(model))(*operands()), rtol=1e-4, atol=1e-4)
    assert [each for each in said() if ": fused" in each] == 2 * CHAINS
    before = len(said())
    tconv3d.restore(model)
    with tconv3d.use_backend("emulator"):
        compiled(model, "inductor")(*operands())
    assert len(said()) == before


@pytest.mark.thorough
def test_another_process_takes_a_graph_from_the_cache_on_disk(tmp_path: Path) -> None:
    """What Inductor has kept names a tail by its text, so that a process that has not seen the tail can run it."""
    code = """
import logging, sys, torch, tconv3d
logging.basicConfig(level=logging.INFO)
torch.backends.cudnn.conv.fp32_precision = "ieee"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.ConvTranspose3d(4, 8, 2, stride=2), torch.nn.GroupNorm(2, 8), torch.nn.Sigmoid())
x = torch.randn(1, 4, 2, 3, 4)
expected = model(x)
fused = tconv3d.fuse(model[0], model[1:])
with tconv3d.use_backend("emulator"):
    y = torch.compile(fused, fullgraph=True)(x)
    y.sum().backward()
torch.testing.assert_close(y, expected)
"""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and "unfused" not in done.stderr, done.stderr


@pytest.mark.thorough
def test_sizes_that_change(said: Callable[[], list[str]]) -> None:
    """With dynamic sizes one graph serves all; the eps of a norm is part of it, and another eps makes another."""
    model = Decoder()
    run = compiled(model, dynamic=True)
    compare(run, model, operands(), operands((2, 3, 5), batch=3))
    count = len(said())
    assert set(said()) == set(CHAINS)
    compare(run, model, operands((5, 2, 3)))
    assert len(said()) == count and not any("unfused" in each for each in said())
    model.group_norm.eps = 0.5
    compare(run, model, operands((5, 2, 3)))
    assert len(said()) > count


def test_without_dynamic_sizes_another_size_is_compiled_again() -> None:
    model = Decoder()
    run = compiled(model, dynamic=False)
    compare(run, model, operands(), operands((2, 3, 5)), operands())


def test_a_fused_block_with_a_captured_norm_and_a_residual(said: Callable[[], list[str]]) -> None:
    norm = nn.InstanceNorm3d(8, affine=True, track_running_stats=True)
    layer = nn.ConvTranspose3d(4, 8, 2, stride=2)
    block = tconv3d.fuse(layer, lambda z, r: F.mish(norm(z) + r))
    x, residual = torch.randn(2, 4, 2, 3, 4), torch.randn(2, 8, 4, 6, 8)
    inputs = [each.requires_grad_() for each in (x, residual)]
    with tconv3d.use_backend("emulator"):
        ours = compiled(block)(*inputs)
        found = torch.autograd.grad(ours.square().sum(), [*inputs, layer.weight, norm.weight])
    again = copy.deepcopy(norm)
    again.reset_running_stats()
    plain = F.mish(again(layer(x)) + residual)
    wanted = torch.autograd.grad(plain.square().sum(), [*inputs, layer.weight, again.weight])
    for one, other in zip((ours, *found, *norm.buffers()), (plain, *wanted, *again.buffers()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    assert said() == ["conv -> instance_norm -> add -> mish: fused"]


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside: bool, said: Callable[[], list[str]]) -> None:
    """Autocast that the compiled function switches on itself, or that is on around its call."""
    model = Decoder(bias=False)  # norms remove what a bias adds: its gradient is 0, and what is found are errors

    def cast(x: Tensor, skip: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x, skip).float()

    x, skip = operands()
    skip = skip.bfloat16()  # as another layer gives it under autocast
    plain = copy.deepcopy(model)
    expected = step(cast, model, (x, skip))
    model.load_state_dict(plain.state_dict())
    with tconv3d.use_backend("emulator"):
        if inside:
            ours = step(compiled(cast), model, (x, skip))
        else:
            run = compiled(model)
            with torch.autocast("cpu", torch.bfloat16):
                ours = step(lambda *given: run(*given).float(), model, (x, skip))
    for one, other in zip(ours, expected, strict=True):
        size = other.float().norm().clamp_min(0.5)
        assert (one.float() - other.float()).norm() <= 3e-2 * size
    assert len(said()) == 2 and all(": fused" in each for each in said())


class NormedChannels(nn.Module):
    """A norm over channels, for which they come last for a moment, and what the caller gets of it."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.up, self.norm, self.back = nn.ConvTranspose3d(4, 8, 2, stride=2), nn.LayerNorm(8), back

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.up(x).permute(0, 2, 3, 4, 1))
        return F.gelu(y.permute(0, 4, 1, 2, 3)) if self.back else y.view(x.shape[0], -1, 8)


@pytest.mark.parametrize("back", [True, False])
def test_a_norm_over_channels_that_come_last(back: bool, said: Callable[[], list[str]]) -> None:
    model = NormedChannels(back)
    x = operands()[0]
    for each in (x, x.contiguous(memory_format=torch.channels_last_3d)):
        compare(compiled(model), model, (each,))
        fused = " -> gelu: fused" if back else ": not fused, PyTorch computes permute"
        assert said()[-1].startswith(f"conv -> layer_norm{fused}")
    tail = fx.symbolic_trace(lambda z: F.layer_norm(z.permute(0, 2, 3, 4, 1), (8,)).permute(0, 4, 1, 2, 3)).graph
    text = programs.write(tail, (), frozenset(), (), None)
    settings = [2, 2, 2], [0, 0, 0], [0, 0, 0], 1, [1, 1, 1]
    with tconv3d.use_backend("emulator"):
        given = x, model.up.weight.detach(), None, [], [], text, *settings
        torch.library.opcheck(torch.ops.tconv3d.chain.default, given, test_utils="test_faketensor")


def test_changed_weights_are_seen_in_evaluation() -> None:
    """Vectors that come from parameters are kept between calls."""
    model = nn.Sequential(nn.ConvTranspose3d(4, 8, 2, stride=2), nn.BatchNorm3d(8), nn.ReLU()).eval()
    run, x = compiled(model), operands()[0]
    with torch.no_grad(), tconv3d.use_backend("emulator"):
        for change in (lambda: None, lambda: model[1].running_mean.add_(1), lambda: model[0].weight.mul_(2)):
            change()
            expected = torch.relu(model[1](F.conv_transpose3d(x, model[0].weight, model[0].bias, 2)))
            torch.testing.assert_close(run(x), expected, rtol=1e-4, atol=1e-5)


def test_a_compiled_chain_runs_unfused_where_the_kernels_do_not_run() -> None:
    model = Decoder()
    run, plain = compiled(model), copy.deepcopy(model)
    with tconv3d.use_backend("emulator"):
        step(run, model, operands())
    step(plain, plain, operands())
    for one, other in zip(step(run, model, operands()), step(plain, plain, operands()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-4)


def test_a_chain_inside_a_checkpoint(said: Callable[[], list[str]]) -> None:
    """The body of a checkpoint is a graph of its own, which runs again in the backward pass."""
    model = nn.Sequential(nn.ConvTranspose3d(4, 8, 2, stride=2), nn.GroupNorm(2, 8), nn.SiLU())

    def run(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False).sin()

    x = operands()[0]
    plain = copy.deepcopy(model)
    with tconv3d.use_backend("emulator"):
        ours = step(compiled(run), model, (x,))
    for one, other in zip(ours, step(lambda given: plain(given).sin(), plain, (x,)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-4)
    assert said() == ["conv -> group_norm -> silu: fused"]


def test_what_is_not_fused_says_why(said: Callable[[], list[str]]) -> None:
    layer = nn.ConvTranspose3d(4, 8, 2, stride=2)
    one = torch.randn(4, 6, 8)  # a residual for all channels of all batch items

    def run(x: Tensor) -> Tensor:
        z = layer(x)
        return F.silu(F.silu(z) + one) + layer(x).cumsum(2)

    x = torch.randn(2, 4, 2, 3, 4)
    with tconv3d.use_backend("emulator"):
        torch.testing.assert_close(compiled(run)(x), run(x), rtol=1e-4, atol=1e-5)
    why = "PyTorch computes a part of its gradients"
    assert said()[0] == f"conv -> silu -> add -> silu -> add: fused as far as conv -> silu ({why})"
    assert "cumsum follows it, which a tail cannot hold" in said()[1]
    torch._dynamo.reset()
    compiled(run)(x)
    assert "not fused, cpu tensors run PyTorch's operator" in said()[2]


def test_a_convolution_whose_result_is_detached_gets_no_gradient(said: Callable[[], list[str]]) -> None:
    layer, scale = nn.ConvTranspose3d(4, 8, 2, stride=2), torch.randn(8, 1, 1, 1, requires_grad=True)
    with tconv3d.use_backend("emulator"):
        compiled(lambda x: torch.tanh(layer(x).detach() * scale))(torch.randn(2, 4, 2, 3, 4)).sum().backward()
    assert layer.weight.grad is None and scale.grad is not None
    assert "no gradient flows" in said()[0]


def test_without_a_compiler_the_rest_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_why_not_inductor", lambda examples: "there is no C++ compiler")
    model = Decoder()
    with pytest.warns(UserWarning, match="there is no C\\+\\+ compiler, so the graph runs without Inductor"):
        compare(compiled(model, "tconv3d"), model, operands())


def test_the_operators_keep_what_they_declare() -> None:
    """The results have the shapes and strides that compilers are told, and no operator writes to its arguments."""
    graph = fx.symbolic_trace(lambda z, mean, var, r: F.silu(F.batch_norm(z, mean, var, training=True) + r)).graph
    text = programs.write(graph, ("tensor",) * 3, frozenset({0, 1}), (0, 1), None)
    x, weight, bias = torch.randn(2, 4, 2, 3, 4), torch.randn(4, 8, 2, 2, 2), torch.randn(8)
    tensors = [torch.zeros(8), torch.ones(8), torch.randn(2, 8, 4, 6, 8)]
    settings = [2, 2, 2], [0, 0, 0], [0, 0, 0], 1, [1, 1, 1]
    needed = [False, False, True]
    operators = torch.ops.tconv3d
    checks = ("test_schema", "test_faketensor")
    with tconv3d.use_backend("emulator"):
        given = x, weight, bias, tensors, [], text
        torch.library.opcheck(operators.chain.default, (*given, *settings), test_utils=checks)
        recorded = (*given, needed, 4, *settings)
        torch.library.opcheck(operators.chain_recorded.default, recorded, test_utils=checks)
        *_, z, sums = operators.chain_recorded.default(*recorded)
        arguments = (torch.randn_like(z), z, sums, *given, needed, *settings)
        torch.library.opcheck(operators.chain_grad.default, arguments, test_utils=checks)
        # Sums for which a graph has no room are computed again.
        usual = operators.chain_grad.default(*arguments)
        again = operators.chain_grad.default(*arguments[:2], sums[:1], *arguments[3:])
    for one, other in zip(usual, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_entry_point_is_the_packages() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points.torch_dynamo_backends]\ntconv3d = "tconv3d.api.compiling:backend"\n' in text
    assert "tconv3d" in torch._dynamo.list_backends()
    registry = SimpleNamespace(_BACKENDS={"tconv3d": object()}, _COMPILER_FNS={}, register_backend=None)
    compiling.register_backend(registry)  # PyTorch loads the entry point, and registers what it names
