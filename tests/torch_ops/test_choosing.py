"""Which offer a call takes: by prediction, by invented times in the emulator, by what is stored on disk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tconv3d
from tconv3d import emulator
from tconv3d.api.explain import launches
from tconv3d.planning import calibration, planner, winners
from tconv3d.planning.calibration import Work
from tconv3d.planning.gpus import GPUS, Gpu
from tconv3d.planning.offers import Offer
from tconv3d.planning.problem import Device, Pass, Plan
from tconv3d.runtime import cache
from tconv3d.torch_ops import choosing, executor, pytorch_ops

pytestmark = pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")

SHAPE = (2, 4, 3, 4, 5)


class Invented:
    """A clock that runs what it is given, and says for each candidate in turn what it was told to.

    After the first times of all candidates it repeats the times of those that are run again.
    """

    def __init__(self, *milliseconds: float) -> None:
        self.first, self.known, self.count = iter(milliseconds), dict[int, float](), 0
        self.alive: list[Callable[[], Any]] = []  # no function may get the id of one that is gone

    def __call__(self, run: Callable[[], Any]) -> float:
        run()
        self.count += 1
        if id(run) not in self.known:
            self.alive.append(run)
            self.known[id(run)] = next(self.first)
        return self.known[id(run)]


def never(run: Callable[[], Any]) -> float:
    pytest.fail("something was timed")


@pytest.fixture(autouse=True)
def unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No winner is stored, and compiled kernels are the user's own."""
    real = cache.find, cache.get, cache.put
    stored: dict[str, bytes] = {}

    def find(key: str, suffix: str) -> bytes | None:
        return stored.get(key) if suffix == winners.SUFFIX else real[0](key, suffix)

    def get(key: str, suffix: str, build: Callable[[], bytes]) -> bytes:
        if suffix != winners.SUFFIX:
            return real[1](key, suffix, build)
        return stored.setdefault(key, build()) if key not in stored else stored[key]

    def put(key: str, suffix: str, payload: bytes) -> None:
        if suffix != winners.SUFFIX:
            return real[2](key, suffix, payload)
        stored[key] = payload
        return None

    for name, function in (("find", find), ("get", get), ("put", put)):
        monkeypatch.setattr(cache, name, function)
    monkeypatch.setattr(sys.modules[__name__], "STORED", stored, raising=False)
    executor.forget()
    with tconv3d.use_backend("emulator"):
        yield tmp_path
    executor.forget()


STORED: dict[str, bytes] = {}


def layer() -> tconv3d.ConvTranspose3d:
    """A layer that only the direct kernels compute, because of its type."""
    torch.manual_seed(0)
    return tconv3d.ConvTranspose3d(4, 6, 3, dtype=torch.float64)


def example() -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def tasks() -> dict[Any, bool]:
    """Whether PyTorch's operator computes each of the calls that were made."""
    return {key[0]: task.theirs for key, task in executor._tasks.items()}


def check(module: tconv3d.ConvTranspose3d, x: Tensor) -> None:
    """A training step is right, and leaves its operands as they were."""
    before = [tensor.detach().clone() for tensor in (x, module.weight, module.bias)]
    leaf = x.detach().requires_grad_()
    y = module(leaf)
    grad = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2))
    leaves = [leaf, module.weight, module.bias]
    found = [y, *torch.autograd.grad(y, leaves, grad)]
    wanted = F.conv_transpose3d(leaf, module.weight, module.bias)
    for ours, exact in zip(found, [wanted, *torch.autograd.grad(wanted, leaves, grad)], strict=True):
        torch.testing.assert_close(ours, exact)
    for now, was in zip((x, module.weight, module.bias), before, strict=True):
        assert torch.equal(now, was)


@pytest.mark.parametrize("theirs", [True, False])
def test_the_fastest_computes_this_and_later_calls(theirs: bool) -> None:
    module, x = layer(), example()
    clock = Invented(*((2.0, 1.0) if theirs else (1.0, 2.0)) * 2, 9.0)
    with choosing.measured_by(clock):
        check(module, x)
        assert tasks() == {Pass.FORWARD: theirs, (True, True, True): theirs}
        timed = clock.count
        check(module, x)
        assert clock.count == timed, "a known call is not timed again"


