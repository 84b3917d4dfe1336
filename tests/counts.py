"""Share of random cases that the tests draw: a part by default, everything for ``dev.py test --full``."""

import os

IS_FULL = os.environ.get("TESTS_ARE_FULL") == "1"


def examples(count: int) -> int:
    """hypothesis' ``max_examples``: a quarter of a full run's ``count``, of which there are 20 at least."""
    return count if IS_FULL else min(count, max(20, count // 4))
