"""The docs' generated tables are those of the code, and links from pages that mkdocs does not see lead somewhere."""

import ast
import re
from pathlib import Path

import pytest

from docs_build import kit_results
from docs_build.generate import PAGES, REGION, TABLES
from docs_build.hooks import site_links
from docs_build.refusals import refusals

ROOT = Path(__file__).parents[2]
REGIONS = [(page, found[2]) for page in PAGES for found in REGION.finditer((ROOT / page).read_text())]


def test_every_table_is_in_a_page() -> None:
    assert {name for _, name in REGIONS} == TABLES.keys()


@pytest.mark.parametrize(("page", "name"), REGIONS)
def test_table_is_up_to_date(page: str, name: str) -> None:
    """``python -m docs_build.generate`` writes it."""
    text = (ROOT / page).read_text()
    (region,) = [found[0] for found in REGION.finditer(text) if found[2] == name]
    assert region == f"<!-- generated: {name} -->\n{TABLES[name]()}<!-- end of {name} -->"


def test_recorded_promises_are_the_kits() -> None:
    """No result stays of a check that was renamed or left out."""
    promises = {
        (path.stem.removeprefix("test_").replace("_", " "), promise_of(each))
        for path in (ROOT / "model_runner_base" / "testing" / "checks").glob("test_*.py")
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")
    }
    for groups in kit_results.load().values():
        recorded = {(group, promise) for group, results in groups.items() for promise in results}
        assert recorded <= promises, recorded - promises


def promise_of(check: ast.FunctionDef) -> str:
    """Name of a check in the kit's table: the first line of its docstring, or its own name."""
    text = ast.get_docstring(check) or check.name.removeprefix("test_").replace("_", " ")
    return text.splitlines()[0].removesuffix(".")


def test_refusals_are_read_from_the_source() -> None:
    messages = [message for message, _ in refusals()]
    assert "encoder-cache transfer is not supported yet: leave out ec_transfer_config" in messages
    assert "speculative method <method> is not supported yet: use one of <speculative_methods>" in messages


def test_links_of_the_site() -> None:
    """A page keeps its place or gets another; a source file becomes text; a link to nothing is left to mkdocs."""
    assert site_links("[a](nki.md#x) [b](../dev.py) [c](../benchmarks/NOTEBOOK.md)", "gpu.md") == (
        "[a](nki.md#x) b [c](benchmarks/NOTEBOOK.md)"
    )
    assert site_links("[a](../docs/nki.md) [b](none.md)", "benchmarks/NOTEBOOK.md") == "[a](../nki.md) [b](none.md)"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)[^)]*\)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []
