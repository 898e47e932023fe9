"""Plain data comes back from JSON as it was, and what somebody planted in a cache runs nothing."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tconv3d.api import ahead
from tconv3d.api.explain import call_of, problems_of
from tconv3d.families.weight_grad import hopper as hopper_weight_grad_planner
from tconv3d.families.weight_grad import hopper_search
from tconv3d.families.weight_grad.hopper_tiling import Tiling
from tconv3d.planning import planner, repertoire
from tconv3d.planning.gpus import GPUS
from tconv3d.planning.launch import Constants
from tconv3d.planning.problem import Device, Norm, Pass
from tconv3d.runtime import background, cache, plain, sources
from tconv3d.tools.bench.layers import LAYERS

H200 = GPUS["H200"].device
PACKAGE = Path(plain.__file__).parents[1]
CONSTANTS: Constants = (
    ("kThreads", 128),
    ("kWide", False),
    ("Scalar", "float"),
    ("kNone", ()),
    ("kTap", (0, -1, 2**40)),
    ("kPhase", ((0, 1), (2, 3))),
)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (H200, Device),
        (Norm(4, 1e-5), Norm | None),
        (None, Norm | None),
        (Pass.INPUT_GRAD, Pass),
        (((("halo", CONSTANTS), ("direct", ())), "sm_90a"), tuple[ahead.Kernels, str]),
        ((1, 2, 3), tuple[int, int, int] | None),
    ],
)
def test_values_come_back(value: object, kind: Any) -> None:
    again = plain.loads(plain.dumps(value), kind)
    assert again == value and repr(again) == repr(value)


@pytest.mark.parametrize("name", ["large_volume", "relu_group_norm", "gan_64_1_32"])
def test_what_is_offered_comes_back(name: str) -> None:
    layer = LAYERS[name]
    module = next(
        each for each in layer.module(device="meta").modules() if isinstance(each, torch.nn.ConvTranspose3d)
    )
    work = tuple(problems_of(*call_of(module, layer.input(device="meta")))), H200
    again = plain.loads(plain.dumps(work), background.Work)
    assert again == work and repr(again) == repr(work), "the cache key of what is done is made from it"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1, 2]",
        "null",
        '{"name": "H200"}',
        '{"evil": 1}',
        '{"__reduce__": ["os.system", "true"]}',
        "[" * 9999,
    ],
)
def test_text_that_describes_something_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        plain.loads(text, Device)


@pytest.mark.parametrize(("text", "kind"), [("true", int), ("1", bool), ('"1"', int), ("[1]", tuple[int, int])])
def test_types_are_checked(text: str, kind: Any) -> None:
    with pytest.raises(ValueError):
        plain.loads(text, kind)


def test_what_is_no_plain_data_is_not_stored() -> None:
    with pytest.raises(TypeError, match="set is not plain data"):
        plain.dumps({1, 2})


# ---- choices in the disk cache


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TCONV3D_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / cache.LAYOUT


class Planted:
    """Loading a pickle of this leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


def test_a_planted_pickle_is_never_loaded(own_cache: Path, tmp_path: Path) -> None:
    def choose() -> tuple[int, int, int]:
        return repertoire.searched(
            "tconv3d.families.unfold.planner", "settings", tuple[int, int, int], lambda: (1, 2, 3)
        )

    assert choose() == (1, 2, 3)
    (file,) = own_cache.iterdir()
    cache.put(file.stem, file.suffix, pickle.dumps(Planted(tmp_path / "ran")))
    assert choose() == (1, 2, 3)
    assert not (tmp_path / "ran").exists()
    assert plain.loads(cache.get(file.stem, file.suffix, bytes), tuple[int, int, int]) == (1, 2, 3), (
        "and it is replaced"
    )


def test_no_module_of_the_package_unpickles() -> None:
    users = [path.name for path in PACKAGE.rglob("*.py") if "import pickle" in path.read_text()]
    assert users == []


def test_a_tiling_comes_back_from_the_cache(own_cache: Path) -> None:
    """The largest choice that is stored: it has choices of two types, and tuples of tuples, in it."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    found: list[Tiling | None] = []
    for _ in range(2):
        hopper_search.own_tiling.cache_clear()
        planner.forget()
        for name in ("nnunet_64_32_64", "monai_64_16_32"):
            layer = LAYERS[name]
            problems = problems_of(*call_of(layer.module(device="meta"), layer.input(device="meta")))  # type: ignore[arg-type]
            (problem,) = (each for each in problems if each.which is Pass.WEIGHT_GRAD)
            of = hopper_weight_grad_planner.layer_of(problem)
            found.append(hopper_search.own_tiling(of, H200, problem.batch, problem.input_size))
    assert found[:2] == found[2:] and all(isinstance(each, Tiling) for each in found)
    assert {file.suffix for file in own_cache.iterdir()} == {".json"}


def test_a_choice_is_kept_for_its_planner(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another planner's change leaves it; its own makes it anew."""
    searches: list[str] = []
    version = {"a": "1", "b": "1"}
    monkeypatch.setattr(sources, "program", lambda name: name + version[name])

    def choose(name: str) -> None:
        repertoire.searched(name, "settings", int, lambda: len(searches.append(name) or searches))

    for change in ("", "b", "a"):
        if change:
            version[change] += "1"
        choose("a"), choose("b")
    assert searches == ["a", "b", "b", "a"]
