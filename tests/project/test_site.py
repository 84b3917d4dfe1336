"""The built docs site works without the internet."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from lane import ROOT

OTHER_HOST = re.compile(r"^(https?:)?//")


class Loads(HTMLParser):
    """Addresses of what a page loads, and classes of its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.classes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.classes.update((given.get("class") or "").split())
        names = {"link": "href", "a": ""}.get(tag, "src")
        if given.get("rel") not in ("canonical", "next", "prev"):
            self.addresses += [address for name, address in attrs if name == names and address]


@pytest.mark.once
def test_the_site_loads_nothing_from_another_host(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, timeout=600)
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text())
        assert any(address.endswith(".css") for address in loads.addresses)
        assert [address for address in loads.addresses if OTHER_HOST.match(address)] == [], page
        # The theme's script would load a library for these.
        assert "mermaid" not in loads.classes, page
    for style in tmp_path.rglob("*.css"):
        addresses = re.findall(r"(?:url\(|@import )[\"']?([^\"')]+)", style.read_text())
        assert [address for address in addresses if OTHER_HOST.match(address)] == [], style