def test_a_repeated_call_chooses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = layer(), example()
    with choosing.measured_by(Invented(2.0, 1.0)), torch.no_grad():
        module(x)
        monkeypatch.setattr(choosing, "plan", lambda *arguments: pytest.fail("planned again"))
        module(x)


def test_the_winner_is_kept_for_other_processes_and_volumes_of_its_size() -> None:
    """Volumes of the same size within a factor of 4 share a winner: here 32 to 127 positions."""
    module, x = layer(), example()
    with torch.no_grad():
        with choosing.measured_by(Invented(2.0, 1.0)):
            module(x)
        executor.forget()  # as another process
        with choosing.measured_by(never):
            module(x)
            module(torch.randn(1, 4, 3, 4, 5, dtype=torch.float64))
        assert all(tasks().values()) and len(executor._tasks) == 2 and len(STORED) == 1
        with choosing.measured_by(Invented(1.0, 2.0)):
            module(torch.randn(2, 4, 8, 8, 8, dtype=torch.float64))  # a volume of another size
        assert len(STORED) == 2 and list(executor._tasks.values())[-1].theirs is False


def test_the_first_that_stores_a_winner_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process stores its winner while this one measures."""
    module, x = layer(), example()
    with choosing.measured_by(Invented(2.0, 1.0)), torch.no_grad():
        module(x)
    ((key, theirs),) = STORED.items()
    STORED.clear()
    executor.forget()

    class Slow(Invented):
        def __call__(self, run: Callable[[], Any]) -> float:
            STORED[key] = theirs
            return super().__call__(run)

    with choosing.measured_by(Slow(1.0, 2.0)), torch.no_grad():
        module(x)
    assert tasks() == {Pass.FORWARD: True} and {key: theirs} == STORED


def test_an_entry_that_is_no_winner_is_replaced() -> None:
    module, x = layer(), example()
    for text in (b"[]", b"not JSON", b'{"cover": [], "timings": [], "where": ""}'):
        with choosing.measured_by(Invented(2.0, 1.0)), torch.no_grad():
            module(x)
        (key,) = STORED
        STORED[key] = text
        executor.forget()
        with choosing.measured_by(Invented(1.0, 2.0)), torch.no_grad():
            module(x)
        assert tasks() == {Pass.FORWARD: False}
        found = winners.find(key)
        assert found is not None and found.cover == (("direct", (Pass.FORWARD,)),)
        STORED.clear()
        executor.forget()


# ---- when nothing is timed


def test_without_a_clock_the_emulator_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "race", lambda *arguments: pytest.fail("something was timed"))
    check(layer(), example())
    assert set(tasks().values()) == {False}


def test_never_means_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = layer(), example()
    with torch.no_grad(), choosing.measured_by(Invented(2.0, 1.0)):
        module(x)
    assert tasks() == {Pass.FORWARD: True}
    with torch.no_grad(), choosing.measured_by(never):
        try:
            tconv3d.measure_offers("never")
            module(x)
            assert tasks() == {Pass.FORWARD: False}, "the stored winner is not used"
            tconv3d.measure_offers("always")
            module(x)
            assert tasks() == {Pass.FORWARD: True}
        finally:
            choosing._when = None
        monkeypatch.setenv(choosing.MEASURE, "never")
        executor.forget()
        module(x)
        assert tasks() == {Pass.FORWARD: False}
    with pytest.raises(ValueError, match="expected 'auto', 'always' or 'never', but got 'sometimes'"):
        tconv3d.measure_offers("sometimes")  # type: ignore[arg-type]
    monkeypatch.setenv(choosing.MEASURE, "sometimes")
    with pytest.raises(ValueError, match="TCONV3D_MEASURE: expected auto, always or never, got 'sometimes'"):
        choosing.when_measured()


def asked_of(module: tconv3d.ConvTranspose3d, gpu: str, theirs: bool = True) -> Callable[[bool, bool], int]:
    """Returns a function that says how many covers of a layer's forward pass are timed, from `benchmark` and `cuda`.

    `theirs`: PyTorch's operator is among the offers.
    """
    problem, *_ = tconv3d.api.explain.problems_of(*tconv3d.api.explain.call_of(module, SHAPE8))
    wanted, device = {problem.which: problem}, GPUS[gpu].device
    offers = choosing._offers(planner.answers(wanted, device, theirs))
    return lambda benchmark, cuda: choosing.most_timed(wanted, offers, device, benchmark, cuda)


def test_kernels_of_calibrated_gpus_are_timed_only_if_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being asked, the best kernel alone is timed, and only where PyTorch's operator may compute the call."""
    assert calibration.calibrated(GPUS["H200"].device) and not calibration.calibrated(GPUS["A100"].device)
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    module = tconv3d.ConvTranspose3d(8, 4, 2, 2)
    h200, a100 = asked_of(module, "H200"), asked_of(module, "A100")
    assert [h200(benchmark, True) for benchmark in (False, True)] == [1, choosing.BEST]
    assert asked_of(module, "H200", theirs=False)(False, True) == 0
    assert a100(False, True) == choosing.BEST
    assert not a100(True, False), "there is no GPU, and no clock"
    monkeypatch.setenv(choosing.MEASURE, "always")
    assert h200(False, True) == choosing.BEST
    monkeypatch.setenv(choosing.MEASURE, "never")
    assert not a100(True, True)


