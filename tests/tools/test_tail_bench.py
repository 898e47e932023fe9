"""`tconv3d bench --tails`: which models, what they are compared with, and what is said of them."""

from __future__ import annotations

import copy
import io
import json
import types
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import tconv3d
from benchmarks import readme_table
from tconv3d import emulator
from tconv3d.api.explain import LEFT
from tconv3d.api.fuse import FusedTail, FuseReport
from tconv3d.planning.gpus import GPUS
from tconv3d.planning.problem import Pass
from tconv3d.tools import cli
from tconv3d.tools.bench import accuracy, ahead, cases, fused, report, results, rivals, run, table, tails
from tconv3d.tools.bench.layers import LAYERS, layer
from tconv3d.tools.bench.precision import precision
from tconv3d.tools.bench.tails import TAILS

needs_emulator = pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")

SMALL = layer(2, 8, 16, (2, 3, 4), 3, 2, 1)  # output 2 x 16 x 3 x 5 x 7
FLOAT32 = "float32", "contiguous"


def quiet() -> Console:
    return Console(file=io.StringIO())


def invented_clock(run: Callable[[], Any]) -> float:
    """Runs what it is given, once, and says one millisecond."""
    run()
    return 1.0


EMULATED = run.Place("cpu", "emulator", invented_clock)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "have_gpu", lambda: False)


# ---- models and pairs


@pytest.mark.parametrize("name", TAILS)
def test_accelerate_finds_the_whole_tail(name: str) -> None:
    """The tail without its convolution is the same function, and no part of the model is left outside the chain."""
    tail = TAILS[name]
    model = tails.model_of(tail, SMALL, torch.float64)
    x, skip = torch.randn(SMALL.input_shape).double(), torch.randn(SMALL.output_shape).double()
    extra = [skip] if tail.residual else []
    assert torch.equal(tails.alone(model)(model.conv(x), *extra), model(x, *extra))
    assert isinstance(model.conv, torch.nn.ConvTranspose3d), "the model keeps its convolution"
    (swap,) = tconv3d.plan_swaps(model).layers
    assert swap.fused and not swap.why_alone
    assert model.training == tail.training
    case = cases.build_with_tail(SMALL, name, "float32", "channels_last_3d", "cpu", "accelerate")
    assert case.output_shape == case.theirs(*case.inputs).shape
    for tensor in (*case.inputs, case.convolution.weight):
        assert tensor.is_contiguous(memory_format=torch.channels_last_3d)


def test_norms_are_no_identities() -> None:
    model = tails.model_of(TAILS["batch_norm_eval"], SMALL)
    norm = model.norm
    assert isinstance(norm, torch.nn.BatchNorm3d) and norm.running_var is not None
    assert float(norm.running_var.min()) >= 0.5 and float(norm.running_var.std()) > 0
    assert float(norm.weight.detach().std()) > 0 and float(norm.bias.detach().std()) > 0


def test_random_pairs_follow_the_seed_and_cover_every_tail() -> None:
    pairs = tails.random_pairs(45, 3)
    assert pairs == tails.random_pairs(45, 3) != tails.random_pairs(45, 4)
    assert pairs[:20] == tails.random_pairs(20, 3)
    for begin in (0, 15, 30):
        assert {tail for _, _, tail in pairs[begin : begin + 15]} == set(TAILS)
    drawn = [each for _, each, _ in pairs]
    assert any(each.in_channels <= 4 for each in drawn) and any(each.output_shape[4] % 2 for each in drawn)
    assert all(min(each.output_shape[2:]) >= 2 for each in drawn), "a window of a pool fits"
    assert {tail for _, _, tail in tails.random_pairs(5, 0, ["softmax"])} == {"softmax"}


def test_layers_that_are_measured_by_default() -> None:
    assert any(each.output_shape[4] % 2 and each.stride[2] == 2 for each in tails.DEFAULT_LAYERS.values())
    assert any(each.in_channels <= 4 for each in tails.DEFAULT_LAYERS.values())
    assert tails.named(["gan_64_1_32", "few_inputs_3_32"])["gan_64_1_32"] == LAYERS["gan_64_1_32"]
    with pytest.raises(ValueError, match="no layer is called 'nothing'"):
        tails.named(["nothing"])
    flat = layer(1, 8, 4, (1, 32, 32), (1, 2, 2), (1, 2, 2))
    assert min(flat.reduced().output_shape[2:]) == 1 and min(tails.reduced(flat).output_shape[2:]) >= 2


