"""Measured rates: which are used for a kernel, what they make of work, and what the stored files hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from layers import Layer as SmallLayer
from problems import A100, H200, problem, problems

from tconv3d.api.explain import call_of, problems_of
from tconv3d.planning import calibration, planner
from tconv3d.planning.calibration import TERMS, Work, kind_of, microseconds, rates_of, scaled, terms
from tconv3d.planning.gpus import GPUS
from tconv3d.planning.offers import Offer
from tconv3d.planning.problem import Device, Pass, channels_last_strides
from tconv3d.tools.bench.layers import LAYERS, Layer

LAYER = SmallLayer(16, 24, (4, 5, 6), (3, 3, 3), (2, 2, 2), (1, 1, 1))
FORWARD = problem(LAYER, Pass.FORWARD)
FILES = sorted(calibration.DIRECTORY.glob("*.json"))


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rates of one kernel on an H200, and nothing else."""
    kernels = {
        "known": {
            "any": {"rates": {"launches": 3.0, "megabytes": 0.5}},
            "forward, float32, contiguous": {"rates": {"kilocycles": 2.0, "gigaproducts": 7.0}},
        }
    }
    (tmp_path / "h200.json").write_text(json.dumps({"kernels": kernels}))
    monkeypatch.setattr(calibration, "DIRECTORY", tmp_path)
    calibration.measured.cache_clear()
    rates_of.cache_clear()
    yield
    calibration.measured.cache_clear()
    rates_of.cache_clear()


def test_work_in_the_units_of_the_rates() -> None:
    found = terms(FORWARD, Work(2, cycles=5000.0, products=3e9))
    assert found == {"launches": 2.0, "kilocycles": 5.0, "megabytes": FORWARD.bytes / 1e6, "gigaproducts": 3.0}


def test_kinds_are_pass_type_and_layout() -> None:
    assert FORWARD.output_size[2] % 2 and kind_of(FORWARD) == "forward, float32, odd lines"
    even = problem(replace(LAYER, output_padding=(0, 0, 1), size=(*LAYER.size[:2], 6)), Pass.FORWARD)
    assert kind_of(even) == "forward, float32, contiguous"
    assert kind_of(replace(even, tf32=False)) == "forward, strict, contiguous"
    assert kind_of(replace(FORWARD, dtype="bfloat16")) == kind_of(replace(FORWARD, dtype="float16"))
    assert kind_of(replace(even, dtype="float64")) == "forward, float64, contiguous"
    last = channels_last_strides((LAYER.batch, LAYER.in_channels, *LAYER.size))
    assert kind_of(replace(FORWARD, input=last)) == "forward, float32, channels last"
    bias = problems(LAYER)[Pass.BIAS_GRAD]
    out = channels_last_strides((LAYER.batch, LAYER.out_channels, *FORWARD.output_size))
    assert kind_of(replace(bias, output=out)).endswith("channels last")


def test_rates_of_the_kind_then_of_any_then_a_guess(stored: None) -> None:
    work = Work(2, cycles=5000.0, products=3e9)
    assert microseconds("known", FORWARD, work, H200) == pytest.approx(2 * 5 + 7 * 3)
    half = replace(FORWARD, dtype="bfloat16")
    assert microseconds("known", half, work, H200) == pytest.approx(3 * 2 + 0.5 * half.bytes / 1e6)
    assert rates_of("unknown", kind_of(FORWARD), H200) == calibration.DEFAULT


def test_infinite_work_takes_infinitely_long(stored: None) -> None:
    """The rates of the second kind say nothing of cycles."""
    for each in (FORWARD, replace(FORWARD, dtype="bfloat16")):
        assert microseconds("known", each, Work(1, inf), H200) == inf


def test_gpus_that_nobody_measured_take_scaled_rates(stored: None) -> None:
    h200, a100 = GPUS["H200"], GPUS["A100"]
    rates = rates_of("known", "another", A100)
    assert rates == {"launches": 3.0, "megabytes": pytest.approx(0.5 * h200.copy / a100.copy)}
    rates = rates_of("known", kind_of(FORWARD), A100)
    per_multiprocessor = (h200.tf32 / 132) / (a100.tf32 / 108)  # scarcer than bandwidth
    assert rates == {
        "kilocycles": pytest.approx(2 * per_multiprocessor),
        "gigaproducts": pytest.approx(7 * h200.float32 / a100.float32),
    }
    assert scaled({"launches": 1.0, "megabytes": 1.0, "kilocycles": 1.0}, h200, h200) == pytest.approx(
        {"launches": 1.0, "megabytes": 1.0, "kilocycles": 1.0}
    )


