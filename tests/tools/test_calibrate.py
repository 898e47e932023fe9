"""The fit of rates to measured times: known rates come back, none is negative, and few terms are enough."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from tconv3d import emulator
from tconv3d.families.direct import planner as direct
from tconv3d.planning.calibration import TERMS
from tconv3d.planning.offers import Offer
from tconv3d.tools import calibrate
from tconv3d.tools.bench.layers import LAYERS, layer
from tconv3d.tools.bench.problems import problems_of_layer
from tconv3d.tools.calibrate import LEAST_TIMES, Candidate, Timed, fit, fit_rates, predict
from tconv3d.torch_ops import executor

KIND = "forward, float32, contiguous"


def rows(
    rates: Mapping[str, float],
    count: int = 40,
    noise: float = 0.0,
    kind: str = KIND,
    kernel: str = "kernel",
    zero: tuple[str, ...] = (),
) -> list[Timed]:
    """Times that follow from rates and random work of very different sizes."""
    draw, found = random.Random(3), []
    for _ in range(count):
        terms = {term: 0.0 if term in zero else 10 ** draw.uniform(-1, 3) for term in TERMS}
        terms["launches"] = float(draw.randint(1, 3))
        time = sum(rate * terms[term] for term, rate in rates.items()) * (1 + draw.uniform(-noise, noise))
        found.append(Timed("layer", kernel, kind, ("forward",), terms, time))
    return found


@pytest.mark.parametrize(
    "rates",
    [
        {"kilocycles": 0.6},
        {"launches": 12.0, "kilocycles": 0.5},
        {"launches": 5.0, "kilocycles": 0.57, "megabytes": 0.3},
        {"launches": 5.0, "kilocycles": 0.57, "megabytes": 0.3, "gigaproducts": 40.0},
    ],
    ids=len,
)
def test_known_rates_come_back(rates: dict[str, float]) -> None:
    found = fit_rates(rows(rates))
    assert found["rates"] == pytest.approx(rates, rel=1e-3)
    assert found["times"] == 40 and found["typical_error"] == 0.0


def test_noise_changes_them_little_and_is_told() -> None:
    rates = {"launches": 8.0, "kilocycles": 0.6}
    found = fit_rates(rows(rates, 200, noise=0.1))
    assert found["rates"]["kilocycles"] == pytest.approx(0.6, rel=0.1)
    assert 0.02 < found["typical_error"] < 0.1 < found["largest_error"] - 1 + 0.01 < 0.2


def test_no_rate_is_negative() -> None:
    """A time that falls with a term does not get a negative rate for it."""
    measured = [
        Timed(row.layer, row.kernel, row.kind, row.passes, row.terms, 50 + row.terms["kilocycles"])
        for row in rows({"kilocycles": 1.0})
    ]
    for row in measured:
        row.terms["megabytes"] = 1e3 / row.terms["kilocycles"]
        row.terms["gigaproducts"] = 1.0 / row.terms["megabytes"]
    rates = fit_rates(measured)["rates"]
    assert rates and min(rates.values()) > 0


def test_a_term_that_explains_nothing_is_left_out() -> None:
    assert set(fit_rates(rows({"kilocycles": 0.6}, 100, noise=0.05))["rates"]) == {"kilocycles"}


def test_a_term_that_no_row_has_is_left_out() -> None:
    found = fit_rates(rows({"launches": 4.0, "megabytes": 0.5}, zero=("kilocycles", "gigaproducts")))
    assert found["rates"] == pytest.approx({"launches": 4.0, "megabytes": 0.5}, rel=1e-3)


def test_the_cycles_of_a_model_are_never_left_out() -> None:
    """Else a layer with many more cycles than those measured would be predicted to cost no more than they."""
    assert "kilocycles" in fit_rates(rows({"launches": 4.0, "megabytes": 0.5}))["rates"]


def test_one_time_is_fitted_by_one_rate() -> None:
    (row,) = rows({"kilocycles": 0.6}, 1)
    found = fit_rates([row])["rates"]
    assert len(found) == 1 and predict(row, found) == pytest.approx(row.microseconds, rel=1e-3)


def test_kinds_with_few_times_share_the_rates_of_all() -> None:
    many = rows({"kilocycles": 0.6}, LEAST_TIMES, kind="many")
    few = rows({"kilocycles": 0.6}, LEAST_TIMES - 1, kind="few")
    found = fit([*many, *few, *rows({"kilocycles": 2.0}, 1, kernel="rare")])
    assert set(found["kernel"]) == {"many", "any"} and set(found["rare"]) == {"any"}
    assert found["kernel"]["any"]["times"] == len(many) + len(few)
    assert found["rare"]["any"]["rates"] != found["kernel"]["any"]["rates"]


@pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
def test_offers_and_pytorch_run_on_random_tensors() -> None:
    """Every offer of the direct family runs, and PyTorch's operator for all gradients together and for each."""
    found, ran, device = [], [], executor.EMULATED
    problems = problems_of_layer(layer(1, 2, 3, 3, 2, 2), "tf32", "channels_last_3d")
    for wanted in ({p.which: p for p in problems[:1]}, {p.which: p for p in problems[1:]}):
        offers = direct.offer(wanted, device)
        same = [
            Candidate("layer", "tf32", wanted, o.kernel, KIND, o.passes, dict.fromkeys(TERMS, 1.0), o.plan(), 1.0)
            for o in offers
            if isinstance(o, Offer)
        ]

        def clock(run: Callable[[], object]) -> float:
            run()
            ran.append(run)
            return 2.0

        found += [(row.kernel, row.passes) for row in calibrate._measure_call(same, clock, "cpu")]
    gradients = ("input_grad", "weight_grad", "bias_grad")
    kernels = "direct", "direct_weight_grad", "channel_sum"
    ours = [("direct", ("forward",)), *zip(kernels, ((each,) for each in gradients), strict=True)]
    theirs = [("pytorch", passes) for passes in (("forward",), gradients, gradients[:1], gradients[1:2])]
    assert sorted(found) == sorted(ours + theirs) and len(ran) == 8


