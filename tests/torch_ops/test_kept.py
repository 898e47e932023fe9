"""Packed weights that are kept between calls: used where the weight is the same, and nowhere else."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tconv3d
from tconv3d.torch_ops import executor, kept

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DTYPE = torch.bfloat16
SETTINGS = (16, 8, 3, 1, 1)  # channels, kernel, stride, padding
SIZE = (1, 16, 2, 2, 3)
PACKED, KEPT = ["pack", "halo"], ["halo"]


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    tconv3d.keep_weights(True)
    yield
    tconv3d.keep_weights(True)


@pytest.fixture
def launched(ours: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels that were launched since it was last emptied."""
    if ours == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("nothing is packed on this GPU")
    names: list[str] = []
    prepare = executor._prepare_steps

    def recording(steps: list[Any], like: Tensor) -> executor.Start:
        start = prepare(steps, like)
        own = [launch.kernel for launch, _ in steps]
        return lambda operands, stream: (names.extend(own), start(operands, stream))[1]

    executor.forget()
    monkeypatch.setattr(executor, "_prepare_steps", recording)
    yield names
    executor.forget()


def make(device: str, kind: Any = tconv3d.ConvTranspose3d) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    return kind(*SETTINGS).to(device, DTYPE).eval(), torch.randn(SIZE).to(device, DTYPE)


def names_of(launched: list[str], call: Callable[[], Any]) -> list[str]:
    launched.clear()
    call()
    return list(launched)


def is_right(y: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor) -> bool:
    expected = F.conv_transpose3d(x.double(), weight.double(), None if bias is None else bias.double(), padding=1)
    return bool((y - expected).norm() < 0.01 * expected.norm())


