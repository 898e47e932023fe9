"""Predicts the gain of a layer over PyTorch: the gain of the most similar layer that has been measured.

`distil` makes `measured.json` from the results of a benchmark; a package without the file predicts nothing. A
prediction names the measured layer. PyTorch's time follows no simple model, so a layer that resembles no measured
layer gets no prediction.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import dist, log2, prod
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).with_name("measured.json")
# Two layers are similar if their `features` are at most this far apart (Euclidean distance, in octaves).
REACH = 3.0
FORMAT = 1


@dataclass(frozen=True)
class Gain:
    """Holds PyTorch's time with default settings divided by this library's time, for each pass."""

    forward: float
    backward: float | None
    like: str  # name of the measured layer
    gpu: str

    def __str__(self) -> str:
        passes = f"{self.forward:.1f}x" + ("" if self.backward is None else f" (backward {self.backward:.1f}x)")
        return f"{passes} as {self.like} on {self.gpu}"


def features(layer: Mapping[str, Any]) -> tuple[float, ...]:
    """Returns what decides a layer's speed, in octaves: channels, groups, stride, taps per output, positions."""
    groups, stride, kernel = layer["groups"], layer["stride"], layer["kernel"]
    return (
        log2(layer["in_channels"] / groups),
        log2(layer["out_channels"] / groups),
        log2(groups),
        2 * log2(prod(stride)) / 3,
        2 * log2(prod(kernel) / prod(stride)) / 3,
        log2(layer["batch"] * prod(layer["size"])) / 3,
    )


def predict(layer: Mapping[str, Any], dtype: str, layout: str) -> Gain | None:
    """Returns the gain of the most similar measured layer, or None if no measured layer is similar."""
    rows = [row for row in measured()["rows"] if row["dtype"] == dtype and row["layout"] == layout]
    wanted = features(layer)
    nearest = min(rows, key=lambda row: dist(features(row["shape"]), wanted), default=None)
    if nearest is None or dist(features(nearest["shape"]), wanted) > REACH:
        return None
    return Gain(nearest["forward"], nearest["backward"], nearest["layer"], measured()["gpu"])


@functools.cache
def measured() -> dict[str, Any]:
    """Returns the measurements that the package contains."""
    if not MEASURED.exists():
        return {"gpu": "", "rows": []}
    found: dict[str, Any] = json.loads(MEASURED.read_text())
    return found


def distil(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of `measured.json`, given the results that `tconv3d bench --json` writes."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in results["rows"]:
        if row.get("ours_ms") is None or "default" not in row["torch_ms"] or row["follow"] or row.get("tail"):
            continue
        key = (row["layer"], row["dtype"], row["layout"])
        kept = rows.setdefault(key, {**_named(key), "shape": row["shape"], "forward": None, "backward": None})
        kept[row["pass"]] = round(row["torch_ms"]["default"] / row["ours_ms"], 2)
    return {
        "format": FORMAT,
        "gpu": results["machine"]["gpu"],
        "commit": results["machine"].get("commit"),
        "rows": [row for row in rows.values() if row["forward"] is not None],
    }


def _named(key: Sequence[str]) -> dict[str, str]:
    return dict(zip(("layer", "dtype", "layout"), key, strict=True))