def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate.torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="measures on a GPU"):
        calibrate._run(argparse.Namespace(pytorch=None))


# ---- PyTorch's rates out of results of `bench`


def bench_results(path: Path, gpu: str = "NVIDIA H200", times: Sequence[float] = (0.1, 0.2)) -> Path:
    """Results with one layer: PyTorch's forward and backward pass."""
    shape = asdict(LAYERS["monai_64_16_32"])
    rows = [
        {"layer": "layer", "dtype": "tf32", "layout": "contiguous", "pass": which, "torch_ms": {"default": ms}}
        for which, ms in zip(("forward", "backward"), times, strict=True)
    ]
    rest = {"text": "", "shape": shape, "follow": "", "kernel": "halo", "tile": "", "bytes": 1, "flops": 1}
    rest |= {"floor_ms": 1.0, "bound_by": "memory"}
    full = [{**rest, **row} for row in rows]
    content = {"format": 1, "kind": "bench", "machine": {"gpu": gpu}, "settings": {}, "ceilings": {}, "rows": full}
    path.write_text(json.dumps({**content, "models": [], "interrupted": False}))
    return path


def test_pytorchs_rates_are_put_into_a_file_of_rates(tmp_path: Path) -> None:
    rates = tmp_path / "h200.json"
    kernels = {"halo": {"any": {"rates": {"kilocycles": 0.6}}}}
    rates.write_text(json.dumps({"machine": {"gpu": "NVIDIA H200"}, "origin": "calibrate", "kernels": kernels}))
    calibrate.fit_pytorch(rates, [bench_results(tmp_path / "found.json")], Console(quiet=True))
    stored = json.loads(rates.read_text())
    assert stored["kernels"]["halo"] == kernels["halo"] and list(stored)[-1] == "kernels"
    assert stored["pytorch_origin"] == "tconv3d calibrate --pytorch found.json --out h200.json"
    found = stored["kernels"]["pytorch"]
    assert set(found) == {"any"} and found["any"]["times"] == 2 and found["any"]["largest_error"] >= 1


def test_results_of_another_gpu_are_refused(tmp_path: Path) -> None:
    rates = tmp_path / "h200.json"
    rates.write_text(json.dumps({"machine": {"gpu": "NVIDIA H200"}, "origin": "calibrate", "kernels": {}}))
    with pytest.raises(ValueError, match="was measured on NVIDIA A100, not NVIDIA H200"):
        calibrate.fit_pytorch(rates, [bench_results(tmp_path / "found.json", "NVIDIA A100")], Console(quiet=True))
