"""Programs that compute small tensors between passes: values, what they overwrite, and what is left to PyTorch."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import poisoned
from mutants import kernel_from, mutate
from sanitizing import sanitized
from tail_checks import C, check_gradients, check_values, close, fused, operand
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import tconv3d
from tconv3d import emulator
from tconv3d.tails import between
from tconv3d.tails.numbers import Assembled, Assembler, CannotAssemble, _levels
from tconv3d.torch_ops import number_executor

N, G = 3, 4
Function = Callable[[Tensor, Tensor, Tensor], Any]
FUNCTIONS: dict[str, Function] = {
    "arithmetic": lambda a, b, s: (a * b - 2 * s + 1.5) / (a.abs() + 0.5),
    "functions": lambda a, b, s: torch.rsqrt(a * a + 1) + torch.sigmoid(b) * torch.tanh(s).exp(),
    "powers": lambda a, b, s: (a.abs() + 1).pow(-1.5) + b.pow(3) * (s.abs() + 1).pow(0.5),
    "choices": lambda a, b, s: torch.where(a > b, a.clamp(-0.5, 0.5), torch.maximum(b, s)),
    "sums": lambda a, b, s: (a.sum(0, keepdim=True) * b).mean(1, keepdim=True) + s.sum(),
    "groups": lambda a, b, s: a.view(N, G, C // G).mean(2, keepdim=True).expand(N, G, C // G).reshape(N, C) * b,
    "sum of sums": lambda a, b, s: ((a * b).sum(1, keepdim=True) - a).sum(0) * s,
    "orders": lambda a, b, s: a.t().reshape(N, C) + b.transpose(0, 1).permute(1, 0) * s.unsqueeze(0)[:, 0],
    "slices": lambda a, b, s: a[:, 1:3].sum(1) + b.select(1, 2) * s.reshape(C)[0],
}


def assembled(function: Function, *given: Tensor) -> tuple[Assembled, fx.Node]:
    graph = make_fx(lambda *each: (function(*each),))(*given).graph
    nodes = list(graph.nodes)
    tensors = dict(zip([node for node in nodes if node.op == "placeholder"], given, strict=True))
    (result,) = nodes[-1].args[0]
    inner = [node for node in nodes if node.op == "call_function"]
    return Assembler(inner, tensors, {}, {}).assembled([], [], torch.float32, [(result, None)], []), result


def run(found: Assembled, *given: Tensor) -> Tensor:
    nodes = [source for source, _ in found.sources]
    names = sorted({node.name for node in next(iter(nodes)).graph.nodes if node.op == "placeholder"})  # type: ignore[union-attr]
    tensors = [given[names.index(node.name)].contiguous() for node in nodes]  # type: ignore[union-attr]
    ((node, _),) = found.made
    like = node.meta["val"]
    result = torch.full(like.shape, 77, dtype=like.dtype)
    scratch = torch.full((max(found.scratch, 1),), float("nan"), dtype=torch.float64)
    number_executor.run(found.program, given[0], (scratch, *tensors, result))
    return result


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(shape).to(dtype) for shape in ((N, C), (N, C), (1, C)))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str, dtype: torch.dtype) -> None:
    given = operands(dtype)
    program, _ = assembled(FUNCTIONS[name], *given)
    exact = FUNCTIONS[name](*(each.double() for each in given))
    found = run(program, *given)
    assert found.dtype == dtype and found.shape == exact.shape
    limit = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert (found.double() - exact).norm() <= limit * exact.norm()


@pytest.mark.parametrize("team", [1, 40, 700, 5000])
def test_sums_of_any_length(team: int) -> None:
    a = torch.randn(2, team)
    program, _ = assembled(lambda a, b, s: (a - 1).sum(1), a, a, a)
    torch.testing.assert_close(run(program, a, a, a), (a.double() - 1).sum(1).float())


def test_whole_numbers() -> None:
    counts = torch.tensor([3, 2**40])
    program, _ = assembled(lambda a, b, s: a + 1, counts, counts, counts)
    assert run(program, counts, counts, counts).tolist() == [4, 2**40 + 1]


@pytest.mark.parametrize(
    "function", [lambda a, b, s: a.cumsum(0), lambda a, b, s: a.erfinv(), lambda a, b, s: a.amax(0)]
)
def test_what_no_program_computes_is_left(function: Function) -> None:
    with pytest.raises(CannotAssemble):
        assembled(function, *operands())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_places_are_described_by_sizes_and_strides(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    places = torch.arange(torch.Size(shape).numel()).reshape(shape).permute(order)
    repeated = data.draw(st.integers(1, 3))
    places = places.unsqueeze(-1).expand(*places.shape, repeated).reshape(-1)
    base, levels = _levels(places)
    found = []
    for index in range(len(places)):
        at = base
        for size, stride in levels:
            at, index = at + index % size * stride, index // size
        found.append(at)
    assert found == places.tolist()


class BatchNorm(nn.Module):
    """BatchNorm in training mode, with GroupNorm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm3d(C), nn.GroupNorm(2, C)

    def forward(self, z: Tensor) -> Tensor:
        return F.silu(self.second(F.relu(self.first(z))))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Lists whether each new gap became a program."""
    found: list[bool] = []
    usual = between.Between._assembled

    def noted(self: Any, *arguments: Any) -> Any:
        result = usual(self, *arguments)
        found.append(result is not None)
        return result

    monkeypatch.setattr(between.Between, "_assembled", noted)
    return found


def test_norms_run_no_operators_between_passes(programs: list[bool]) -> None:
    model = fused(BatchNorm())
    check_gradients(model, operand(torch.float32), 40)  # the gradient of the bias is 0: two norms remove the bias
    assert programs and all(programs)


def test_pytorch_takes_no_statistics_that_the_convolution_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results with more numbers than programs read are no operands of operators between passes either."""
    monkeypatch.setattr(between, "MOST_NUMBERS", 100)
    model, x = fused(nn.BatchNorm3d(C)), operand(torch.float32)
    with torch.no_grad(), tconv3d.use_backend("emulator"):
        model(x)
        with torch.autograd.profiler.profile() as profiled:
            model(x)
    assert not {"aten::var_mean", "aten::mean"} & {each.name for each in profiled.function_events}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", [nn.BatchNorm3d, nn.InstanceNorm3d])
