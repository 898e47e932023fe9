"""Names the directories of the checkout, and the module path for processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PYTHONPATH = os.pathsep.join(map(str, (ROOT, TESTS, TESTS / "helpers")))
