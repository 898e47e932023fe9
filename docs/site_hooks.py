"""Adapts the documents to the site: `mkdocs.yml` names this file as a hook.

The documents are written to be read in the repository. README.md becomes the site's first page, and the documents
beside it become pages too. A link to a file that is no page (a source, a results file) becomes the file's name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# Documents of the repository's root, and the pages that they become.
PAGES = {"README.md": "index.md"} | {name: name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    for name, page in PAGES.items():
        text = relinked((ROOT / name).read_text(encoding="utf-8"), "")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    name = page.file.src_uri
    return markdown if name in PAGES.values() else relinked(markdown, f"docs/{name}")


def relinked(markdown: str, document: str) -> str:
    """The text with links as they are on the site. `document` is its path in the repository."""
    folder = posixpath.dirname(document)
    here = posixpath.relpath(folder, "docs") if folder else "."

    def replace(found: re.Match[str]) -> str:
        image, text, path, anchor = found[1], found[2], found[3], found[4] or ""
        if not path or "://" in path:
            return found[0]
        target = posixpath.normpath(posixpath.join(folder, path))
        page = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if page is None:
            return f"`{target}`" if text == target else f"{text} (`{target}`)"
        return f"{image}[{text}]({posixpath.relpath(page, here)}{anchor})"

    return LINK.sub(replace, markdown)