def test_offers_are_timed_where_the_best_prediction_is_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a calibrated GPU a kernel with derived rates is timed where it could be the fastest, and only there."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    module = tconv3d.ConvTranspose3d(8, 4, 2, 2)
    problem, *_ = tconv3d.api.explain.problems_of(*tconv3d.api.explain.call_of(module, SHAPE8))
    wanted, device = {problem.which: problem}, GPUS["H200"].device
    offers = choosing._offers(planner.answers(wanted, device))
    (best,) = planner.best(offers, wanted, device, 1)[0]
    rivals = [each for each in offers if each is not best]

    def rival(factor: float, surcharge: float) -> Offer:
        work = partial(Work, launches=1, cycles=0.0)
        offer = replace(best, kernel="rival", work=work, least=None, surcharge=surcharge)
        vars(offer)["microseconds"] = factor * best.microseconds
        return offer

    for factor, surcharge, timed in ((0.9, 1.5, True), (0.9, inf, True), (1.1, 1.5, False), (0.9, 1.0, False)):
        unsure = rival(factor, surcharge)
        found = [*rivals, best, unsure]
        assert choosing.measures(wanted, found, device, False, cuda=True) == timed, (factor, surcharge)
        assert not timed or (unsure,) in choosing._contenders(wanted, device, found, 2)
        assert (surcharge > 1) == (planner.best(found, wanted, device, 1)[0] == (best,))
    monkeypatch.setenv(choosing.MEASURE, "never")
    assert not choosing.measures(wanted, [*offers, rival(0.9, 1.5)], device, False, cuda=True)


