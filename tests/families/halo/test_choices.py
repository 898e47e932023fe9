"""What Python and the kernel must agree on: the choices of a build, and what the disk cache keeps of them."""

from __future__ import annotations

import re
from dataclasses import fields
from enum import IntEnum
from uuid import uuid4

import pytest
from halo_cases import SETTINGS, Tensors, build_for

from tconv3d.families.halo import planner
from tconv3d.families.halo.build import Build, Division, Input, Output, Weights
from tconv3d.families.halo.job import job_of
from tconv3d.runtime import plain, sources


@pytest.mark.parametrize("choice", [Input, Output, Division, Weights])
def test_the_kernel_has_the_same_names_and_numbers(choice: type[IntEnum]) -> None:
    header = sources.find("halo_choices.cuh")
    assert header is not None
    body = re.search(rf"struct {choice.__name__} \{{(.*?)\n\}};", header.read_text(), re.DOTALL)
    assert body is not None
    found = {name: int(value) for name, value in re.findall(r"constexpr int k(\w+) = (\d+);", body.group(1))}
    assert found == {each.name.title().replace("_", ""): each.value for each in choice}


def test_a_build_has_at_most_twelve_fields() -> None:
    assert len(fields(Build)) <= 12


@pytest.mark.parametrize("name", ["march", "copied", "small panels", "divided", "channels last, groups as one"])
def test_a_build_is_the_same_after_it_was_stored(name: str) -> None:
    build = build_for(SETTINGS[name])
    stored = plain.loads(plain.dumps(build), Build)
    assert stored == build and hash(stored) == hash(build) and str(stored) == str(build)


def test_other_constants_of_the_model_need_other_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(Tensors(SETTINGS["march"]).problem)
    searched = []
    monkeypatch.setattr(planner, "_search", lambda *settings: searched.append(settings))
    monkeypatch.setattr(planner, "VERSION", f"constants of {uuid4()}")
    for _ in range(2):
        planner.forget()
        assert planner._choice(job, 232448, 132) is None
    planner.forget()
    assert len(searched) == 1, "once, and then read from the disk cache"


def test_fields_of_tile_and_block_are_replaced_by_name() -> None:
    build = build_for(SETTINGS["march"])
    other = build.but(slabs=build.tile.slabs + 1, stages=7, weights=Weights.STREAMED, slots=3)
    assert (other.tile.slabs, other.block.stages, other.block.slots) == (build.tile.slabs + 1, 7, 3)
    assert other.weights is Weights.STREAMED and other.tile.outputs == build.tile.outputs
    assert other.but(slabs=build.tile.slabs, block=build.block, weights=build.weights) == build
    with pytest.raises(TypeError):
        build.but(no_such_field=1)