def test_running_statistics_are_overwritten(kind: Any, dtype: torch.dtype, programs: list[bool]) -> None:
    norm = kind(C, momentum=0.3, track_running_stats=True)
    model = fused(norm, dtype)
    x = operand(dtype)
    reference = copy.deepcopy(model).double()
    versions = [norm.running_mean._version, norm.num_batches_tracked._version]  # type: ignore[union-attr]
    for _ in range(2):
        with torch.no_grad(), tconv3d.use_backend("torch"):
            reference(x.double())
        with torch.no_grad(), tconv3d.use_backend("emulator"), poisoned():
            model(x)
    for ours, exact in zip(norm.buffers(), reference.buffers(), strict=True):
        close(ours, exact)
    assert norm.running_mean._version > versions[0]
    assert kind is nn.InstanceNorm3d or norm.num_batches_tracked._version > versions[1]
    assert programs == [True]


def test_sums_of_tensors_at_any_address() -> None:
    """A pass leaves more sums of a channel if an address is no multiple of 16 bytes."""
    torch.manual_seed(3)
    layer, norm = nn.ConvTranspose3d(4, 4, 2, stride=2), nn.GroupNorm(2, 4)
    model = tconv3d.fuse(layer, lambda z, skip: F.silu(norm(z + skip)))
    x, memory = torch.randn(1, 4, 4, 6, 8), torch.randn(4 * 8 * 12 * 16 + 1)
    for offset in (0, 1, 0):
        skip = memory[offset : offset + 4 * 8 * 12 * 16].view(1, 4, 8, 12, 16)
        with tconv3d.use_backend("emulator"), poisoned():
            ours = model(x.requires_grad_(), skip)
        assert type(ours.grad_fn).__name__ == "ChainBackward"
        exact = F.silu(copy.deepcopy(norm).double()(copy.deepcopy(layer).double()(x.double()) + skip.double()))
        close(ours.detach(), exact.detach())


