"""Where the checkout is, and the paths on which processes that tests start find the package and these helpers."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PYTHONPATH = os.pathsep.join(map(str, (ROOT, TESTS, TESTS / "helpers")))
