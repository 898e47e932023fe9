"""Defines the results of a run as data: the rows, the machine, and the JSON file that holds them."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from math import exp, isfinite, log
from pathlib import Path
from typing import Any

import torch

import tconv3d
from tconv3d.runtime import compiler

FORMAT = 1
PASSES = ("forward", "backward")
STEPS = ("forward", "step")  # what is measured of a layer with a tail: forward, and a whole training step


@dataclass
class Row:
    """Holds the results of one pass of one layer in one precision and layout; unmeasured fields are None or empty."""

    layer: str
    text: str  # description of the layer in words
    shape: dict[str, Any]  # fields of the layer's `layers.Layer`
    follow: str  # operators after the convolution
    dtype: str
    layout: str
    which: str  # "forward", "backward" or "step"
    kernel: str = ""
    tile: str = ""
    bytes: int = 0
    flops: int = 0
    floor_ms: float | None = None
    bound_by: str = ""
    error: float | None = None
    torch_error: float | None = None
    right: bool | None = None
    ours_ms: float | None = None
    torch_ms: dict[str, float] = field(default_factory=dict)
    torch_failed: dict[str, str] = field(default_factory=dict)
    failed: str = ""  # error that kept our layer from running
    tail: str = ""  # name of the tail (`tails.TAILS`) that follows the convolution, if there is one
    fused: str = ""  # what became of the tail, in short words
    plain_ms: float | None = None  # our convolution alone, without its tail

    @property
    def title(self) -> str:
        """Names the layer, with its tail if it has one."""
        return f"{self.layer} + {self.tail}" if self.tail else self.layer

    @property
    def default_ms(self) -> float | None:
        return self.torch_ms.get("default")

    @property
    def best(self) -> tuple[str, float] | None:
        """Returns the name of PyTorch's fastest variant and its milliseconds."""
        return min(self.torch_ms.items(), key=lambda item: item[1]) if self.torch_ms else None

    @property
    def over_floor(self) -> float | None:
        return _ratio(self.ours_ms, self.floor_ms)

    @property
    def over_plain(self) -> float | None:
        """Returns our time divided by the time of our convolution alone."""
        return _ratio(self.ours_ms, self.plain_ms)

    @property
    def gain(self) -> float | None:
        """Returns the time of PyTorch's default variant divided by ours."""
        return _ratio(self.default_ms, self.ours_ms)

    @property
    def gain_over_best(self) -> float | None:
        return _ratio(self.best[1] if self.best else None, self.ours_ms)

    @property
    def slower(self) -> bool:
        """Says whether our layer is slower than PyTorch's fastest variant."""
        return self.gain_over_best is not None and self.gain_over_best < 1

    @property
    def ok(self) -> bool:
        return not self.failed and self.right is not False


@dataclass
class ModelRow:
    """Holds the results of a whole model before and after `accelerate`."""

    model: str
    dtype: str
    layout: str
    swapped: int
    left: int
    before_ms: dict[str, float] = field(default_factory=dict)  # keys: "forward", "training" (forward and backward)
    after_ms: dict[str, float] = field(default_factory=dict)
    difference: float | None = None  # relative difference of the outputs
    right: bool | None = None
    failed: str = ""

    @property
    def ok(self) -> bool:
        return not self.failed and self.right is not False


@dataclass
class Results:
    """Holds everything that one run found."""

    kind: str  # "bench" or "verify"
    machine: dict[str, Any]
    settings: dict[str, Any]
    ceilings: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    models: list[ModelRow] = field(default_factory=list)
    host_us: dict[str, float] = field(default_factory=dict)  # host microseconds per call, if asked for
    compiled: int = 0  # number of kernels compiled before the first timing
    compile_s: float = 0.0
    seconds: float = 0.0  # duration of the whole run
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows) and all(model.ok for model in self.models)

    def as_dict(self) -> dict[str, Any]:
        found = _plain(asdict(self))
        means = [asdict(summary) for summary in summarize(self.rows)]
        for row in found["rows"]:
            row["pass"] = row.pop("which")
        return {"format": FORMAT, **found, "summary": means}

    def write(self, path: Path) -> None:
        write_json(_stored(self.as_dict()), path)


@dataclass(frozen=True)
class Summary:
    """Holds geometric means over the layers of one precision, layout and pass, and the layers PyTorch runs faster."""

    dtype: str
    layout: str
    which: str
    layers: int
    over_floor: float | None
    gain: float | None
    gain_over_best: float | None
    slower: list[str]
    over_plain: float | None = None  # time with a tail over the time of our convolution alone