def test_kernels_with_epilogues_are_compiled_ahead() -> None:
    alone, pointwise, moved = (
        ahead.kernels(SMALL, "bfloat16", "contiguous", tail, [Pass.FORWARD], GPUS["H200"].device)
        for tail in ("", "pointwise", "global_mean")
    )
    epilogues = [str(dict(launch.constants).get("Epilogue", "")) for launch in pointwise]
    assert set(alone) < set(pointwise) and any("Evaluated" in each for each in epilogues)
    assert moved == alone, "no convolution is left of a global mean"


# ---- what became of a tail


def test_short_words() -> None:
    nothing = FuseReport("", "", "", (), ())
    assert fused.short(nothing) == "nothing"
    assert fused.short(replace(nothing, weight="mean", pytorch=("view",))) == "weight"
    assert fused.short(replace(nothing, statistics="of 4", passes=("a",))) == "kernel + 1 pass"
    assert (
        fused.short(replace(nothing, kernel="x", passes=("a", "b"), pytorch=("cat",)))
        == "kernel + 2 passes + PyTorch"
    )
    assert fused.short(replace(nothing, why_not="hooks")) == "not fused: hooks"
    texts = "forward in one pass over z: a", "backward in one pass over z: b", "backward in one pass over z: c"
    assert fused.short_gradients(replace(nothing, gradients=texts)) == "1 pass forward + 2 passes backward"
    assert fused.short_gradients(replace(nothing, gradients=("the tail runs in PyTorch: no",))) == "PyTorch"


def test_a_convolution_that_is_left_to_pytorch_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    left = types.SimpleNamespace(passes=[types.SimpleNamespace(kernel=LEFT)])
    monkeypatch.setattr(fused, "explanation", lambda case: left)
    case = cases.build_with_tail(SMALL, "softmax", *FLOAT32, "cpu", "fuse")
    assert fused.words(case, "forward") == "not fused: PyTorch's operator computes the convolution"