@pytest.mark.parametrize("of", [lambda z: z, lambda z: z.mean((2, 3, 4), keepdim=True)], ids=["volume", "numbers"])
def test_sums_of_truth_values_are_true(of: Callable[[Tensor], Tensor]) -> None:
    model = fused(lambda z: z * ((of(z) > 0) + (of(z) > -9)).float() - z * ((of(z) > 0) & ~(of(z) > 9)))
    assert not check_values(model, operand(torch.float32)).pytorch


class OldMean(nn.Module):
    """BatchNorm whose old running mean is used behind another norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm3d(C), nn.GroupNorm(2, C)

    def forward(self, z: Tensor) -> Tensor:
        assert self.first.running_mean is not None
        old = torch.exp(self.first.running_mean)
        return self.second(F.relu(self.first(z))) * old[:, None, None, None]


@pytest.mark.parametrize("gradients", [False, True])
def test_old_running_statistics_are_used(gradients: bool) -> None:
    model, x = fused(OldMean()), operand(torch.float32).requires_grad_(gradients)
    reference = copy.deepcopy(model).double()
    for _ in range(2):
        with torch.set_grad_enabled(gradients), tconv3d.use_backend("torch"):
            exact = reference(x.detach().double())
        with torch.set_grad_enabled(gradients), tconv3d.use_backend("emulator"):
            close(model(x).detach(), exact.detach(), 2)


def test_what_a_thread_overwrites_no_other_thread_reads() -> None:
    def normed(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return s.copy_(s - s[:, :1] + a.sum(0))

    given = operands()
    graph = make_fx(normed)(*given).graph
    nodes = list(graph.nodes)
    tensors = dict(zip([node for node in nodes if node.op == "placeholder"], given, strict=True))
    inner = [node for node in nodes if node.op == "call_function"]
    (write,) = [node for node in inner if node.target is torch.ops.aten.copy_.default]
    with pytest.raises(CannotAssemble):
        Assembler(inner, tensors, {}, {}).assembled([], [], torch.float32, [], [write])


def test_tensors_without_elements_are_left_to_pytorch() -> None:
    model = fused(lambda z, s: (F.relu(z), s[:, :0]))
    x, s = operand(torch.float32), torch.randn(2, C)
    with torch.no_grad(), tconv3d.use_backend("emulator"):
        assert model(x, s)[1].shape == (2, 0)


MUTANTS = {
    "a later step does not wait": (
        "        __syncthreads();\n      }\n    }\n    __syncthreads();",
        "      }\n    }",
    ),
    "warps do not wait for each other": ("of_warps[thread / 32] = sum;\n        __syncthreads();", ";"),
    "a sum begins one element late": ("int k = thread % team;", "int k = thread % team + 1;"),
    "a team forgets its other warps": ("for (int k = 1; k < team / 32; ++k)", "for (int k = 1; k < 1; ++k)"),
    "sums are not divided": ("sum / args.numbers[divisor]", "sum"),
    "strides are of the wrong level": ("stride = word[3 + 2 * i]", "stride = word[3]"),
    "sums lie at the beginning": (
        "static_cast<double*>(args.tensor_0) + base",
        "static_cast<double*>(args.tensor_0)",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_faults_are_found(name: str, tmp_path: Path) -> None:
    text, replacement = MUTANTS[name]
    mutate("numbers", text, replacement, tmp_path / "mutant")
    with kernel_from(tmp_path / "mutant", "numbers"), pytest.raises(AssertionError):
        for each in ("sums", "groups", "sum of sums", "orders"):
            test_values(each, torch.float32)
        test_sums_of_any_length(700)


@pytest.mark.slow
@pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")
def test_sanitizers_find_nothing() -> None:
    child = subprocess.run([sys.executable, __file__], env=sanitized(), capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == ["checked"]


if __name__ == "__main__":
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    for each in FUNCTIONS:
        test_values(each, torch.float32)
    for length in (1, 700):
        test_sums_of_any_length(length)
    test_sums_of_tensors_at_any_address()
    print("checked")
