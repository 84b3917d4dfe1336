"""Hooks of mkdocs: pages that lie outside docs/, and links between them.

In the repository every link is a path to a file, so that it works wherever Markdown is shown. The site has some of
these files at other places, and source files not at all. A link to a page is rewritten to its place on the site, a link
to any other file of the repository becomes its text. A link to no file is left, and mkdocs reports it.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/NOTEBOOK.md", "benchmarks/gpu_hardware.md")
"""Pages outside docs/, which keep their path on the site."""
LINK = re.compile(r"(!?)\[([^\]\[]*)\]\(([^()\s#]+)(#[^()\s]*)?\)")
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of ``OUTSIDE``."""
    for path in OUTSIDE:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrites links, outside of blocks of code."""
    source = page.file.src_uri
    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else site_links(part, source) for part in parts)


def site_links(markdown: str, page: str) -> str:
    """``markdown`` of the page at ``page`` on the site, with the site's links."""
    folder = (ROOT / page if page in OUTSIDE else ROOT / "docs" / page).parent

    def rewrite(match: re.Match[str]) -> str:
        bang, text, target, anchor = match.groups()
        path = Path(os.path.normpath(folder / target))
        if "://" in target or not path.exists() or not path.is_relative_to(ROOT):
            return match.group(0)
        place = site_path(path.relative_to(ROOT).as_posix())
        if place is None:
            return text
        relative = os.path.relpath(place, PurePosixPath(page).parent)
        return f"{bang}[{text}]({relative}{anchor or ''})"

    return LINK.sub(rewrite, markdown)


def site_path(path: str) -> str | None:
    """Place on the site of a file of the repository; None if it has none."""
    if path in OUTSIDE:
        return path
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else None