@needs_emulator
def test_a_model_that_is_not_fused_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words are those of the module that ran, not of what fusing could have done."""
    accelerate = tconv3d.accelerate
    monkeypatch.setattr(tconv3d, "accelerate", lambda model: accelerate(model, fuse=False))
    (row,) = run.measure_layer("small", SMALL, FLOAT32, run.Options(torch=False), EMULATED, {}, "softmax")
    assert row.right and row.fused == "not fused: the forward ran as it is written"


# ---- a whole run, where the clock is invented and everything else is real


@pytest.fixture(scope="module")
def found() -> results.Results:
    if not emulator.available():
        pytest.skip("the emulator needs a C++ compiler")
    work = [run.Work("small", SMALL, FLOAT32, tail) for tail in ("residual", "batch_norm_train", "relu_group_norm")]
    work.append(run.Work("impossible", layer(1, 2, 2, 1, 1, padding=3), FLOAT32, "softmax"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda model: model)
        return run.measure(work, run.Options(backward=True, seed=0), quiet(), EMULATED)


@pytest.mark.thorough
def test_every_pair_has_a_row_for_forward_and_step(found: results.Results) -> None:
    words = {
        ("residual", "forward"): "kernel",
        ("residual", "step"): "1 pass forward + 1 pass backward",
        ("batch_norm_train", "forward"): "kernel + 1 pass",
        ("batch_norm_train", "step"): "1 pass forward + 2 passes backward",
        ("relu_group_norm", "forward"): "block",
        ("relu_group_norm", "step"): "block",
    }
    assert {(row.tail, row.which): row.fused for row in found.rows if row.layer == "small"} == words
    for row in found.rows[:6]:
        assert row.failed == "" and row.right and row.ours_ms == row.plain_ms == row.over_plain == 1.0
        assert set(row.torch_ms) == {
            "default", "benchmark", "channels_last_converted", "channels_last", "compile", "compile_channels_last"
        }  # fmt: skip
        assert row.torch_error is not None and row.torch_error < 1e-5
    assert all(row.failed and row.right is None for row in found.rows[6:]) and not found.ok


def test_the_floor_reads_inputs_once_and_writes_the_last_result_once(found: results.Results) -> None:
    forward, step = found.rows[:2]
    x, y, parameters = prod(SMALL.input_shape), prod(SMALL.output_shape), prod(SMALL.weight_shape) + 16
    assert forward.bytes == 4 * (x + y + y + parameters), "the input, the residual, the result"
    assert step.bytes == forward.bytes + 4 * (x + y + x + y + 2 * parameters)
    alone = tconv3d.explain(cases.build(SMALL, *FLOAT32, "cpu").convolution, SMALL.input_shape).passes
    assert (forward.flops, step.flops) == (alone[0].flops, sum(each.flops for each in alone))
    copy, rate = found.ceilings["copy_TBps"], found.ceilings["float32_TFLOPS"]
    assert forward.floor_ms == pytest.approx(max(forward.bytes / copy, forward.flops / rate) / 1e9)
    mean = cases.build_with_tail(SMALL, "global_mean", *FLOAT32, "cpu", "accelerate")
    assert run.moved_bytes(mean, "forward") == 4 * (x + 2 * 16 + parameters)


def test_the_run_becomes_a_table_a_file_and_a_page(found: results.Results, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    found.write(file)
    stored = json.loads(file.read_text())
    assert list(stored["layers"]) == ["small", "impossible"]
    assert not any("shape" in row for row in stored["rows"]), "a layer is described once"
    again = results.read(file)
    assert again.as_dict() == json.loads(json.dumps(found.as_dict()))
    assert again.settings["way"] == "accelerate" and again.machine["torch"] == torch.__version__
    assert "small + residual" in report.page(again)
    text = " ".join(shown(again, 80).split())
    assert "small + batch_norm_train float32 step: 1 pass forward + 2 passes backward" in text
    assert "float32 contiguous step, geometric mean of 3" in text and "over PyTorch's best 1.00x" in text
    assert "1.00x the plain convolution" in text
    assert "failed: impossible + softmax float32 contiguous forward" in text


def shown(found: results.Results, width: int) -> str:
    file = io.StringIO()
    table.show(found, Console(file=file, width=width))
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_names_and_numbers_are_whole(width: int) -> None:
    figures: dict[str, Any] = {"floor_ms": 1234.5, "ours_ms": 2345.6, "plain_ms": 2222.2, "error": 1.2e-3}
    figures |= {"torch_error": 3.4e-3, "torch_ms": {"default": 34567.8, "compile": 23456.7}, "right": True}
    rows = [
        results.Row(name, "", {}, "", "bfloat16", "channels_last_3d", which, "halo", tail=tail, **figures)
        for name in (max(LAYERS, key=len), "random_91_39")
        for tail in TAILS
        for which in results.STEPS
    ]
    for row in rows:
        row.fused = "3 passes forward + 10 passes backward + PyTorch"
    machine, settings = {"gpu": "NVIDIA H100 80GB HBM3"}, {"way": "accelerate"}
    lines = shown(results.Results("bench", machine, settings, rows=rows), width).splitlines()
    assert max(map(len, lines)) <= width and not any("…" in line for line in lines)
    for figure in ("2222.2", "2345.6", "1.06x", "1234.5", "23456.7", "10.0x", "1.2e-03", "3.4e-03"):
        assert sum(figure in line for line in lines) >= len(rows), f"{figure} is cut short"
    assert all(any(row.title in line for line in lines) for row in rows)


# ---- correctness


@needs_emulator
@pytest.mark.parametrize(("damage", "right"), [("shifted", False), ("unwritten", False), ("none", True)])
def test_wrong_results_are_found(damage: str, right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = FusedTail.forward

    def damaged(block: FusedTail, input: Tensor, *extra: Any) -> Any:
        y = forward(block, input, *extra)
        if damage == "unwritten":
            part = torch.empty_like(y)
            part[:, :, :-1] = y[:, :, :-1]
            return part
        return y.roll(1, 4) if damage == "shifted" else y

    monkeypatch.setattr(FusedTail, "forward", damaged)
    place = run.Place("cpu", "emulator", None)
    rows = run.measure_layer("small", SMALL, FLOAT32, run.Options(backward=True), place, {}, "residual")
    assert [row.right for row in rows] == [right, right] and not any(row.failed for row in rows)


def test_gradients_that_are_zero_are_not_compared() -> None:
    """An InstanceNorm removes the convolution's bias, so that its gradient is rounding alone."""
    with tconv3d.use_backend("torch"), precision("float32"):
        case = cases.build_with_tail(SMALL, "instance_norm", *FLOAT32, "cpu", "accelerate")
        errors = accuracy.check(case, backward=True)
    assert list(errors.ours) == ["output", "input", "conv.weight", "norm.weight", "norm.bias"]


