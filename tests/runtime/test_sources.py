"""Cache keys cover the files that a result is made from, and no others."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from tconv3d.runtime import sources


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    """A copy of the package's headers that a test may change."""
    for path in sources.all_headers().values():
        shutil.copy(path, tmp_path)
    return tmp_path


def test_a_change_is_seen_that_the_file_systems_clock_does_not_show(tmp_path: Path) -> None:
    header = tmp_path / "a.cuh"
    digests = []
    for text in ("int a;", "int b;"):
        header.write_text(text)
        now = time.time_ns()
        os.utime(header, ns=(now // 10**9 * 10**9,) * 2)
        digests.append(sources.digest(sources.headers("a", (tmp_path,))))
    assert digests[0] != digests[1]


def edit(path: Path) -> None:
    path.write_text(path.read_text() + "// edited\n")


def digests(directory: Path) -> dict[str, str]:
    """Reads every header as if it were a kernel."""
    names = sorted(sources.all_headers((directory,)))
    return {name: sources.digest(sources.included(name, (directory,))) for name in names}


def test_names_of_headers_are_unique() -> None:
    found = Counter(path.name for directory in sources.KERNELS for path in directory.glob("*.cuh"))
    assert found and max(found.values()) == 1


@pytest.mark.parametrize("name", ["turn.cuh", "halo_words.cuh", "ring.cuh", "common.cuh"])
def test_editing_a_header_changes_the_keys_of_those_that_include_it_and_no_others(headers: Path, name: str) -> None:
    users = {each for each in digests(headers) if name in sources.included(each, (headers,))}
    before = digests(headers)
    edit(headers / name)
    after = digests(headers)
    assert {each for each in before if before[each] != after[each]} == users
    assert name in users and (len(users) < len(before))


def test_editing_turn_leaves_the_halo_kernel_alone(headers: Path) -> None:
    assert "turn.cuh" not in sources.headers("halo") and "halo_words.cuh" in sources.headers("halo")
    before = sources.digest(sources.headers("halo", (headers,)))
    edit(headers / "turn.cuh")
    assert sources.digest(sources.headers("halo", (headers,))) == before


def test_what_is_included_is_what_the_compiler_would_include(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text('#pragma once\n  #  include "b.cuh"\n#include <cstdint>\n// #include "d.cuh"\n')
    (tmp_path / "b.cuh").write_text('#include "c.cuh"  // why\n#include "missing.h"\n#include "a.cuh"\n')
    for name in ("c.cuh", "d.cuh"):
        (tmp_path / name).write_text("int x;\n")
    assert sorted(sources.headers("a", (tmp_path,))) == ["a.cuh", "b.cuh", "c.cuh"]
    assert sources.headers("no such kernel", (tmp_path,)) == {}


def test_a_header_that_moves_to_another_directory_changes_no_key(headers: Path, tmp_path: Path) -> None:
    before = sources.digest(sources.headers("halo", (headers,)))
    families = [tmp_path / "halo", tmp_path / "device"]
    for directory in families:
        directory.mkdir()
    for path in list(headers.glob("*.cuh")):
        path.rename(families[not path.name.startswith("halo")] / path.name)
    assert sources.digest(sources.headers("halo", families)) == before
    found = sources.find("ptx.cuh", families)
    assert found is not None and found.parent == families[1]


def test_a_new_header_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text('#include "b.cuh"\n')
    before = sources.digest(sources.headers("a", (tmp_path,)))
    (tmp_path / "b.cuh").write_text("int b;\n")
    assert sources.digest(sources.headers("a", (tmp_path,))) != before


# ---- modules


def test_modules_of_a_planner() -> None:
    found = set(sources.modules("tconv3d.families.halo.planner"))
    assert {
        "tconv3d.families.halo.planner",
        "tconv3d.families.halo.build",
        "tconv3d.planning.geometry",
        "tconv3d.planning.side",
    } <= found
    assert (
        not {
            "tconv3d.runtime.cache",
            "tconv3d.runtime.sources",
            "tconv3d.families.unfold.planner",
            "tconv3d.torch_ops.executor",
        }
        & found
    )
    assert "tconv3d.families.unfold.planner" in sources.modules("tconv3d.planning.planner")


PACKAGE = {
    "planning/__init__.py": "",
    "planning/geometry.py": "import math\n",
    "planning/costs.py": "from .geometry import (\n    Axis,  # one of three (d, h, w\n    Geometry,\n)\n",
    "families/halo/__init__.py": "",
    "families/halo/planner.py": "def plan():\n    from ...planning import costs as c\nfrom . import build\n",
    "families/halo/build.py": "import tconv3d.shared, os\n",
    "families/up/planner.py": "from ..halo import planner\n",
    "shared.py": "from .runtime import cache\n",
    "runtime/cache.py": "",
    "__init__.py": "from . import families\n",
}


def test_imports_are_followed_through_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sources, "_ROOT", tmp_path)
    found = sorted(sources.modules("tconv3d.families.halo.planner"))
    needed = ["families.halo", "families.halo.build", "families.halo.planner", "planning", "planning.costs"]
    assert found == [f"tconv3d.{name}" for name in (*needed, "planning.geometry", "shared")]
    before = sources.digest(sources.modules("tconv3d.families.halo.planner"))
    edit(tmp_path / "families/up/planner.py")
    edit(tmp_path / "runtime/cache.py")
    assert sources.digest(sources.modules("tconv3d.families.halo.planner")) == before
    edit(tmp_path / "planning/geometry.py")
    assert sources.digest(sources.modules("tconv3d.families.halo.planner")) != before