def summarize(rows: Sequence[Row]) -> list[Summary]:
    """Returns one summary for each precision, layout and pass among the timed rows."""
    timed = [row for row in rows if row.ours_ms is not None]
    kinds = dict.fromkeys((row.dtype, row.layout, row.which) for row in timed)
    return [_summary(kind, [row for row in timed if (row.dtype, row.layout, row.which) == kind]) for kind in kinds]


def _summary(kind: tuple[str, str, str], rows: Sequence[Row]) -> Summary:
    return Summary(
        *kind,
        layers=len(rows),
        over_floor=geometric_mean(row.over_floor for row in rows),
        gain=geometric_mean(row.gain for row in rows),
        gain_over_best=geometric_mean(row.gain_over_best for row in rows),
        slower=[row.title for row in rows if row.slower],
        over_plain=geometric_mean(row.over_plain for row in rows),
    )


def write_json(found: dict[str, Any], path: Path) -> None:
    """Writes each entry on one line, and a list entry with one line per element, to keep diffs short."""
    entries = []
    for key, value in found.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n]"
        entries.append(f"{json.dumps(key)}: {text}")
    path.write_text("{\n" + ",\n".join(entries) + "\n}\n")


def _stored(found: dict[str, Any]) -> dict[str, Any]:
    """Converts results to the layout of the file: each layer is described once, and rows omit unmeasured fields."""
    defaults: dict[str, Any] = {"torch_ms": {}, "torch_failed": {}}
    defaults |= {each.name: each.default for each in fields(Row) if each.default is not MISSING}
    layers: dict[str, dict[str, Any]] = {}
    rows = []
    for row in found["rows"]:
        about = {key: row[key] for key in ("text", "shape", "follow")}
        said = about if layers.setdefault(row["layer"], about) == about else {}
        rows.append({k: v for k, v in row.items() if k not in said and (k not in defaults or v != defaults[k])})
    return {**found, "layers": layers, "rows": rows}


def read(path: Path) -> Results:
    """Reads results that `tconv3d bench --json` or `tconv3d verify --json` wrote."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{path} is not a file that `tconv3d bench --json` writes (format {FORMAT})")
    try:
        layers = data.get("layers", {})
        rows = [
            Row(**_with_nan({**layers.get(row["layer"], {}), **row, "which": row["pass"]}, drop="pass"))
            for row in data["rows"]
        ]
        models = [ModelRow(**_with_nan(row)) for row in data["models"]]
        rest = {key: data[key] for key in data.keys() - {"format", "layers", "rows", "models", "summary"}}
        return Results(**rest, rows=rows, models=models)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Returns the geometric mean of the values that are neither None nor zero, or None if there are none."""
    logs = [log(value) for value in values if value]
    return exp(sum(logs) / len(logs)) if logs else None


def describe_machine() -> dict[str, Any]:
    """Describes the hardware and the software versions that the results depend on."""
    gpu = torch.cuda.is_available()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device()) if gpu else None
    cudnn = torch.backends.cudnn.version() if gpu else None
    return {
        "gpu": properties.name if properties else None,
        "capability": f"{properties.major}.{properties.minor}" if properties else None,
        "driver": _driver() if gpu else None,
        "cuda": torch.version.cuda,
        "cudnn": str(cudnn) if cudnn else None,
        "torch": torch.__version__,
        "compiler": _compiler(),
        "cuda-core": _version("cuda-core"),
        "tconv3d": tconv3d.__version__,
        "python": platform.python_version(),
        "commit": commit(Path(tconv3d.__file__).parents[1]),
        "measured": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def commit(root: Path) -> str | None:
    """Returns the commit of a git checkout, with "+" if tracked files differ from it, else TCONV3D_COMMIT or None."""
    said = os.environ.get("TCONV3D_COMMIT") or None
    if not (root / ".git").exists():
        return said
    try:
        git = ["git", "-C", str(root)]
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return said
    return head.strip() + ("+" if changes.strip() else "")


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0] if found else None


def _compiler() -> str | None:
    try:
        return compiler.version()
    except compiler.MissingCompilerError:
        return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def _plain(value: Any) -> Any:
    """Replaces tuples by lists, and NaN and infinity, which JSON lacks, by strings."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _with_nan(row: dict[str, Any], drop: str = "") -> dict[str, Any]:
    numbers = ("error", "torch_error", "difference")
    kept = {key: value for key, value in row.items() if key != drop}
    return {key: float(value) if key in numbers and value is not None else value for key, value in kept.items()}