def test_offers_are_timed_where_others_are_predicted_to_be_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's operator is close below 1.6 times the best prediction, a kernel within the best kernel's doubt.

    PyTorch's operator is timed beside the best kernel alone up to the factor by which its own predictions are off,
    unless that kernel is near the floor.
    """
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    module = tconv3d.ConvTranspose3d(64, 32, 2, 2)
    problem, *_ = tconv3d.api.explain.problems_of(*tconv3d.api.explain.call_of(module, (2, 64, 32, 32, 32)))
    wanted, device = {problem.which: problem}, GPUS["H200"].device
    (best,) = planner.best(choosing._offers(planner.answers(wanted, device)), wanted, device, 1)[0]

    def rival(kernel: str, factor: float) -> Offer:
        offer = replace(best, kernel=kernel, least=None)
        vars(offer)["microseconds"] = factor * best.microseconds
        return offer

    def timed(*others: Offer) -> int:
        return choosing.most_timed(wanted, [best, *others], device, False, cuda=True)

    def doubts(kernel: str, kind: str, device: Device) -> float:
        return {best.kernel: ours, choosing.PYTORCH: theirs}.get(kernel, 1.0)

    ours, theirs = 1.0, 3.0
    monkeypatch.setattr(calibration, "doubt", doubts)
    monkeypatch.setattr(Gpu, "floor_ms", lambda self, problem: best.microseconds / 1e3 / 1.2)

    assert not timed() and not timed(rival("rival", 1.1))
    assert [timed(rival(choosing.PYTORCH, factor)) for factor in (1.5, 1.7, 2.9, 3.1)] == [choosing.BEST, 1, 1, 0]
    monkeypatch.setattr(Gpu, "floor_ms", lambda self, problem: best.microseconds / 1e3 / 1.1)
    assert [timed(rival(choosing.PYTORCH, factor)) for factor in (1.5, 1.7)] == [choosing.BEST, 0]
    ours = 2.5
    assert timed(rival("rival", 2.4)) and not timed(rival("rival", 2.6)) and not timed()


def test_under_capture_the_prediction_decides_and_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = layer(), example()
    with torch.no_grad():
        with monkeypatch.context() as patch, choosing.measured_by(never):
            patch.setattr(choosing, "_capturing", lambda like: True)
            module(x)
        assert not executor._tasks and not STORED
        with choosing.measured_by(Invented(2.0, 1.0)):
            module(x)
        assert tasks() == {Pass.FORWARD: True}
        executor.forget()
        with monkeypatch.context() as patch, choosing.measured_by(never):
            patch.setattr(choosing, "_capturing", lambda like: True)
            module(x)
        assert tasks() == {Pass.FORWARD: True}, "a stored winner counts under capture too"


def test_without_room_the_prediction_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "_room", lambda call: False)
    with choosing.measured_by(never):
        check(layer(), example())
    assert set(tasks().values()) == {False} and not STORED


@pytest.mark.parametrize("free, room", [(1 << 40, True), (1 << 20, False)])
def test_room_is_for_results_workspace_and_flushing(free: int, room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "_free_bytes", lambda device: free)
    like = type("OnGpu", (), {"is_cuda": True, "device": torch.device("cuda", 0)})()
    problem = tconv3d.api.explain.problems_of(*tconv3d.api.explain.call_of(layer(), SHAPE))[0]
    call = choosing.Call(
        {problem.which: problem}, GPUS["H200"].device, like, lambda plan: lambda: None, partial(int), list
    )
    assert choosing._room(call) is room


def failing(error: Exception, number: int) -> Callable[..., executor.Task]:
    """Makes tasks, but raises for the one of this number."""
    made, original = iter(range(100)), executor.make_task

    def make(plan: Plan, *rest: Any) -> executor.Task:
        if next(made) == number:
            raise error
        return original(plan, *rest)

    return make


def test_too_little_memory_while_measuring_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only PyTorch's operator can be timed, which is no race: the prediction decides, and nothing is stored."""
    module, x = layer(), example()
    monkeypatch.setattr(executor, "make_task", failing(torch.OutOfMemoryError("out of memory"), 0))
    with choosing.measured_by(Invented(1.0)), torch.no_grad():
        y = module(x)
    assert tasks() == {Pass.FORWARD: False} and not STORED
    torch.testing.assert_close(y, F.conv_transpose3d(x, module.weight, module.bias))


def test_a_winner_of_a_race_that_some_had_no_memory_for_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    module, x = tconv3d.ConvTranspose3d(8, 4, 2, stride=2), torch.randn(2, 8, 3, 3, 4)
    monkeypatch.setattr(executor, "make_task", failing(torch.OutOfMemoryError("out of memory"), 1))
    with choosing.measured_by(Invented(2.0, 1.0, 3.0)), torch.no_grad():
        module(x)
    assert tasks() == {Pass.FORWARD: True} and not STORED


# ---- PyTorch's operator


def test_no_offer_of_pytorchs_where_it_may_not_compute() -> None:
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        assert choosing.circumstances(True, "auto")[1]
        assert not choosing.circumstances(True, "cuda")[1]
        assert 'use_backend("cuda")' in str(choosing.why_no_pytorch(True, "cuda"))
        torch.use_deterministic_algorithms(True)
        assert not choosing.circumstances(True, "auto")[1]
        assert "deterministic" in str(choosing.why_no_pytorch(True, "auto"))
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = True
        assert not choosing.circumstances(True, "auto")[1]
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.deterministic = False
    assert choosing.why_no_pytorch(True, "auto") is None


