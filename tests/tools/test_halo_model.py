"""The fit of the halo kernel's model to times of builds: known constants come back, from invented times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import pytest

from tconv3d.families.halo.candidates import Nominal, builds_of
from tconv3d.families.halo.job import job_of
from tconv3d.families.halo.measured import CHOICES, COSTS, HALVES, Choices, Costs
from tconv3d.families.halo.search import best_tiling
from tconv3d.planning import calibration
from tconv3d.planning.gpus import GPUS
from tconv3d.planning.problem import Pass
from tconv3d.runtime import plain
from tconv3d.tools import cli, halo_model
from tconv3d.tools.bench.layers import LAYERS
from tconv3d.tools.bench.problems import problems_of_layer
from tconv3d.tools.halo_model import Sample, choose, close_choices, fit, loss, text_of, write

H200 = GPUS["H200"].device


@pytest.fixture(scope="module")
def builds() -> list[Sample]:
    """Builds of three layers, without times."""
    found = []
    for name in ("nnunet_256_128_16", "monai_128_32_16", "nnunet_320_320_4"):
        (problem,) = [p for p in problems_of_layer(LAYERS[name], "tf32", "contiguous") if p.which is Pass.FORWARD]
        job = job_of(problem)
        for build in islice(builds_of(Nominal.of(job), H200.shared_bytes), 0, None, 12):
            if (tiling := best_tiling(build, job, H200.multiprocessors)) is not None:
                found.append(Sample(name, problem, build, tiling[1], 0.0))
    return found


def timed(builds: list[Sample], costs: Costs) -> list[Sample]:
    """The builds with the times that a GPU with these constants would take."""
    return [replace(build, ms=build.predicted(costs, H200.multiprocessors)) for build in builds]


def test_known_constants_come_back(builds: list[Sample]) -> None:
    slower = replace(COSTS, start=1.5 * COSTS.start, product=1.2 * COSTS.product)
    samples = timed(builds, slower)
    found = fit(samples, COSTS, H200.multiprocessors, ("start", "product", "strict_sum"), sweeps=1)
    assert found.start == pytest.approx(slower.start, rel=0.15)
    assert found.product == pytest.approx(slower.product, rel=0.1)
    assert found.strict_sum == COSTS.strict_sum, "no time depends on it"
    before, after = (loss(samples, each, COSTS, H200.multiprocessors) for each in (COSTS, found))
    assert after < 0.2 * before


def test_constants_that_fit_are_left_alone(builds: list[Sample]) -> None:
    samples = timed(builds, COSTS)
    assert fit(samples, COSTS, H200.multiprocessors, ("product", "panel", "overlap"), sweeps=1) == COSTS
    assert close_choices(samples, COSTS, H200.multiprocessors) == (3, 3)


def test_a_choice_far_from_the_fastest_is_counted(builds: list[Sample]) -> None:
    samples = timed(builds, COSTS)
    first = min(samples[:4], key=lambda sample: sample.ms)
    slow = [replace(sample, ms=3 * sample.ms) if sample.layer == first.layer else sample for sample in samples]
    fast = [replace(sample, ms=sample.ms / 9) if sample is slow[-1] else sample for sample in slow]
    assert close_choices(fast, COSTS, H200.multiprocessors) == (2, 3)


def test_samples_are_kept_as_plain_text(builds: list[Sample]) -> None:
    for sample in timed(builds[:3], COSTS):
        assert plain.loads(plain.dumps(sample), Sample) == sample


def test_the_fastest_choices_are_taken() -> None:
    def layers(choices: Choices) -> Mapping[str, float]:
        far = abs(choices.store_cycles - 0.7 * CHOICES.store_cycles) / CHOICES.store_cycles
        return {"a": 1.0 + far, "b": 2.0 + choices.beside / 1e6}

    found = choose(CHOICES, layers)
    assert found == replace(CHOICES, store_cycles=0.7 * CHOICES.store_cycles), "a gain below 0.5% changes nothing"


def test_the_file_is_what_the_planner_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.json"
    write(path, "NVIDIA H200", "a command", COSTS, HALVES, CHOICES)
    monkeypatch.setenv(calibration.MODEL_FILE, str(path))
    found = calibration.model_constants("halo")
    assert found["float32"] == pytest.approx(asdict(COSTS), rel=1e-2)
    assert found["16 bit"] == pytest.approx(asdict(HALVES), rel=1e-2)
    assert found["choices"] == pytest.approx(asdict(CHOICES), rel=1e-2)
    stored = (calibration.MODELS / "h200.json").read_text()
    assert text_of(json.loads(stored)) == stored, "one constant to a line"


def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if halo_model.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert cli.main(["calibrate", "--models", str(tmp_path / "model.json")]) != 0
    assert "there is none" in capsys.readouterr().err