@pytest.mark.parametrize(
    ("name", "kind", "tensor_cores", "expected"),
    [
        ("A100", "forward, 16 bit, contiguous", True, (789.0 / 132) / (312.0 / 108)),
        ("A100", "forward, float32, contiguous", False, (51.3 / 132) / (19.5 / 108)),
        ("H20", "forward, float32, contiguous", True, (389.0 / 132) / (74.0 / 78)),
        # An RTX 4090 has enough multiply-adds, but little bandwidth for each multiprocessor.
        ("RTX 4090", "forward, float32, contiguous", False, (4.27 / 132) / (1.01 / 128)),
        ("B200", "forward, float64, contiguous", True, (67.0 / 132) / (40.0 / 148)),
    ],
)
def test_cycles_scale_with_what_is_scarcer_on_a_multiprocessor(
    name: str, kind: str, tensor_cores: bool, expected: float
) -> None:
    found = scaled({"kilocycles": 1.0}, GPUS["H200"], GPUS[name], kind, tensor_cores)
    assert found == {"kilocycles": pytest.approx(expected)}


def test_only_gpus_with_a_file_are_calibrated(stored: None) -> None:
    assert calibration.calibrated(H200) and calibration.calibrated(replace(H200, name="NVIDIA H200 as A100"))
    assert not calibration.calibrated(A100) and not calibration.calibrated(replace(H200, name="emulator"))
    assert calibration.has_rates("known", kind_of(FORWARD), A100), "the rates of the reference are scaled"
    assert not calibration.has_rates("known", "another", H200)
    assert calibration.largest_error("known", "any", A100) is None, "nobody knows the error of scaled rates"


def test_an_unknown_device_takes_the_rates_as_they_are(stored: None) -> None:
    assert rates_of("known", "another", Device("emulator", (9, 0), 4, 232448)) == {"launches": 3.0, "megabytes": 0.5}


# ---- the files of the package


def test_the_reference_is_measured() -> None:
    assert calibration.measured(calibration.REFERENCE) and calibration.REFERENCE in GPUS


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_say_what_they_are_and_where_they_come_from(path: Path) -> None:
    text = json.loads(path.read_text())
    assert "microseconds per launch" in text["unit"]
    assert text["origin"].startswith("tconv3d calibrate")
    assert all(text["machine"][key] for key in ("gpu", "driver", "cuda", "measured"))
    name = path.stem.replace("-", " ").upper()
    assert name in GPUS and name in text["machine"]["gpu"].upper()
    for kernel, kinds in text["kernels"].items():
        assert "any" in kinds, kernel
        for kind, found in kinds.items():
            rates = found["rates"]
            assert rates and set(rates) <= set(TERMS) and min(rates.values()) > 0, (kernel, kind)
            assert found["times"] >= 1 and found["typical_error"] >= 0, (kernel, kind)
            assert found.get("largest_error", 1.0) >= 1.0, (kernel, kind)
    assert text.get("pytorch_origin", text["origin"]).startswith("tconv3d calibrate") and "95%" in text["errors"]


@pytest.mark.parametrize("path", sorted(calibration.MODELS.glob("*.json")), ids=lambda path: path.stem)
def test_constants_of_models_have_a_unit_and_an_origin(path: Path) -> None:
    text = json.loads(path.read_text())
    assert path.stem.upper() in GPUS and path.stem.upper() in text.pop("gpu").upper()
    for family, sections in text.items():
        origins = sections.pop("origins")
        for name, constants in sections.items():
            for constant, found in constants.items():
                assert set(found) == {"value", "unit", "origin"} and found["unit"], (family, name, constant)
                assert found["value"] >= 0 and found["origin"] in origins, (family, name, constant)