def test_cudnn_benchmark_is_part_of_a_calls_key() -> None:
    before = torch.backends.cudnn.benchmark
    try:
        found = set()
        for torch.backends.cudnn.benchmark in (False, True):
            found.add(choosing.circumstances(True, "auto"))
        assert found == {(False, True), (True, True)}
    finally:
        torch.backends.cudnn.benchmark = before


def test_a_backward_pass_keeps_the_backend_of_its_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(choosing, "circumstances", lambda cuda, backend=None: seen.append(backend) or (False, False))
    y = layer()(example().requires_grad_())
    y.sum().backward()
    assert seen == [None, "emulator"]


@pytest.mark.parametrize(
    "wanted", [(True, True, True), (True, True, False), (True, False, False), (False, True, True)]
)
@pytest.mark.parametrize("last", [False, True])
def test_gradients_by_pytorch(wanted: tuple[bool, bool, bool], last: bool) -> None:
    """The results have the strides that our kernels give them."""
    x, w = example(), layer().weight.detach()
    if last:
        x = x.contiguous(memory_format=torch.channels_last_3d)
    convolution = ((2, 2, 2), (1, 1, 1), (0, 0, 0), 1, (1, 1, 1))
    y = pytorch_ops.forward(x, w, None, convolution)
    dy = torch.randn_like(y)
    call = dy, x if wanted[1] else None, w if wanted[0] else None, wanted, (3, 4, 5), (3, 3, 3), convolution
    theirs, ours = pytorch_ops.backward(*call), executor.backward(*call)
    for each, expected, asked in zip(theirs, ours, wanted, strict=True):
        assert (each is not None) == (expected is not None) == asked
        if each is not None and expected is not None:
            assert each.stride() == expected.stride()
            torch.testing.assert_close(each, expected, rtol=1e-3, atol=1e-3)


# ---- fused layers


@pytest.mark.parametrize("theirs", [True, False])
def test_a_fused_relu_is_pytorchs_chain_or_ours(theirs: bool) -> None:
    x, w = example(), layer().weight.detach()
    with choosing.measured_by(Invented(*((2.0, 1.0) if theirs else (1.0, 2.0)))):
        y = tconv3d.conv_transpose3d_relu(x, w)
    assert tasks() == {Pass.FORWARD: theirs}
    torch.testing.assert_close(y, F.conv_transpose3d(x, w).relu())


@pytest.mark.parametrize("theirs", [True, False])
def test_a_fused_block_is_pytorchs_chain_or_ours(theirs: bool) -> None:
    x, w = example(), layer().weight.detach()
    with choosing.measured_by(Invented(*((2.0, 1.0) if theirs else (1.0, 2.0)))), torch.no_grad():
        y = tconv3d.conv_transpose3d_relu_group_norm(x, w, None, 2)
        torch.testing.assert_close(y, F.group_norm(F.conv_transpose3d(x, w).relu(), 2))
    assert tasks()[Pass.FORWARD] is theirs


# ---- what is said about it


def test_explain_says_who_won_and_by_what() -> None:
    module, x = layer(), example()
    with choosing.measured_by(Invented(0.2, 0.1, 0.1, 0.3, 0.9)):
        before = tconv3d.explain(module, x)
        assert "not measured yet: offers are timed at the first call" in str(before)
        check(module, x)
        found = tconv3d.explain(module, x)
        text = "measured on emulator for batch 2 of 3x4x5: pytorch 100 us, direct 200 us"
        assert found.passes[0].measured == text and text in str(found)
        assert found.passes[0].measured_us == {"pytorch": 100.0, "direct": 200.0}
        assert found.kernel == "pytorch" and "PyTorch launches its own kernels" in str(found)
        assert found.here == "PyTorch's operator, the fastest offer, for forward; these kernels for all others"
        assert "not direct: predicted to take" in str(found)
        assert found.passes[1].measured_us["direct + direct_weight_bias"] == pytest.approx(100)
        assert found.choices[0] == f"forward: pytorch, {text}"
    plain = tconv3d.explain(module, x)
    assert plain.kernel == "direct"
    assert plain.passes[0].passed_over["pytorch"] == 'use_backend("emulator") asks for this library\'s kernels'