def test_an_operator_that_pytorch_lacks_costs_only_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has no average pool of bfloat16 on the CPU, for example."""
    pool = torch.nn.functional.avg_pool3d

    def lacking(x: Tensor, size: int) -> Tensor:
        if x.dtype is not torch.float64:
            raise NotImplementedError("not implemented for this type")
        return pool(x, size)

    monkeypatch.setattr(torch.nn.functional, "avg_pool3d", lacking)
    case = cases.build_with_tail(SMALL, "avg_pool", *FLOAT32, "cpu", "fuse")
    exact: Any = copy.deepcopy(case.theirs).double()
    ours: Any = lambda x: exact(x.double())  # noqa: E731
    assert accuracy.check(replace(case, ours=ours), backward=False).of("forward") == (0.0, None)


def test_samples_that_depend_on_each_other_are_compared_together() -> None:
    with tconv3d.use_backend("torch"), precision("float32"):
        case = cases.build_with_tail(replace(SMALL, batch=3), "batch_norm_train", *FLOAT32, "cpu", "accelerate")
        for backward in (False, True):
            assert max(accuracy.check(case, backward).theirs.values()) < 1e-5


# ---- ways and times


@pytest.mark.parametrize("way", ["fuse", "compile"])
def test_other_ways_have_the_same_parameters(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model: torch.nn.ModuleDict({"_orig_mod": model}))
    case = cases.build_with_tail(SMALL, "pointwise", *FLOAT32, "cpu", way)
    if way == "fuse":
        with tconv3d.use_backend("torch"), precision("float32"):
            assert max(accuracy.check(case, backward=True).ours.values()) < 1e-5
    else:
        assert fused.words(case, "forward") == "torch.compile"
    assert isinstance(case.convolution, torch.nn.ConvTranspose3d)


def test_times_in_turns_are_medians() -> None:
    """The clock rate falls from call to call; the convolution alone is timed first, third and fifth."""
    calls: list[float] = []

    def clock(run: Callable[[], Any]) -> float:
        calls.append(10.0 + len(calls))
        return calls[-1]

    case = cases.build_with_tail(SMALL, "residual", *FLOAT32, "cpu", "accelerate")
    assert rivals.time_in_turns([cases.plain(case), case], False, clock) == [{"forward": 12.0}, {"forward": 13.0}]


def test_a_step_is_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases.build_with_tail(SMALL, "residual", *FLOAT32, "cpu", "accelerate")
    seen: list[tuple[bool, int]] = []

    def clock(run: Callable[[], Any]) -> float:
        found = run()
        seen.append((torch.is_grad_enabled(), len(found) if isinstance(found, tuple) else 0))
        return 1.0

    assert rivals.time_step(case.theirs, case.theirs, case.inputs, True, clock) == {"forward": 1.0, "step": 1.0}
    assert seen == [(False, 0), (True, 4)], "gradients of input, residual, weight and bias"


# ---- the command


@needs_emulator
def test_without_a_gpu_results_are_checked(
    no_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "found.json"
    words = ["--layer", "8, 16, 3, stride=2, padding=1, size=(2, 3, 40), batch=2", "--tail", "residual"]
    assert cli.main(["bench", "--tails", *words, "--dtype", "float32", "--json", str(file)]) == 0
    found = results.read(file)
    assert found.kind == "verify" and [(row.tail, row.which) for row in found.rows] == [("residual", "forward")]
    assert found.rows[0].ours_ms is None and found.rows[0].plain_ms is None and not found.rows[0].torch_ms
    printed = capsys.readouterr().out
    assert "in the emulator (reduced volumes)" in printed and "layer + residual" in printed


def test_which_pairs_a_command_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[run.Work] = []

    def bench_tails(work: list[run.Work], *rest: Any) -> results.Results:
        asked[:] = work
        return results.Results("verify", {"gpu": None}, {"device": "cpu"})

    monkeypatch.setattr(run, "bench_tails", bench_tails)
    assert cli.main(["bench", "--tails"]) == 0
    assert [(each.name, each.tail) for each in asked] == [(n, t) for n in tails.DEFAULT_LAYERS for t in TAILS]
    words = ["gan_128_64_16", "--tail", "softmax", "avg_pool", "--dtype", "tf32", "bfloat16"]
    assert cli.main(["bench", "--tails", *words]) == 0
    assert [(each.tail, each.kind[0]) for each in asked] == [
        (tail, dtype) for tail in ("softmax", "avg_pool") for dtype in ("tf32", "bfloat16")
    ]
    assert cli.main(["bench", "--tails", "--random", "16", "--seed", "7", "--layout", "channels_last_3d"]) == 0
    assert [(each.name, each.layer, each.tail) for each in asked] == tails.random_pairs(16, 7)
    assert {each.kind for each in asked} == {("tf32", "channels_last_3d")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tails --wide --random 3", "--wide measures layers without tails"),
        ("--tails --host", "--host measures layers without tails"),
        ("--tails nothing", "no layer is called 'nothing'"),
        ("--tail softmax", "expected --tails"),
        ("--way fuse", "expected --tails"),
    ],
)
def test_commands_that_are_none(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *words.split()]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.skipif(not run.have_gpu(), reason="measuring needs a GPU")
def test_tails_on_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = ["--layer", "32, 16, 3, stride=2, padding=1, size=16, batch=2", "--tail", "residual", "batch_norm_train"]
    assert cli.main(["bench", "--tails", *words, "--backward", "--budget", "0.02", "--json", str(file)]) == 0
    for row in results.read(file).rows:
        assert row.right and row.ours_ms and row.plain_ms and row.floor_ms and row.ours_ms > 0.5 * row.floor_ms
        assert "compile" in row.torch_ms and not row.fused.startswith("not fused")


# ---- the documents' table


def test_the_table_of_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme_table, "ROOT", tmp_path)
    assert "Nothing has been timed on a GPU yet" in readme_table.tails()
    machine = {"gpu": "Invented GPU", "commit": "0123456789", "measured": "2000-01-01T"}
    rows = []
    for name, ours, tail in (("a", 1.0, "softmax"), ("b", 4.0, "softmax"), ("a", 2.0, "avg_pool")):
        row = results.Row(
            name, "words", {}, "", "tf32", "contiguous", "forward", tail=tail, plain_ms=1.0, ours_ms=ours
        )
        row.floor_ms, row.torch_ms, row.fused = 0.5, {"default": 3.0, "compile": 2.0}, "kernel"
        rows.append(row)
    file = tmp_path / readme_table.TAILS
    file.parent.mkdir(parents=True)
    results.Results("bench", machine, {"command": "tconv3d bench --tails"}, rows=rows).write(file)
    lines = readme_table.tails().splitlines()
    assert (
        lines[2]
        == "| softmax over channels | tf32 | contiguous | forward | 2 | 2.00x | 4.00x | 1.00x | 0.50x: words |"
    )
    assert lines[3] == "| average pool 2 | tf32 | contiguous | forward | 1 | 2.00x | 4.00x | 1.00x | 1.00x: words |"
    text = "\n".join(lines)
    assert "forward, tf32, contiguous, 3 layers: geometric mean 4.00x the floor" in text
    assert "slower than it: b + softmax" in text and "Invented GPU" in text