def offers_for(layer: Layer, dtype: torch.dtype, layout: torch.memory_format) -> Iterator[Offer]:
    """What families offer for a layer of the benchmark, in TF32 or in 16 bits."""
    shapes = (layer.input_shape, layer.weight_shape)
    x, w = (torch.empty(shape, dtype=dtype, device="meta", memory_format=layout) for shape in shapes)
    b = torch.empty(layer.out_channels, dtype=dtype, device="meta")
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    asked = problems_of(*call_of(x, w, b, *layer.settings))
    for wanted in (asked[:1], asked[1:]):
        answers = planner.answers({each.which: each for each in wanted}, GPUS["H200"].device)
        yield from (answer for answer in answers if isinstance(answer, Offer))


def test_a_kernel_that_nobody_measured_wins_only_if_nothing_else_can() -> None:
    last = channels_last_strides
    found = problem(SmallLayer(64, 96, (4, 5, 9), (3, 3, 3), (2, 2, 2), (1, 1, 1)), Pass.WEIGHT_GRAD, "bfloat16")
    x, y = (2, 64, 4, 5, 9), (2, 96, *found.output_size)
    wanted = {found.which: replace(found, input=last(x), output=last(y))}
    unknown = {
        kernel: kinds for kernel, kinds in calibration.measured("H200").items() if kernel != "rows_weight_grad"
    }
    nothing = {"measured": lambda name: unknown, "derived": lambda name: {}}
    with patch.multiple(calibration, **nothing):
        offers = {each.kernel: each for each in planner.answers(wanted, H200) if isinstance(each, Offer)}
        taken = planner.taken(wanted, H200)
        for kernel, offer in offers.items():
            fits = offer.work().cycles < inf  # a kernel may have no build that fits
            assert (offer.price == inf) is (kernel not in unknown or not fits), kernel
    calibration.rates_of.cache_clear()
    assert "rows_weight_grad" in offers
    assert all(offer.kernel in unknown for offer in taken)


def test_derived_rates_count_above_their_prediction_until_the_kernel_is_measured() -> None:
    measured, derived = calibration.measured("H200"), calibration.derived("H200")
    for kernel, kinds in derived.items():
        for kind, found in kinds.items():
            assert kind not in measured.get(kernel, {}), f"{kernel}, {kind}: drop what calibrate has measured"
            assert found["origin"].startswith("derived from ")
            assert rates_of(kernel, kind, H200) == found["rates"]
            assert set(found["rates"]) <= set(TERMS) and min(found["rates"].values()) > 0
    kernel = "align"
    assert calibration.surcharge(kernel, H200) == calibration.DERIVED_SURCHARGE > 1
    with patch.object(calibration, "measured", return_value={kernel: {"any": {"rates": {"launches": 7.0}}}}):
        calibration.rates_of.cache_clear()
        assert calibration.surcharge(kernel, H200) == 1.0 and rates_of(kernel, "any", H200) == {"launches": 7.0}
    calibration.rates_of.cache_clear()
    assert calibration.derived("A100") == {} and rates_of(kernel, "any", A100) != calibration.DEFAULT


def test_every_kernel_that_makes_offers_has_rates_or_an_infinite_price() -> None:
    """A kernel whose family counts cycles has a rate for them in every kind."""
    kinds = ((torch.float32, torch.contiguous_format), (torch.bfloat16, torch.channels_last_3d))
    counts_cycles: dict[str, bool] = {}
    for layer in LAYERS.values():
        for kind in kinds:
            for offer in offers_for(layer, *kind):
                if offer.kernel not in counts_cycles:
                    counts_cycles[offer.kernel] = offer.work().cycles > 0
    assert len(counts_cycles) >= len(planner.FAMILIES)
    table = {kernel: dict(kinds) for kernel, kinds in calibration.measured("H200").items()}
    for kernel, kinds in calibration.derived("H200").items():
        table[kernel] = kinds | table.get(kernel, {})
    for kernel, counted in counts_cycles.items():
        assert kernel in table or calibration.surcharge(kernel, H200) == inf, kernel
        for kind, found in table.get(kernel, {}).items():
            assert not counted or "kilocycles" in found["rates"], (kernel, kind)
