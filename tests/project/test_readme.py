"""README and docs are short, and README's numbers are those of the lists that it speaks of."""

import re
from pathlib import Path

import pytest

from docs_build.generate import REGION

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


@pytest.mark.once
def test_is_short() -> None:
    assert len(TEXT.split()) <= 900


@pytest.mark.once
def test_docs_are_short() -> None:
    """Words that are written by hand, without tables that the code knows."""
    pages = [page for page in ROOT.glob("docs/**/*.md") if page.parent.name != "tables"]
    assert sum(len(REGION.sub("", page.read_text()).split()) for page in pages) <= 22_000


@pytest.mark.once
def test_number_of_planted_faults() -> None:
    rows = re.findall(r"^\| .+ \|$", (ROOT / "docs" / "tables" / "faults.md").read_text(), re.MULTILINE)
    in_base = sum(re.search(r"`\w[\w/]*\.py`", row) is not None for row in rows)
    num_headers = 2
    assert f"{in_base} were planted in the base and {len(rows) - num_headers - in_base} in foreign devices" in " ".join(
        TEXT.split()
    )


@pytest.mark.once
def test_lines_of_the_examples() -> None:
    plain = len((ROOT / "examples" / "plain_device.py").read_text().splitlines())
    package = (ROOT / "examples" / "acme_device" / "acme_device").glob("*.py")
    acme = sum(len(path.read_text().splitlines()) for path in package)
    assert f"[{plain}](examples/plain_device.py); [{acme}](examples/acme_device/acme_device)" in TEXT
