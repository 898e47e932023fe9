"""`tconv3d bench` and `verify`: which layers, what they are compared with, and what is said of them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from itertools import product
from math import isnan, prod
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import tconv3d
from tconv3d import emulator
from tconv3d.api import gains
from tconv3d.api.explain import launches
from tconv3d.planning import gpus, winners
from tconv3d.planning.gpus import GPUS
from tconv3d.planning.problem import Pass
from tconv3d.runtime import cache
from tconv3d.tools import cli, tasks
from tconv3d.tools.bench import accuracy, ahead, cases, layers, models, report, results, rivals, run, table, wide
from tconv3d.tools.bench.layers import LAYERS, Layer, layer
from tconv3d.tools.bench.precision import LAYOUTS, TOLERANCE, precision
from tconv3d.torch_ops import choosing, executor
from tconv3d.torch_ops import clock as clock_module

needs_emulator = pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")
needs_gpu = pytest.mark.skipif(not run.have_gpu(), reason="measuring needs a GPU")

SMALL = layer(2, 4, 6, (2, 3, 4), 3, 2, 1, 1, groups=2)
BLOCK = layer(1, 4, 6, (2, 3, 2), 2, 2, norm_groups=3)


def quiet() -> Console:
    return Console(file=open(os.devnull, "w"))


def invented_clock(run: Callable[[], Any]) -> float:
    """Runs what it is given, once, and says one millisecond: the time of nothing."""
    run()
    return 1.0


EMULATED = run.Place("cpu", "emulator", invented_clock)


# ---- layers


@pytest.mark.parametrize("name", [*LAYERS, *layers.random_layers(20, 7)])
def test_a_layer_is_the_module_it_says(name: str) -> None:
    found = LAYERS.get(name) or layers.random_layers(20, 7)[name]
    with torch.no_grad():
        y = found.module(device="meta")(found.input(device="meta"))
    assert tuple(y.shape) == found.output_shape
    reduced = found.reduced()
    assert (reduced.in_channels, reduced.out_channels, reduced.kernel) == (
        found.in_channels,
        found.out_channels,
        found.kernel,
    )
    assert min(reduced.output_shape) > 0
    assert prod(reduced.size) <= 30 and reduced.batch <= 2
    assert reduced.multiplications <= max(
        layers.REDUCED_MULTIPLICATIONS, 8 * found.multiplications / prod(found.size)
    )


@pytest.mark.parametrize("name", tasks.NAMES)
def test_the_tasks_are_the_tasks(name: str) -> None:
    task, found = tasks.load(name), LAYERS[name]
    model = task.Model(*task.get_init_inputs())
    assert found.input_shape == task.SHAPE
    theirs = [tuple(parameter.shape) for parameter in model.parameters()]
    assert [tuple(parameter.shape) for parameter in found.module().parameters()] == theirs
    with torch.device("meta"):
        assert found.output_shape == tuple(task.Model(*task.get_init_inputs())(torch.empty(task.SHAPE)).shape)


def test_wide_layers_follow_the_seed_and_cover_what_pytorch_takes() -> None:
    precisions, layouts = ["tf32", "bfloat16"], ["contiguous", "channels_last_3d"]
    drawn = wide.wide_layers(240, 1, precisions, layouts)
    assert drawn == wide.wide_layers(240, 1, precisions, layouts)
    assert dict(list(drawn.items())[:10]) == wide.wide_layers(10, 1, precisions, layouts)
    assert {kind for _, kind in drawn.values()} == set(product(precisions, layouts))
    found = [each for each, _ in drawn.values()]
    assert {k for each in found for k in each.kernel} == set(range(1, 8))
    assert {s for each in found for s in each.stride} == {1, 2, 3, 4}
    assert {d for each in found for d in each.dilation} == {1, 2, 3}
    assert any(each.groups == each.in_channels > 1 for each in found) and any(each.groups == 1 for each in found)
    assert max(each.in_channels for each in found) > 300 and min(each.in_channels for each in found) < 4
    assert any(each.in_channels % 2 and each.out_channels % 2 for each in found)
    assert max(each.batch for each in found) > 32 and {each.bias for each in found} == {True, False}
    assert any(min(each.size) < 5 for each in found) and any(max(each.size) > 100 for each in found)
    for each in found[:40]:  # PyTorch takes them all
        with torch.device("meta"):
            assert each.module()(torch.empty(each.input_shape)).shape == each.output_shape


@needs_emulator
@pytest.mark.thorough
def test_wide_layers_are_measured_each_in_its_kind(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = command("verify", "--random", "1", "--seed", "3", "--wide", "--dtype", "float32", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["layer"] for row in json.loads(file.read_text())["rows"]] == ["wide_3_0"] * 2
    alone = command("verify", "--wide")
    assert alone.returncode == 1 and "expected --random N" in alone.stderr


def test_random_layers_follow_the_seed() -> None:
    first = layers.random_layers(60, 1)
    assert first == layers.random_layers(60, 1)
    assert dict(list(first.items())[:10]) == layers.random_layers(10, 1)
    assert len(set(first.values()) & set(layers.random_layers(60, 2).values())) < 10
    assert any(each.groups > 1 for each in first.values())
    assert {max(each.stride) for each in first.values()} >= {1, 2, 3}
    assert any(max(each.dilation) > 1 for each in first.values())
    assert any(len(set(each.kernel)) > 1 for each in first.values())
    assert any(each.out_channels <= 4 for each in first.values())
    assert max(prod(each.output_shape) for each in first.values()) <= 2**28


@pytest.mark.parametrize(
    "text",
    [
        "64, 32, 2, 2, size=(48, 64, 64), batch=2",
        "64, 32, kernel_size=2, stride=2, size=(48, 64, 64), batch=2",
        "ConvTranspose3d(64, 32, kernel_size=(2, 2, 2), stride=(2, 2, 2), size=(48, 64, 64), batch=2)",
        " nn.ConvTranspose3d(64, 32, 2, stride=2, batch=2, size=(48, 64, 64)) ",
    ],
)
def test_a_layer_in_words(text: str) -> None:
    assert layers.parse(text) == layer(2, 64, 32, (48, 64, 64), 2, 2)


def test_every_word_of_a_layer_counts() -> None:
    text = "4, 6, (1, 2, 3), (2, 1, 2), (0, 1, 1), (1, 0, 0), 2, False, (1, 2, 1), size=5, norm_groups=3"
    found = layers.parse(text)
    settings = ((1, 2, 3), (2, 1, 2), (0, 1, 1), (1, 0, 0), (1, 2, 1))
    assert found == Layer(1, 4, 6, (5, 5, 5), *settings, groups=2, bias=False, norm_groups=3)
    assert str(found) == (
        "4 to 6 on 1x5x5x5, kernel 1x2x3, stride 2x1x2, padding 0x1x1, output padding 1x0x0, dilation 1x2x1, "
        "groups 2, ReLU, GroupNorm 3"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing"),
        ("64, 32, 2", "'size'"),
        ("64, 32, 2, size=8, colour=3", "colour"),
        ("64, 32, 2, size=(1, 2)", "64, 32, 2"),
        ("64, 32, 2, size=8, groups=3", "divisible"),
        ("64, 32, 2, size=8, padding=9", "small"),
        ("__import__('os').abort(), 32, 2, size=8", "malformed"),
        ("64, 32, 2, **{'size': 8}", "arguments"),
        ("64 32", "syntax"),
    ],
)
def test_a_layer_that_is_none(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--layer", text]) == 1
    printed = capsys.readouterr().err
    assert message in printed and "expected a layer like" in printed


def test_names_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "large_volume", "larger_volume"]) == 1
    printed = capsys.readouterr().err
    assert "'larger_volume'" in printed and "gan_64_1_32" in printed


# ---- compiling ahead


def test_kernels_are_known_before_a_layer_runs() -> None:
    """The kernels compiled ahead are those that a call would launch, of the passes that are asked for."""
    device = GPUS["H200"].device
    for which, dtype, layout in product((SMALL, BLOCK), ("tf32", "bfloat16"), LAYOUTS):
        forward, every = (
            ahead.kernels(which, dtype, layout, "", passes, device) for passes in ([Pass.FORWARD], Pass)
        )
        assert 0 < len(set(forward)) < len(set(every))
        case = cases.build(which, dtype, layout, "cpu")
        with precision(dtype):
            assert forward == launches(case.convolution, case.x, device, [Pass.FORWARD])


def test_compiling_ahead_fills_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.core")
    monkeypatch.setenv("TCONV3D_CACHE_DIR", str(tmp_path))
    device, done = GPUS["H200"].device, []
    work = [(each, "float32", "contiguous", "") for each in (SMALL, layer(1, 2, 2, 1, 1, padding=3))]
    found = ahead.compile_all(work, [Pass.FORWARD], device, lambda: done.append(1))
    expected = {(each.kernel, each.constants) for each in ahead.kernels(*work[0], [Pass.FORWARD], device)}
    assert found == expected, "the layer that is none costs only itself"
    assert len(done) == 2
    assert len(list((tmp_path / cache.LAYOUT).glob("*.cubin"))) == len(expected)


# ---- models


class Network(nn.Module):
    """Two equal layers, one that no input reaches, one that is called at two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ConvTranspose3d(2, 2, 1)
        self.equal = nn.ConvTranspose3d(2, 2, 1)
        self.twice = nn.ConvTranspose3d(2, 2, 2, stride=2, bias=False)
        self.never = nn.ConvTranspose3d(9, 9, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.twice(self.equal(self.first(x))))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A user's module, as if it could be imported."""
    made: Any = types.ModuleType("users_networks")
    made.with_input = lambda: (Network(), torch.ones(1, 2, 2, 3, 2))
    made.alone = Network
    made.space = types.SimpleNamespace(inside=Network)
    made.no_model = lambda: 3
    made.plain = lambda: (nn.Conv3d(1, 1, 1), torch.zeros(1, 1, 2, 2, 2))
    monkeypatch.setitem(sys.modules, "users_networks", made)
    return made


