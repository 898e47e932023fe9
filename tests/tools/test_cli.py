"""The command line: what it prints, its exit status, and errors that a person can act on."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

import tconv3d
from tconv3d import emulator
from tconv3d.planning import gpus
from tconv3d.runtime import cache, compiler, packs
from tconv3d.tools import cli, tasks
from tconv3d.tools.bench import results
from tconv3d.tools.bench import run as bench_run

LAYER = ["--in-channels", "6", "--out-channels", "4", "--kernel", "3,1,2", "--size", "4,5,6", "--groups", "2"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A cache of the test's own: `cache clear` must not cost anybody their kernels."""
    if "demo" not in request.node.name:  # which would have to compile everything again
        monkeypatch.setenv("TCONV3D_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python -m tconv3d` in a process of its own, from elsewhere, without a GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "160", **variables}
    root = Path(tconv3d.__file__).parents[1]
    environment["PYTHONPATH"] = str(root)
    command = [sys.executable, "-m", "tconv3d", *words]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)


def test_module_and_command_are_the_same() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"tconv3d {tconv3d.__version__}")


@pytest.mark.parametrize("words", [[], ["frobnicate"], ["cache", "eat"], ["explain", "--kernel", "3"]])
def test_a_command_that_is_not_understood(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert left.value.code == 2
    assert "usage: tconv3d" in capsys.readouterr().err


def test_info_without_a_gpu() -> None:
    done = run("info")
    assert done.returncode == 0, done.stderr
    rows = dict(line.strip().split(maxsplit=1) for line in done.stdout.splitlines() if line.strip())
    assert rows["tconv3d"].strip() == tconv3d.__version__
    assert torch.__version__ in rows["PyTorch"]
    assert "none visible" in rows["GPU"]
    assert "0 compiled kernels" in rows["cache"]


def test_info_as_data(capsys: pytest.CaptureFixture[str], own_cache: Path) -> None:
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cache"].startswith(str(own_cache))
    assert facts["compiler"].startswith("NVRTC ")
    assert facts["emulator"].startswith("available") == emulator.available()


def test_info_says_what_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise compiler.MissingCompilerError("install tconv3d[cu13]")

    monkeypatch.setattr(compiler, "version", missing)
    monkeypatch.setattr(emulator, "available", lambda: False)
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["compiler"] == "none: install tconv3d[cu13]"
    assert "not available" in facts["emulator"]


def test_info_prints_brackets_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install tconv3d[cu13]` is an advice to copy: rich would take [cu13] for markup."""

    def missing() -> str:
        raise compiler.MissingCompilerError("`pip install tconv3d[cu13]` or [bold]tconv3d[cu12][/bold]")

    monkeypatch.setattr(compiler, "version", missing)
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main(["info"]) == 0
    assert "none: `pip install tconv3d[cu13]` or [bold]tconv3d[cu12][/bold]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h200", "H200 "), ("rtx 4090", "RTX 4090 "), ("RTX-4090", "RTX 4090 "), ("GeForce RTX 3090", "RTX 3090 "),
        ("9.0", "H200 "), ("8.6", "RTX 3090 "), ("8.9", "L40S "), ("12.0", "RTX 5090 "), ("10.0", "B200 "),
    ],
)  # fmt: skip
def test_a_gpu_by_name_or_capability(text: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *LAYER, "--gpu", text, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu"].startswith(name)


def test_every_gpu_is_found_by_what_the_driver_calls_it() -> None:
    for name, gpu in gpus.GPUS.items():
        assert gpus.find(name.lower()) is gpu
        assert gpus.known(replace(gpu.device, name=f"NVIDIA {name}")) is gpu
    assert gpus.known(replace(gpus.GPUS["H100"].device, name="NVIDIA H100 80GB HBM3")) is gpus.GPUS["H100"]
    assert gpus.known(replace(gpus.GPUS["H100"].device, name="NVIDIA GeForce RTX 4090 Laptop GPU")) is None


# Commands, flags that take the same numbers, what they take, and what they do not.
WRONG_NUMBERS: list[tuple[str, str, str, str]] = [
    ("explain", "groups batch in-channels out-channels", "an integer of at least 1", "0 -3 2.5 many"),
    ("explain", "kernel stride dilation size", "each of at least 1", "0 1,0,1 2.5 1,2 1,,2"),
    ("explain", "padding output-padding", "each of at least 0", "-1 1,2 a"),
    ("bench verify tune", "random seed", "an integer of at least 0", "-5 1e3 x"),
    ("bench verify", "input-seed", "an integer from 0 to 18446744073709551615", "-1 18446744073709551616"),
    ("bench", "budget", "a number of seconds above 0", "0 -1 nan inf soon"),
    ("bench", "input", "a shape of integers above 0", "1x1x0 1,a 1x-1 x"),
    ("tune", "candidates", "an integer of at least 1", "0 -1 2.5"),
]


@pytest.mark.parametrize(("commands", "flags", "expected", "wrong"), WRONG_NUMBERS)
def test_a_number_that_is_none(
    commands: str, flags: str, expected: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, flag, value in product(commands.split(), flags.split(), [*wrong.split(), ""]):
        with pytest.raises(SystemExit) as left:
            cli.main([command, *(LAYER if command == "explain" else []), f"--{flag}", value])
        assert left.value.code == 2
        *_, last = capsys.readouterr().err.splitlines()
        assert last.endswith(f", got {value!r}") and f"argument --{flag}: expected " in last and expected in last


def test_every_number_of_the_command_line_has_limits() -> None:
    """A flag whose type is int or float takes what makes no sense."""
    (commands,) = (action for action in cli.parser()._actions if isinstance(action, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        for action in command._actions:
            assert action.type not in (int, float), f"{name} {action.option_strings}"


def test_explain_says_what_the_library_says(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--stride", "2,1,3", "--padding", "1,0,0", "--dilation", "2", "--output-padding", "1,0,1"]
    kind = ["--dtype", "bfloat16", "--layout", "channels_last_3d", "--batch", "3", "--no-bias", "--gpu", "H200"]
    assert cli.main(["explain", *LAYER, *flags, *kind]) == 0
    words = capsys.readouterr().out
    assert cli.main(["explain", *LAYER, *flags, *kind, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    layer = tconv3d.ConvTranspose3d(
        6, 4, (3, 1, 2), (2, 1, 3), (1, 0, 0), (1, 0, 1), 2, False, (2, 2, 2), device="meta", dtype=torch.bfloat16
    )
    x = torch.empty((3, 4, 5, 6, 6), device="meta", dtype=torch.bfloat16).permute(0, 4, 1, 2, 3)
    expected = tconv3d.explain(layer, x, gpu="H200")
    assert words.strip() == str(expected).strip()
    assert data == json.loads(json.dumps(expected.as_dict()))


def test_explain_takes_layers_as_bench_does(capsys: pytest.CaptureFixture[str]) -> None:
    text = "ConvTranspose3d(6, 4, (3, 1, 2), groups=2, bias=False, size=(4, 5, 6), batch=3)"
    assert cli.main(["explain", "--layer", text, "--gpu", "A100"]) == 0
    described = capsys.readouterr().out
    assert cli.main(["explain", *LAYER, "--batch", "3", "--no-bias", "--gpu", "A100"]) == 0
    assert described == capsys.readouterr().out != ""
    assert cli.main(["explain", "depthwise_64", "--layer", "8, 8, 3, size=4, norm_groups=2", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["layer"].startswith("ConvTranspose3d 64 -> 64") and "GroupNorm of 2 groups" in second["layer"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layer", "8, 8, 3, size=4", "--batch", "2"], "by its name, by --layer or by flags, got also --batch"),
        (["depthwise_64", "--no-bias"], "got also --no-bias"),
        (["--kernel", "3"], "required: --in-channels, --out-channels, --size (or --layer, or a layer's name)"),
    ],
)
def test_a_layer_is_described_once_and_whole(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["explain", *words])
    assert left.value.code == 2 and message in capsys.readouterr().err
    assert cli.main(["explain", "--layer", "8, 8, size=4"]) == 1
    assert "expected a layer like" in capsys.readouterr().err


def test_precompile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A model and layers are packed, and the file is listed once it is loaded."""
    pytest.importorskip("cuda.core", reason="compiling needs cuda-core")
    monkeypatch.delenv("TCONV3D_CACHE_DIR")  # kernels that other tests have compiled
    monkeypatch.delenv(packs.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("networks_to_pack.py").write_text(
        "import torch\n\ndef make():\n    return torch.nn.ConvTranspose3d(32, 4, 1)\n"
    )
    flags = ["--gpu", "A100", "--dtype", "float32", "--no-gradients", "-o"]
    model = ["--model", "networks_to_pack:make", "--shape", "1x32x2x3x4"]
    assert cli.main(["precompile", *model, *flags, "model.tconv3d"]) == 0
    said = capsys.readouterr().out
    assert "A100 (8.0, 108 multiprocessors): the layer: ConvTranspose3d 32 -> 4" in said and "1x32x2x3x4" in said
    assert cli.main(["precompile", "--layer", "32, 4, 1, size=(2, 3, 4)", *flags, "layer.tconv3d"]) == 0
    monkeypatch.setenv(packs.VARIABLE, "layer.tconv3d")
    packs.unload()
    try:
        assert cli.main(["cache"]) == 0
        listed = capsys.readouterr().out
        assert f"looked at first: {tmp_path / 'layer.tconv3d'}: " in listed and "for A100 (8.0, 108" in listed
        first, second = packs.read(Path("model.tconv3d")), packs.loaded()[0]
        assert set(first.places) == set(second.places)
    finally:
        monkeypatch.delenv(packs.VARIABLE)
        packs.unload()
    assert cli.main(["precompile", *model, *flags, "/proc/no/such/place"]) == 1
    assert "cannot write /proc/no/such/place" in capsys.readouterr().err


def test_a_triple_may_be_one_number_or_three(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for text in ("5", "5,5,5", "5x5x5"):
        words = ["--in-channels", "2", "--out-channels", "3", "--kernel", "2", "--size", text, "--json"]
        assert cli.main(["explain", *words]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2]


@pytest.mark.parametrize("text", ["1,2", "a", "1,2,3,4", ""])
def test_what_is_no_triple(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["explain", *LAYER, "--stride", text])
    assert left.value.code == 2
    assert "--stride" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--groups", "4"], "divisible by groups"),
        (["--output-padding", "5"], "output padding"),
        (["--padding", "9"], "size"),
        (["--gpu", "Abacus"], "Abacus"),
    ],
)
def test_explain_refuses_what_the_library_refuses(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", *LAYER, *words]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("tconv3d: error: ")
    assert message in printed.err
    assert "Traceback" not in printed.err


def test_cache(capsys: pytest.CaptureFixture[str], own_cache: Path) -> None:
    def say(*words: str) -> str:
        assert cli.main(["cache", *words]) == 0
        return capsys.readouterr().out.strip()

    assert say("path") == str(own_cache)
    assert say("size") == "0 compiled kernels, 0.0 MB"
    cache.get(cache.key("a"), ".cubin", lambda: bytes(2_000_000))
    assert say() == say("size") == "1 compiled kernel, 2.0 MB"
    (own_cache / "mine.txt").write_text("not a kernel")
    (own_cache / f"{cache.key('old')}.cubin").write_bytes(bytes(1_000_000))
    assert "1 compiled kernel, 1.0 MB of an older version are not used" in say()
    assert say("clear-outdated") == "removed 1 compiled kernel, 1.0 MB"
    assert say("clear") == "removed 1 compiled kernel, 2.0 MB"
    assert say("size") == "0 compiled kernels, 0.0 MB"
    assert sorted(file.name for file in own_cache.iterdir()) == ["mine.txt", cache.LAYOUT]


def test_cache_path_without_a_home(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "directory", lambda: None)
    assert cli.main(["cache", "path"]) == 1
    assert "TCONV3D_CACHE_DIR" in capsys.readouterr().err


@pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")
def test_demo_without_a_gpu() -> None:
    done = run("demo")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in tasks.NAMES:
        assert name in done.stdout
    assert "emulator" in done.stdout
    assert done.stdout.count("forward") == done.stdout.count("backward") == len(tasks.NAMES)


def test_demo_of_no_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "no_such_task"]) == 1
    assert "grouped_strided" in capsys.readouterr().err


def test_demo_with_a_gpu_times_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bench_run.Work] = []

    def bench(work: list[bench_run.Work], *rest: object, **keywords: object) -> results.Results:
        asked.extend(work)
        return results.Results("bench", {"gpu": "Imaginary GPU"}, {})

    monkeypatch.setattr(bench_run, "have_gpu", lambda: True)
    monkeypatch.setattr(bench_run, "bench", bench)
    assert cli.main(["demo"]) == 0
    assert [work.name for work in asked] == list(tasks.NAMES)
