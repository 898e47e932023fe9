"""Winners of timed offers on disk: what they belong to, who decides when several are stored, and damaged entries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from layers import Layer
from problems import A100, H200, problem, problems

from tconv3d.planning import planner, winners
from tconv3d.planning.offers import Offer
from tconv3d.planning.problem import Device, Norm, Pass, Problem, channels_last_strides
from tconv3d.planning.winners import Timing, Winner
from tconv3d.runtime import cache

PACKAGE = Path(planner.__file__).parents[1]
LAYER = Layer(16, 24, (4, 5, 6), (3, 3, 3), (2, 2, 2), (1, 1, 1))
FORWARD = problem(LAYER, Pass.FORWARD)
VERSIONS = ("2.13", "13.0")
WINNER = Winner((("halo", (Pass.FORWARD,)),), (Timing("halo", 12.5), Timing("pytorch", 30.0)), "H200 for batch 2")


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TCONV3D_CACHE_DIR", str(tmp_path))
    yield tmp_path


def offers(which: Problem, device: Device = H200) -> list[Offer]:
    found = planner.answers({which.which: which}, device, pytorch=True)
    return [answer for answer in found if isinstance(answer, Offer)]


OFFERS = offers(FORWARD)


def key(
    asked: Problem, device: Device = H200, given: list[Offer] = OFFERS, versions: tuple[str, ...] = VERSIONS
) -> str:
    return winners.key({asked.which: asked}, device, given, versions)


def test_what_a_winner_belongs_to() -> None:
    last = channels_last_strides((LAYER.batch, LAYER.in_channels, *LAYER.size))
    other = problem(replace(LAYER, kernel=(3, 3, 2)), Pass.FORWARD)
    different = [
        key(FORWARD),
        key(other),
        key(replace(FORWARD, dtype="bfloat16")),
        key(replace(FORWARD, tf32=False)),
        key(replace(FORWARD, input=last)),
        key(replace(FORWARD, bias=True)),
        key(replace(FORWARD, aligned=False)),
        key(replace(FORWARD, relu=True)),
        key(replace(FORWARD, relu=True, norm=Norm(2, 1e-5))),
        key(replace(FORWARD, batch=200)),  # a volume of another kind
        key(FORWARD, A100),
        key(FORWARD, replace(H200, multiprocessors=66)),
        key(FORWARD, given=OFFERS[1:]),
        key(FORWARD, versions=("2.14", "13.0")),
        winners.key(problems(LAYER), H200, OFFERS, VERSIONS),
    ]
    assert len(set(different)) == len(different)
    same = [
        key(replace(FORWARD, input_size=(5, 5, 6))),
        key(replace(FORWARD, batch=3)),
        key(FORWARD, replace(H200, workspace_bytes=0)),
        key(FORWARD, given=OFFERS[::-1]),
    ]
    assert set(same) == {key(FORWARD)}


def test_other_sources_have_other_winners(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(FORWARD)
    monkeypatch.setattr(winners.sources, "program", lambda name: "another version")
    assert key(FORWARD) != before
    monkeypatch.undo()
    monkeypatch.setattr(winners, "_kernels", lambda: "other kernels")
    assert key(FORWARD) != before


def test_the_first_winner_stays_unless_it_is_replaced() -> None:
    entry = key(FORWARD)
    assert winners.find(entry) is None
    second = replace(WINNER, cover=(("pytorch", (Pass.FORWARD,)),))
    assert winners.keep_first(entry, WINNER) == WINNER == winners.keep_first(entry, second) == winners.find(entry)
    winners.replace_with(entry, second)
    assert winners.find(entry) == second
    assert str(second) == "measured on H200 for batch 2: halo 12.5 us, pytorch 30 us"


@pytest.mark.parametrize("text", [b"", b"[]", b"no JSON", b'{"cover": [], "timings": [], "where": ""}'])
def test_an_entry_that_describes_no_winner_is_replaced(text: bytes) -> None:
    entry = key(FORWARD)
    cache.put(entry, winners.SUFFIX, text)
    assert winners.find(entry) is None
    assert winners.keep_first(entry, WINNER) == WINNER == winners.find(entry)


def test_offers_of_a_winner() -> None:
    (halo,) = (offer for offer in OFFERS if offer.kernel == "halo")
    assert winners.cover_of(WINNER, OFFERS) == (halo,)
    assert winners.cover_of(WINNER, [offer for offer in OFFERS if offer is not halo]) is None
    assert winners.parts((halo,)) == WINNER.cover and winners.name_of((halo, halo)) == "halo + halo"


# Loads the module without the package's front door, which imports PyTorch and takes seconds.
STORE = f"""
import os, sys, time, types
package = types.ModuleType("tconv3d")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["tconv3d"] = package
from tconv3d.planning import winners
from tconv3d.planning.problem import Pass
mine, other, kernel = sys.argv[1:]
open(mine, "w").close()
while not os.path.exists(other):
    time.sleep(0.001)
for entry in range(50):
    winner = winners.Winner(((kernel, (Pass.FORWARD,)),), (winners.Timing(kernel, 1.0),), "here")
    print(winners.keep_first(f"{{entry:064x}}", winner).cover[0][0])
"""


def test_processes_that_store_at_once_end_with_the_same_winners(empty: Path) -> None:
    marks = [str(empty / name) for name in ("first", "second")]
    commands = [[sys.executable, "-c", STORE, *each] for each in ((*marks, "ours"), (*marks[::-1], "theirs"))]
    running = [subprocess.Popen(each, env=dict(os.environ), stdout=subprocess.PIPE, text=True) for each in commands]
    said = [process.communicate(timeout=100)[0].split() for process in running]
    assert len(said[0]) == 50 and said[0] == said[1] and set(said[0]) <= {"ours", "theirs"}