def test_the_layers_of_a_model(module: types.ModuleType) -> None:
    model, example = models.load("users_networks:with_input")
    assert models.layers_of(model, example) == {
        "first": layer(1, 2, 2, (2, 3, 2), 1),
        "twice": layer(1, 2, 2, (2, 3, 2), 2, 2, bias=False),
        "twice#1": layer(1, 2, 2, (4, 6, 4), 2, 2, bias=False),
    }
    model, example = models.load("users_networks:space.inside", (1, 2, 4, 4, 4))
    assert models.layers_of(model, example)["first"].size == (4, 4, 4)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("users_networks", "package.module:factory"),
        ("users_networks:absent", "has no absent"),
        ("no_such_package:f", "no_such_package"),
        ("users_networks:no_model", "expected users_networks:no_model to make an nn.Module, but got int"),
        ("users_networks:alone", "--input"),
        ("users_networks:plain", "no transposed convolution"),
    ],
)
def test_a_model_that_is_none(
    spec: str, message: str, module: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--model", spec]) == 1
    assert message in capsys.readouterr().err


@needs_emulator
@pytest.mark.thorough
def test_a_whole_model_before_and_after(module: types.ModuleType) -> None:
    model, example = models.load("users_networks:with_input")
    before = {name: type(each) for name, each in model.named_modules()}
    kinds = [(dtype, "contiguous") for dtype in ("float32", "bfloat16", "float64")]
    options = run.Options(kinds=kinds, backward=True)
    source = run.Source("users_networks:with_input", model, example)
    found = run.measure([], options, quiet(), EMULATED, [source])
    assert [row.failed for row in found.models] == ["", "", ""]
    for row in found.models:
        assert (row.swapped, row.left) == (4, 0)
        assert row.before_ms == row.after_ms == {"forward": 1.0, "training": 1.0}
        assert row.right and row.difference is not None
    assert (found.models[0].difference or 0) < 1e-6 and (found.models[2].difference or 0) < 1e-14
    assert {name: type(each) for name, each in model.named_modules()} == before, "the model itself is not touched"


# ---- correctness


@needs_emulator
@pytest.mark.parametrize("dtype", ["tf32", "float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last_3d"])
def test_errors_are_those_of_rounding(dtype: str, layout: str) -> None:
    with precision(dtype), tconv3d.use_backend("emulator"):
        case = cases.build(SMALL, dtype, layout, "cpu")
        errors = accuracy.check(case, backward=True)
        alone = accuracy.check(case, backward=False)
    assert list(errors.ours) == list(errors.theirs) == ["output", "input", "weight", "bias"]
    assert alone.ours == pytest.approx({"output": errors.ours["output"]}, rel=1e-6)
    for which in results.PASSES:
        ours, theirs = errors.of(which)
        assert accuracy.right(ours, which, case)
        assert 0 <= theirs < 2 * TOLERANCE[dtype]


@needs_emulator
@pytest.mark.parametrize("damage", ["shifted", "nan", "gradient", "unwritten"])
def test_wrong_results_are_found(damage: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = tconv3d.conv_transpose3d

    def wrong(x: Tensor, *rest: Any) -> Tensor:
        if damage == "gradient":
            x = x.clone()
            x.register_hook(lambda grad: grad.flip(2)) if x.requires_grad else None
        y = right(x, *rest)
        if damage == "unwritten":
            part = torch.empty_like(y)
            part[:, :, :-1] = y[:, :, :-1]
            return part
        return {"shifted": lambda: y.roll(1, 4), "nan": lambda: y * float("nan")}.get(damage, lambda: y)()

    monkeypatch.setattr("tconv3d.api.modules.conv_transpose3d", wrong)
    monkeypatch.setattr(run, "have_gpu", lambda: False)
    file = tmp_path / "found.json"
    words = ["--layer", "4, 6, 2, size=(2, 3, 4)", "--dtype", "float32", "--json", str(file)]
    assert cli.main(["verify", *words]) == 1
    rows = results.read(file).rows
    assert [row.right for row in rows] == [damage == "gradient", False]


@needs_emulator
@pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")
def test_verify_as_another_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernels of a GPU that is not there are checked in the emulator."""
    monkeypatch.setenv(gpus.AS, "")
    words = ["verify", "--layer", "32, 24, 3, stride=2, padding=1, size=3", "--dtype", "bfloat16"]
    file = tmp_path / "found.json"
    executor.forget()
    assert cli.main([*words, "--as", "A100", "--json", str(file)]) == 0
    assert {row.kernel.split(",")[0] for row in results.read(file).rows} == {"mma"}
    executor.forget()
    assert cli.main([*words, "--as", "Voodoo 2"]) == 1
    assert "expected a GPU of H200" in capsys.readouterr().err


@pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")
def test_the_winner_among_offers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an invented clock PyTorch's operator, the second candidate, takes half as long as the first."""
    stored: dict[str, winners.Winner] = {}
    monkeypatch.setattr(winners, "find", stored.get)
    monkeypatch.setattr(winners, "keep_first", stored.setdefault)
    seen: list[Callable[[], Any]] = []

    def clock(run: Callable[[], Any]) -> float:
        run()
        if run not in seen:
            seen.append(run)
        return 2.0 if seen.index(run) == 0 else 1.0

    executor.forget()
    options = run.Options(torch=False, offers=True, seed=1)
    with choosing.measured_by(clock):
        (row,) = run.measure_layer("tiny", layer(1, 4, 6, 3, 3), ("float32", "contiguous"), options, EMULATED, {})
    executor.forget()
    assert not row.failed
    assert row.kernel == "pytorch" and row.right and row.ours_ms is not None


def test_verify_without_a_gpu(tmp_path: Path) -> None:
    """The command as a user types it, in a process of its own."""
    file = tmp_path / "found.json"
    words = ["depthwise_64", "--layer", "3, 2, 2, size=4", "--dtype", "float32", "--json", str(file)]
    done = command("verify", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in the emulator (reduced volumes)" in done.stdout
    assert "depthwise_64" in done.stdout and "layer" in done.stdout
    found = results.read(file)
    assert found.kind == "verify" and found.ok
    assert found.settings["command"] == shlex.join(["tconv3d", "verify", *words[:-1], "found.json"])
    assert found.machine["measured"] and found.seconds > 0
    assert [(row.layer, row.which) for row in found.rows] == [
        (name, which) for name in ("depthwise_64", "layer") for which in results.PASSES
    ]
    assert all(row.ours_ms is None and not row.torch_ms and row.floor_ms is None for row in found.rows)


def test_bench_without_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = command("bench", "depthwise_64", "--json", str(file))
    assert (done.returncode, done.stdout) == (1, "")
    assert "none is visible" in done.stderr and "tconv3d verify" in done.stderr
    assert "Traceback" not in done.stderr
    assert not file.exists(), "nothing was measured, so nothing is written"


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """`python -m tconv3d`, where no GPU can be seen."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "160"}
    environment["PYTHONPATH"] = str(Path(tconv3d.__file__).parents[1])
    line = [sys.executable, "-m", "tconv3d", *words]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False)


def test_a_file_that_could_not_be_written_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "depthwise_64", "--json", str(tmp_path / "no" / "found.json")]) == 1
    assert "no directory" in capsys.readouterr().err


# ---- PyTorch's variants


@pytest.fixture
def without_compiling(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """`torch.compile` gives back what it gets, and remembers it."""
    compiled: list[nn.Module] = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)  # type: ignore[func-returns-value]
    return compiled


@pytest.mark.parametrize("layout", ["contiguous", "channels_last_3d"])
@pytest.mark.parametrize("which", [SMALL, BLOCK], ids=["convolution", "block"])
def test_variants_compute_the_same(which: Layer, layout: str, without_compiling: list[nn.Module]) -> None:
    case = cases.build(which, "float64", layout, "cpu")
    expected = case.theirs(case.x)
    other = "channels_last" if layout == "contiguous" else "contiguous"
    names = ["default", "benchmark", f"{other}_converted", other]
    found = rivals.variants(case)
    assert [variant.name for variant in found] == names + (["compile", f"compile_{other}"] if which is BLOCK else [])
    for variant in found:
        call, model, (x,) = rivals.build(case, variant)
        y = call(x)
        torch.testing.assert_close(y, expected)
        stays = variant.converted or not variant.layout
        assert (x is case.x) == stays
        here = x if not variant.converted else y  # elsewhere the result's layout is the operator's choice
        wanted = layout if stays else rivals.OTHER[layout]
        assert here.is_contiguous(memory_format=LAYOUTS[wanted]), variant
        weights = next(model.parameters())
        assert weights.is_contiguous(memory_format=LAYOUTS[variant.layout or layout]), variant
    assert len(without_compiling) == (2 if which is BLOCK else 0)


def test_a_variant_that_fails_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    build = rivals.build

    def failing(case: cases.Case, variant: rivals.Variant) -> Any:
        if variant.name == "benchmark":
            raise RuntimeError("no engine")
        return build(case, variant)

    monkeypatch.setattr(rivals, "build", failing)
    times, failed = rivals.time_variants(cases.build(SMALL, "tf32", "contiguous", "cpu"), True, invented_clock)
    assert failed == {"benchmark": "RuntimeError: no engine"}
    expected = {"default": 1.0, "channels_last_converted": 1.0, "channels_last": 1.0}
    assert times == {"forward": expected, "backward": expected}
    assert torch.backends.cudnn.benchmark is False


def test_the_switches_are_put_back() -> None:
    convolution, product = torch.backends.cudnn.conv, torch.backends.cuda.matmul  # type: ignore[attr-defined]
    before = convolution.fp32_precision, product.fp32_precision
    for name, word in (("tf32", "tf32"), ("float32", "ieee"), ("bfloat16", "ieee")):
        with precision(name):
            assert (convolution.fp32_precision, product.fp32_precision) == (word, word)
    assert (convolution.fp32_precision, product.fp32_precision) == before


# ---- a whole run, where the clock is invented and everything else is real


@pytest.fixture(scope="module")
def found() -> results.Results:
    if not emulator.available():
        pytest.skip("the emulator needs a C++ compiler")
    chosen = {"small": SMALL, "block": BLOCK, "impossible": layer(1, 2, 2, 1, 1, padding=3)}
    kinds = list(product(["tf32", "bfloat16"], ["contiguous", "channels_last_3d"]))
    work = [run.Work(name, each, kind) for name, each in chosen.items() for kind in kinds]
    options = run.Options(kinds=kinds, backward=True, host=True, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda model: model)
        patch.setattr("tconv3d.tools.bench.host.CALLS", 2)
        return run.measure(work, options, quiet(), EMULATED)


@pytest.mark.thorough
def test_every_layer_in_every_kind_has_a_row(found: results.Results) -> None:
    rows = [(row.layer, row.dtype, row.layout, row.which) for row in found.rows]
    assert rows == [
        (name, dtype, layout, which)
        for name in ("small", "block", "impossible")
        for dtype in ("tf32", "bfloat16")
        for layout in ("contiguous", "channels_last_3d")
        for which in results.PASSES
    ]
    for row in found.rows:
        if row.layer == "impossible":
            assert row.failed and row.ours_ms is None and row.right is None and not row.ok
        else:
            assert row.failed == "" and row.right and row.kernel and row.ours_ms == 1.0
            assert {"default", "benchmark"} < row.torch_ms.keys()
            assert ("compile" in row.torch_ms) == (row.layer == "block")
    assert not found.ok


def test_the_floor_is_that_of_the_tensors_and_the_ceilings(found: results.Results) -> None:
    forward, backward = found.rows[:2]
    x, y, w, b = 2 * 4 * 24, prod(SMALL.output_shape), 4 * 3 * 27, 6
    assert forward.bytes == 4 * (x + y + w + b)
    assert backward.bytes == 4 * (2 * x + y + 2 * w + 2 * b)
    convolution = SMALL.module()
    assert isinstance(convolution, nn.ConvTranspose3d)
    explained = tconv3d.explain(convolution, SMALL.input_shape).passes
    assert forward.bytes == explained[0].bytes
    assert (forward.flops, backward.flops) == (explained[0].flops, sum(each.flops for each in explained[1:]))
    copy, rate = found.ceilings["copy_TBps"], found.ceilings["tf32_TFLOPS"]
    assert forward.floor_ms == pytest.approx(max(forward.bytes / copy, forward.flops / rate) / 1e9)
    assert forward.bound_by == ("memory" if forward.bytes / copy >= forward.flops / rate else "arithmetic")
    assert set(found.ceilings) == {"copy_TBps", "tf32_TFLOPS", "bfloat16_TFLOPS"}


def test_the_run_becomes_a_table_a_file_a_page_and_a_prediction(
    found: results.Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table.show(found, Console(width=200))
    printed = capsys.readouterr().out
    assert "small" in printed and "geometric mean of 2" in printed
    kinds = ["", "_inference", "_autocast", "_grad", "_autocast_grad", "_step", "_autocast_step"]
    assert list(found.host_us) == [f"{name}{kind}_us" for kind in kinds for name in ("torch", "ours")]
    assert all(microseconds > 1 for microseconds in found.host_us.values())
    assert "microseconds of the host per call: torch" in printed
    assert "failed: impossible tf32 contiguous forward: RuntimeError" in printed
    found.write(tmp_path / "found.json")
    again = results.read(tmp_path / "found.json")
    assert again.as_dict() == json.loads(json.dumps(found.as_dict()))
    assert [(each["layers"], each["slower"]) for each in again.as_dict()["summary"]] == [(2, [])] * 8
    assert "small" in report.page(again)
    distilled = gains.distil(found.as_dict())
    assert [(row["layer"], row["forward"], row["backward"]) for row in distilled["rows"]] == [("small", 1, 1)] * 4


def test_slower_and_wrong_are_said_in_the_table(found: results.Results, capsys: pytest.CaptureFixture[str]) -> None:
    row = results.Row(**{**vars(found.rows[0]), "ours_ms": 2.0, "right": False, "error": float("nan")})
    table.show(results.Results("bench", {"gpu": "none"}, {}, rows=[row], interrupted=True), Console(width=200))
    printed = capsys.readouterr().out
    assert "Slower than PyTorch's best, tf32 contiguous forward, 1 of 1: small" in printed
    assert "Not within the tolerance of float64: small tf32 contiguous forward" in printed
    assert "nan" in printed and "interrupted" in printed


def test_ratios(found: results.Results) -> None:
    row = results.Row("", "", {}, "", "tf32", "contiguous", "forward", floor_ms=1.0, ours_ms=2.0)
    assert (row.over_floor, row.gain, row.gain_over_best, row.best) == (2.0, None, None, None)
    row.torch_ms = {"default": 8.0, "benchmark": 6.0}
    assert (row.gain, row.gain_over_best, row.best) == (4.0, 3.0, ("benchmark", 6.0))
    assert results.geometric_mean([2.0, None, 8.0]) == pytest.approx(4.0)
    assert results.geometric_mean([None]) is None


@needs_emulator
@pytest.mark.parametrize("how", ["interrupted", "terminated"])
def test_an_interruption_keeps_what_there_is(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure_layer = run.measure_layer

    def interrupted(name: str, *rest: Any) -> list[results.Row]:
        if name == "layer_2":
            before = results.read(file)  # what was found is on disk already
            assert [row.layer for row in before.rows] == ["layer_1"] * 2 and not before.interrupted
            os.kill(os.getpid(), signal.SIGINT if how == "interrupted" else signal.SIGTERM)
        return measure_layer(name, *rest)

    monkeypatch.setattr(run, "measure_layer", interrupted)
    monkeypatch.setattr(run, "have_gpu", lambda: False)
    handler = signal.getsignal(signal.SIGTERM)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    file = tmp_path / "found.json"
    words = [word for size in (2, 3, 4) for word in ("--layer", f"2, 2, 1, size={size}")]
    try:
        assert cli.main(["verify", *words, "--json", str(file)]) == 130
    finally:
        signal.signal(signal.SIGINT, interrupt)
    kept = results.read(file)
    assert kept.interrupted and [row.layer for row in kept.rows] == ["layer_1"] * 2
    assert "interrupted" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is handler


@needs_emulator
def test_inputs_are_new_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "have_gpu", lambda: False)
    tiny = [run.Work("tiny", layer(1, 2, 2, 2, 2), ("float32", "contiguous"))]

    def errors(seed: int | None) -> tuple[float | None, int]:
        found = run.verify(tiny, run.Options(seed=seed), quiet())
        return found.rows[0].error, found.settings["seed"]

    first, seed = errors(None)
    assert errors(None)[1] != seed
    assert errors(seed) == (first, seed)


def test_results_say_where_they_come_from() -> None:
    machine = results.describe_machine()
    assert machine["torch"] == torch.__version__ and machine["tconv3d"] == tconv3d.__version__
    assert (machine["gpu"] is None) == (not torch.cuda.is_available())


def test_the_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TCONV3D_COMMIT", raising=False)
    assert results.commit(tmp_path) is None
    monkeypatch.setenv("TCONV3D_COMMIT", "0123abc")
    assert results.commit(tmp_path) == "0123abc", "a copy without .git can be told"
    (tmp_path / ".git").write_text("gitdir: nowhere")
    assert results.commit(tmp_path) == "0123abc", "nor is a .git that leads nowhere one"
    (tmp_path / ".git").unlink()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    try:
        subprocess.run([*git, "init", "--quiet"], check=True)
    except OSError:
        pytest.skip("there is no git")
    (tmp_path / "file").write_text("a")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "a"], check=True)
    monkeypatch.setenv("TCONV3D_COMMIT", "elsewhere")
    clean = results.commit(tmp_path)
    assert clean is not None and len(clean) == 40
    (tmp_path / "file").write_text("b")
    assert results.commit(tmp_path) == clean + "+"


# ---- the clock


@pytest.mark.parametrize(("host_us", "flushes"), [(20, 1), (90, 4)])  # 90 us of launching hide behind 200
def test_the_clock_flushes_before_every_run_and_takes_the_median(
    host_us: int, flushes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On events that an invented GPU records: run number n takes n milliseconds."""
    log: list[str] = []
    runs = 0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")
            self.at = runs * (runs + 1) / 2

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    class Flush:
        def zero_(self) -> None:
            log.append("flush")

    def call() -> None:
        nonlocal runs
        log.append("run")
        runs += 1

    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: runs * host_us * 1e-6)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(clock_module, "L2_FLUSH_BYTES", 1)
    clock = clock_module.Clock(1e-9, "cpu")
    clock.flush = Flush()  # type: ignore[assignment]
    milliseconds = clock(call)
    warm = ["run", "run", "wait", "run", "wait"]
    assert log == warm + [*["flush"] * flushes, "event", "run", "event"] * 5 + ["wait"]
    assert milliseconds == 6  # runs 4 to 8


# ---- on a GPU


@needs_gpu
def test_the_clock_tells_a_long_call_from_a_short_one() -> None:
    clock = clock_module.Clock(0.02)
    large, small = (torch.zeros(size, device="cuda") for size in (1 << 28, 1 << 20))
    assert clock(lambda: large.add_(1)) > 10 * clock(lambda: small.add_(1)) > 0


@needs_gpu
def test_bench_on_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = ["--layer", "32, 16, 2, stride=2, size=16, batch=2", "--backward", "--budget", "0.02"]
    assert cli.main(["bench", *words, "--dtype", "tf32", "bfloat16", "--json", str(file)]) == 0
    found = results.read(file)
    assert found.machine["gpu"] == torch.cuda.get_device_name()
    for row in found.rows:
        assert row.right and row.ours_ms and row.floor_ms and row.ours_ms > 0.5 * row.floor_ms
        assert row.torch_failed == {} and len(row.torch_ms) == 4
        assert row.error is not None and not isnan(row.error)
