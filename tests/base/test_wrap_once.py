"""Wrappers of vLLM's methods: each wraps once, and none stands in another's way."""

from collections.abc import Callable

from model_runner_base.vllm_compat.patches.wrap_once import wrap_once


class Engine:
    """Stand-in for a class of vLLM."""

    def add(self, number: int) -> int:
        return number


def doubled(method: Callable[..., int]) -> Callable[..., int]:
    return lambda self, number: 2 * method(self, number)


def increased(method: Callable[..., int]) -> Callable[..., int]:
    return lambda self, number: 1 + method(self, number)


def test_two_wrappers_of_one_method_both_run_once() -> None:
    for _ in range(2):
        wrap_once(Engine, "add", doubled)
        wrap_once(Engine, "add", increased)
        wrap_once(Engine, "of_a_later_release", doubled)
    assert Engine().add(5) == 11
    assert not hasattr(Engine, "of_a_later_release")
