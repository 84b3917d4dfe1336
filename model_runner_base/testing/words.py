"""Numbers and lists of tokens in messages."""

from collections.abc import Sequence

SHOWN = 12
"""Number of tokens up to which a list is shown as a whole."""


def counted(count: int, noun: str) -> str:
    """A number of things, such as "1 token" or "3 tokens"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def show(tokens: Sequence[int]) -> str:
    """Tokens as text: all of a short list, the ends of a long one."""
    if len(tokens) <= SHOWN:
        return str(list(tokens))
    first, last = (", ".join(map(str, part)) for part in (tokens[:3], tokens[-2:]))
    return f"[{first}, ... {last}] ({len(tokens)} tokens)"