def test_accelerates_report_says_who_won() -> None:
    model, x = torch.nn.Sequential(torch.nn.ConvTranspose3d(4, 6, 3, dtype=torch.float64)), example()
    reported: list[tconv3d.SwapReport] = []
    with choosing.measured_by(Invented(0.2, 0.1)), torch.no_grad():
        layer()(x)
        tconv3d.accelerate(model, example_input=x, report=reported.append)
    (swap,) = reported[0].layers
    assert swap.choices[0].startswith("forward: pytorch, measured on emulator")
    assert swap.choices[1].startswith("backward: direct + direct_weight_bias, predicted to take")
    assert "           forward: pytorch, measured" in str(reported[0])


# ---- tune


def test_tune_is_the_same_with_more_offers() -> None:
    module, x = layer(), example()
    clock = Invented(0.2, 0.1, 0.1, 0.3, 0.9)
    with choosing.measured_by(clock):
        found = tconv3d.tune(module, x, report=None, clock=clock)
        assert [each.name for each in found[-2:]] == ["forward, all offers", "backward, all offers"]
        forward, backward = found[-2:]
        assert (forward.kernel, forward.before_ms, forward.ms, forward.changed) == ("pytorch", 0.2, 0.1, True)
        assert str(forward) == "forward, all offers: pytorch, 0.1 ms instead of 0.2 ms (2 offers tried)"
        assert not backward.changed and "stays as it is" in str(backward)
    with choosing.measured_by(never):
        check(module, x)
    assert tasks() == {Pass.FORWARD: True, (True, True, True): False}


def test_the_best_few_by_prediction_are_timed() -> None:
    """A layer that several kernels compute: the best by prediction comes first, PyTorch's operator second."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    asked = tconv3d.api.explain.problems_of(*tconv3d.api.explain.call_of(tconv3d.ConvTranspose3d(8, 4, 2, 2), SHAPE8))
    device = GPUS["H200"].device
    for problems in (asked[:1], asked[1:]):
        wanted = {each.which: each for each in problems}
        offers = choosing._offers(planner.answers(wanted, device, True))
        covers = choosing._contenders(wanted, device, offers, choosing.BEST)
        names: Sequence[str] = [winners.name_of(cover) for cover in covers]
        assert names[1] == "pytorch" and "pytorch" not in names[2:] and len(names) <= 1 + choosing.BEST
        prices = [sum(offer.price for offer in cover) for cover in (covers[0], *covers[2:])]
        assert prices == sorted(prices) and covers[0] == planner.taken(wanted, device)


def test_offers_without_a_build_are_not_timed() -> None:
    """Blocks that load ahead find no build for 8 outputs; their offer is the third of three for this layer."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    module, device = tconv3d.ConvTranspose3d(128, 8, 1), GPUS["RTX 4090"].device
    (forward,) = tconv3d.api.explain.problems_of(*tconv3d.api.explain.call_of(module, (4, 128, 64, 64, 64)))[:1]
    wanted = {forward.which: forward}
    offers = choosing._offers(planner.answers(wanted, device))
    assert inf in [each.microseconds for each in offers] and len(offers) == choosing.BEST
    plans = choosing.contending_plans(wanted, device)
    assert len(plans) == choosing.BEST - 1
    found = tconv3d.explain(module, (4, 128, 64, 64, 64), gpu="RTX 4090").passes[0]
    assert found.passed_over["mma_ahead"] == "no build of it fits"


def test_kernels_of_offers_that_will_be_timed_can_be_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that nobody has calibrated, `compile_ahead` compiles all that the first call times."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    module, a100 = tconv3d.ConvTranspose3d(8, 4, 2, 2), GPUS["A100"].device
    alone = {launch.kernel for launch in launches(module, SHAPE8, a100, (Pass.FORWARD,))}
    monkeypatch.setattr(executor, "is_present", lambda device: True)
    assert {launch.kernel for launch in launches(module, SHAPE8, a100, (Pass.FORWARD,))} > alone
    h200 = GPUS["H200"].device
    calibrated = launches(module, SHAPE8, h200, (Pass.FORWARD,))
    monkeypatch.setattr(executor, "is_present", lambda device: False)
    assert launches(module, SHAPE8, h200, (Pass.FORWARD,)) == calibrated, "nothing is timed on an H200"


SHAPE8 = (2, 8, 3, 3, 4)
