"""Share of random cases that the tests draw: a part by default, everything for ``dev.py test --full``."""

import os

IS_FULL = os.environ.get("TESTS_ARE_FULL") == "1"


def examples(count: int) -> int:
    """Number of examples for hypothesis: a quarter of a full run's ``count``, and at least 20."""
    return count if IS_FULL else min(count, max(20, count // 4))
