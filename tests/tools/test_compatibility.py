"""The table of PyTorch's features: every test that it names exists."""

from __future__ import annotations

import ast
import functools
import re

from places import ROOT

TEXT = (ROOT / "docs" / "compatibility.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith(("| feature ", "| --- "))
]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@functools.cache
def functions_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_named_test_exists() -> None:
    named = NAMED.findall(TEXT)
    missing = [
        f"{path}::{name}" for path, name in named if not (ROOT / path).exists() or name not in functions_in(path)
    ]
    assert not missing and len(named) > 40


def test_every_feature_names_its_test() -> None:
    for row in ROWS:
        assert len(row) == 3, row
        if row[0].startswith("**"):  # the heading of several features
            assert row[1:] == ["", ""]
        else:
            assert row[1] and re.fullmatch(rf"{NAMED.pattern}(, {NAMED.pattern})*", row[2]), row


def test_the_features_that_readers_ask_for_are_there() -> None:
    features = " ".join(row[0] for row in ROWS)
    for name in ("autocast", "GradScaler", "checkpoint", "FSDP2", "compile", "export", "Lightning", "MetaTensor",
                 "pruning", "parametrizations", "vmap", "jacrev", "is_grads_batched", "forward_ad", "symbolic_trace",
                 "jit.script", "onnx", "quantization", "FlopCounterMode", "with_flops", "AOTInductor", "precompile",
                 "DistributedDataParallel", "any order"):  # fmt: skip
        assert name in features, name