def infer(layer: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = layer(x)
        assert is_right(y, layer.weight, layer.bias, x)
        return y


def test_the_third_call_launches_no_pack(ours: str, launched: list[str]) -> None:
    layer, x = make(ours)
    calls = [names_of(launched, lambda: infer(layer, x)) for _ in range(4)]
    assert calls == [PACKED, PACKED, KEPT, KEPT]
    assert names_of(launched, lambda: infer(layer, torch.cat([x, x]))) == KEPT  # another plan that packs alike
    assert names_of(launched, lambda: layer(x)) == PACKED  # a gradient is wanted
    assert names_of(launched, lambda: infer(layer, x)) == PACKED  # it may have been trained
    layer.requires_grad_(False)
    assert names_of(launched, lambda: layer(x)) == KEPT  # nothing wants a gradient
    assert names_of(launched, lambda: layer(x.clone().requires_grad_())) == PACKED


def test_the_results_are_the_same(ours: str, launched: list[str]) -> None:
    layer, x = make(ours)
    first, *others = [infer(layer, x) for _ in range(3)]
    assert launched == PACKED + PACKED + KEPT
    assert all(torch.equal(first, y) for y in others)


# ---- a weight that changed


def _load(layer: Any) -> None:
    layer.load_state_dict({name: torch.randn_like(value) for name, value in layer.state_dict().items()})


def _step(layer: Any, optimizer: Any, **options: Any) -> None:
    layer.weight.grad = torch.randn_like(layer.weight)
    optimizer([layer.weight], lr=1.0, **options).step()


class OldOptimizer(torch.optim.SGD):
    """As they were written once."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad.data)


def _in_inference_mode(layer: Any) -> None:
    with torch.inference_mode():
        layer.weight.neg_()


def _replace(layer: Any) -> None:
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))


def _set_data(layer: Any) -> None:
    layer.weight.data = torch.randn_like(layer.weight)


def _through_data(layer: Any) -> None:
    layer.weight.data.neg_()


def _evaluate_again(layer: Any) -> None:
    _through_data(layer)
    nn.Sequential(layer).eval()


def _forget(layer: Any) -> None:
    _through_data(layer)
    tconv3d.keep_weights(True)


def _converted(layer: Any) -> None:
    layer.to(torch.float32).to(memory_format=torch.channels_last_3d)
    _through_data(layer)
    layer.to(DTYPE)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda layer: layer.weight.neg_(),
    "in place, in inference mode": _in_inference_mode,
    "through an alias": lambda layer: layer.weight.detach().view(-1)[:99].neg_(),
    "load_state_dict": _load,
    "SGD": lambda layer: _step(layer, torch.optim.SGD),
    "a fused optimizer": lambda layer: _step(layer, torch.optim.AdamW, fused=True),  # counts no version
    "an optimizer that writes .data": lambda layer: _step(layer, OldOptimizer),
    "another parameter": _replace,
    "other data": _set_data,
    ".data, then eval": _evaluate_again,
    ".data, then keep_weights": _forget,
    "there and back": _converted,
    "set_": lambda layer: layer.weight.set_(torch.randn_like(layer.weight)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_weight_that_changed_is_packed_again(name: str, ours: str, launched: list[str]) -> None:
    layer, x = make(ours)
    for _ in range(3):
        before = infer(layer, x)
    with torch.no_grad():
        CHANGES[name](layer)
    launched.clear()
    assert not torch.equal(infer(layer, x), before)
    infer(layer, x)
    infer(layer, x)
    assert launched == PACKED + PACKED + KEPT


def test_writes_through_data_are_not_seen(ours: str, launched: list[str]) -> None:
    """The limit that the documentation states. If this fails, PyTorch has begun to count: say so there."""
    layer, x = make(ours)
    before = [infer(layer, x) for _ in range(3)][-1]
    _through_data(layer)
    with torch.no_grad():
        assert torch.equal(layer(x), before)


def test_new_data_at_the_old_address(ours: str, launched: list[str]) -> None:
    """Neither the version nor the address tell: the storage does."""
    layer, x = make(ours)
    place, addresses = torch.randn_like(layer.weight.detach()), set()
    for sign in (1, -1):
        # A tensor over the same memory that has a storage of its own, as a freed and allocated one has.
        layer.weight.data = torch.from_dlpack(torch.utils.dlpack.to_dlpack(place.data.mul_(sign)))
        addresses.add((layer.weight.data_ptr(), layer.weight._version))
        for _ in range(3):
            infer(layer, x)
    assert len(addresses) == 1
    assert launched == 2 * (PACKED + PACKED + KEPT)


def test_another_weight_at_the_address_of_one_that_died(ours: str, launched: list[str]) -> None:
    x, memory, seen = torch.randn(SIZE).to(ours, DTYPE), torch.randn(16, 8, 3, 3, 3).to(ours, DTYPE), set()
    for _ in range(6):
        weight = memory.data  # another tensor each time, often with the same id
        seen.add((weight.data_ptr(), weight._version))
        launched.clear()
        for _ in range(3):
            assert is_right(tconv3d.conv_transpose3d(x, weight, padding=1), weight, None, x)
        assert launched[:2] == PACKED and launched[-1:] == KEPT
        del weight
        assert not kept._kept
        memory.neg_()
    assert len(seen) == 1


def test_what_is_kept_dies_with_the_weight(ours: str, launched: list[str]) -> None:
    layer, x = make(ours)
    for _ in range(3):
        infer(layer, x)
    (found,) = kept._kept.values()
    ((address, buffer),) = found.packs.values()
    assert buffer.data_ptr() == address and buffer.numel() >= layer.weight.numel() * 2
    del found, layer
    gc.collect()
    assert not kept._kept
    other = copy.deepcopy(make(ours)[0])
    assert "kept" not in repr(other.state_dict()) and not kept._kept


# ---- kinds of calls


def test_other_calls_with_the_same_weight(ours: str, launched: list[str]) -> None:
    """Another function, another type and another layout of one weight: each has a pack that is its own, or packs."""
    layer, x = make(ours)
    relu = tconv3d.ConvTranspose3dReLU(*SETTINGS).to(ours, DTYPE)
    relu.weight, relu.bias = layer.weight, layer.bias
    for _ in range(3):
        y = infer(layer, x)
        with torch.no_grad():
            assert torch.equal(relu(x), y.relu())
            last = layer(x.to(memory_format=torch.channels_last_3d))
            assert is_right(last, layer.weight, layer.bias, x)
    with torch.no_grad():
        layer.to(torch.float16)
        y = layer(x.half())
        assert is_right(y, layer.weight, layer.bias, x)


def test_the_fused_block(ours: str, launched: list[str]) -> None:
    torch.manual_seed(0)
    block = tconv3d.ConvTranspose3dReLUGroupNorm(16, 8, 3, 2, padding=1).to(ours, DTYPE).eval()
    x = torch.randn(SIZE).to(ours, DTYPE)
    plain = nn.Sequential(block.conv_transpose, nn.ReLU(), block.group_norm)
    with torch.no_grad():
        for kernel in (PACKED, PACKED, KEPT, KEPT):
            assert names_of(launched, lambda: block(x)) == [*kernel, "statistics", "normalize"]
        block.conv_transpose.weight.neg_()
        for _ in range(3):
            with tconv3d.use_backend("torch"):
                expected = copy.deepcopy(plain).double()(x.double())
            assert (block(x) - expected).norm() < 0.02 * expected.norm()


def test_a_profiler_sees_what_runs_without_it(ours: str, launched: list[str]) -> None:
    layer, x = make(ours)
    for _ in range(2):
        infer(layer, x)
    with torch.profiler.profile() as profile:
        assert names_of(launched, lambda: infer(layer, x)) == KEPT
    assert "tconv3d::conv_transpose3d" in [event.key for event in profile.key_averages()]


def test_compiled_calls_keep_nothing(ours: str, launched: list[str]) -> None:
    """What they allocate may belong to a CUDA graph."""
    layer, x = make(ours)
    compiled: Any = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert [names_of(launched, lambda: compiled(x)) for _ in range(3)] == 3 * [PACKED]


# ---- weights that are not kept


def _inference_tensor(weight: Tensor) -> Tensor:
    with torch.inference_mode():
        return weight.clone()


def _part_of_a_buffer(weight: Tensor) -> Tensor:
    return torch.cat([weight, weight])[:16]


@pytest.mark.parametrize("make_weight", [_inference_tensor, _part_of_a_buffer])
def test_weights_that_are_not_kept(make_weight: Any, ours: str, launched: list[str]) -> None:
    layer, x = make(ours)
    weight = make_weight(layer.weight.detach())
    for _ in range(4):
        assert is_right(tconv3d.conv_transpose3d(x, weight, None, 1, 1), weight, None, x)
    assert launched == 4 * PACKED and not kept._kept


def test_switched_off(ours: str, launched: list[str]) -> None:
    layer, x = make(ours)
    for _ in range(3):
        infer(layer, x)
    tconv3d.keep_weights(False)
    assert not kept._kept
    assert [names_of(launched, lambda: infer(layer, x)) for _ in range(3)] == 3 * [PACKED]


def test_swapping_parameters_on_conversion(ours: str, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch swaps no tensor that somebody has a weak reference to."""
    layer, x = make(ours)
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    for _ in range(3):
        infer(layer, x)
    assert launched == 3 * PACKED
    layer.to(torch.float32).to(DTYPE)
    infer(layer, x)


def test_no_memory_for_what_would_be_kept(ours: str, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make(ours)

    def full(size: int, device: torch.device) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(kept, "_allocate", full)
    for _ in range(3):
        infer(layer, x)
    assert launched == 3 * PACKED and not kept._kept


def test_a_failed_launch_keeps_nothing(ours: str, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make(ours)
    infer(layer, x)
    (task,) = executor._tasks.values()

    def fail(operands: Any, stream: int) -> None:
        raise RuntimeError("refused")

    assert task.packing is not None
    vars(task.packing)["start_all"] = fail
    with pytest.raises(RuntimeError, match="refused"):
        infer(layer, x)
    assert not kept._kept
    del vars(task.packing)["start_all"]
    infer(layer, x)
    assert kept._kept


def test_a_call_under_capture(ours: str, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It packs, and its weight is never kept again, nor that of other tensors over the same memory."""
    layer, x = make(ours)
    alias = layer.weight.detach()
    for _ in range(3):
        infer(layer, x)
        tconv3d.conv_transpose3d(x, alias, None, 1, 1)
    assert len(kept._kept) == 2
    with monkeypatch.context() as patch:
        patch.setattr(kept, "_capturing", lambda weight, stream: True)
        assert names_of(launched, lambda: infer(layer, x)) == PACKED
    assert not kept._kept
    assert [names_of(launched, lambda: infer(layer, x)) for _ in range(3)] == 3 * [PACKED]
    assert names_of(launched, lambda: tconv3d.conv_transpose3d(x, alias, None, 1, 1)) == PACKED
    layer.weight.data = layer.weight.detach().clone()  # other memory, that the graph does not know
    assert [names_of(launched, lambda: infer(layer, x)) for _ in range(3)] == [PACKED, PACKED, KEPT]


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_weight_trained_under_capture(
    which: str, ours: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = make(ours)
    y = layer(x.requires_grad_())
    with monkeypatch.context() as patch:
        patch.setattr(kept, "_capturing", lambda weight, stream: True)
        layer(x) if which == "forward" else y.sum().backward()
    assert [names_of(launched, lambda: infer(layer, x.detach())) for _ in range(3)] == 3 * [PACKED]


# ---- many


def test_few_packs_of_a_weight_are_kept(ours: str) -> None:
    weight = torch.randn(4, device=ours)
    for stream in range(2 * kept.MOST_PACKS):
        for expected in (None, kept.Promise):
            promise = kept.promise(weight, weight.data_ptr(), (stream, 0), 16)
            assert type(promise) is (expected or type(None))
        assert promise is not None
        promise.keep()
        assert kept.find(weight, weight.data_ptr(), (stream, 0)) == promise.pack
    (found,) = kept._kept.values()
    assert [place for place, _ in found.packs] == list(range(kept.MOST_PACKS, 2 * kept.MOST_PACKS))


def test_another_address(ours: str) -> None:
    weight = torch.randn(4, device=ours)
    promises = [kept.promise(weight, weight.data_ptr(), (0, 0), 16) for _ in range(2)]
    assert promises[1] is not None
    promises[1].keep()
    assert kept.find(weight, weight.data_ptr() + 16, (0, 0)) is None and not kept._kept


def test_a_promise_is_void_when_all_is_forgotten_meanwhile(ours: str) -> None:
    weight = torch.randn(4, device=ours)
    promises = [kept.promise(weight, weight.data_ptr(), (0, 0), 16) for _ in range(2)]
    assert promises[1] is not None
    kept.forget()
    promises[1].keep()
    assert not kept._kept


def test_notes_are_bounded(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_NOTES", 5)
    weight = torch.randn(4, device=ours)
    for stream in range(20):
        kept.promise(weight, weight.data_ptr(), (stream, 0), 16)
    assert len(kept._noted) <= 5


def test_threads_with_one_weight_that_changes(ours: str, launched: list[str]) -> None:
    layer, x = make(ours)
    wrong: list[int] = []
    ready = threading.Barrier(5)

    def work(number: int) -> None:
        backend: Any = "cuda" if ours == "cuda" else "emulator"
        with tconv3d.use_backend(backend), torch.no_grad():
            for change in range(3):
                if ready.wait() == 0:
                    layer.weight.neg_()
                ready.wait()
                for _ in range(4):
                    if not is_right(layer(x), layer.weight, layer.bias, x):
                        wrong.append(change)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert launched.count("halo") == 60 and launched.count("pack") < 60
    (found,) = kept._kept.values()
    assert len(found.packs) == 1


# ---- on a GPU


@CUDA
def test_a_stream_uses_what_it_packed_itself(ours: str, launched: list[str]) -> None:
    layer, x = make(ours)
    for _ in range(3):
        infer(layer, x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert [names_of(launched, lambda: infer(layer, x)) for _ in range(3)] == [PACKED, PACKED, KEPT]
        # What was forgotten while kernels that read it were on their way is memory of this stream.
        with torch.no_grad():
            for _ in range(20):
                y = layer(x)
                layer.weight.neg_()
                assert is_right(y, -layer.weight, layer.bias, x)
    torch.cuda.current_stream().wait_stream(side)
    infer(layer, x)


@CUDA
def test_capture_then_replay_then_a_call(ours: str, launched: list[str]) -> None:
    """A graph that changes the weight leaves its version as it was."""
    layer, x = make(ours)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            infer(layer, x)
    torch.cuda.current_stream().wait_stream(side)
    assert kept._kept
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = layer(x)
        layer.weight.neg_()
    assert not kept._kept
    for _ in range(4):
        before, version = layer.weight.detach().clone(), layer.weight._version
        graph.replay()
        assert layer.weight._version == version
        assert is_right(captured, before, layer.bias, x)
        infer(layer, x)
    assert launched.count("pack") == launched.count("halo") - 1
