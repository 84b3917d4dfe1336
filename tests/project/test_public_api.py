"""Names that docs/public_api.md promises to vendors, on each tested release of vLLM."""

import re

from docs_build.public_names import PAGE, public_names, signatures


def test_public_names_exist() -> None:
    """A name that is gone raises AttributeError with the name."""
    names = [each.name for each in public_names()]
    assert len(names) > 60 and len(set(names)) == len(names)
    assert {"ModelRunnerBase.load_model", "PagedPlatform.default_block_size", "errors.RequestError"} <= set(names)


def test_stable_names_have_the_signatures_of_the_page() -> None:
    """A change of one needs a line in the changelog, then ``python -m docs_build.generate``."""
    rows = re.findall(r"^\| `([\w.]+)` \| `(\(.*?\))` \|$", PAGE.read_text(), re.MULTILINE)
    assert dict(rows) == signatures() and len(rows) > 40


def test_names_of_the_first_level_are_on_the_page() -> None:
    import model_runner_base

    owners = {each.name.partition(".")[0] for each in public_names()}
    assert set(model_runner_base.__all__) <= owners
