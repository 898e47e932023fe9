"""The documentation site: every document is a page, and every public name is in the API reference.

`make docs`, which is a part of `make test`, builds the site and fails on any warning.
"""

from __future__ import annotations

import re

from places import ROOT

import tconv3d

SITE = (ROOT / "mkdocs.yml").read_text()


def test_every_document_is_a_page() -> None:
    pages = set(re.findall(r"^ +- .+: (\S+\.md)$", SITE, re.MULTILINE))
    documents = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    beside = {path.name for path in ROOT.glob("*.md")} - {"README.md"}
    assert pages == documents | beside | {"index.md"}


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    assert set(re.findall(r"^::: tconv3d\.(\w+)$", text, re.MULTILINE)) == set(tconv3d.__all__)


def test_the_site_is_built_by_make_test() -> None:
    rules = dict(re.findall(r"^(\w+): (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert "docs" in rules["test"].split()
    assert "mkdocs build --strict)" in (ROOT / "Makefile").read_text(), "with --quiet, warnings do not fail the build"


def test_hooks_of_a_commit_run_the_tools_of_make_check() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    entries = re.findall(r"^ +entry: \.venv/bin/(.*?)(?: --force-exclude)?$", hooks, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    rule = makefile[makefile.index("check: $(READY)") : makefile.index("docs: $(READY)")]
    for entry in entries:
        assert entry.removeprefix("python ") in rule, f"make check does not run {entry}"
    assert len(entries) == rule.count("$(call if_present") == 5
    assert "repo: local" in hooks and "://" not in hooks
