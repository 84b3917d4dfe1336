"""Profiles of a run: which checks, and how many random cases of each."""

from typing import NamedTuple

import pytest

from model_runner_base.testing.order import group_of


class Profile(NamedTuple):
    """Values of the options that are not given, and the checks that are left out."""

    schedules: int = 15
    draws: int = 2000
    all_architectures: bool = False
    has_first_cases_only: bool = False
    """Whether a check runs with the first of its cases alone."""
    without: tuple[str, ...] = ()
    """Groups that are left out."""


PROFILES = {
    "smoke": Profile(schedules=3, draws=400, has_first_cases_only=True, without=("soak",)),
    "default": Profile(),
    "full": Profile(schedules=60, draws=8000, all_architectures=True),
}


def profile_of(config: pytest.Config) -> Profile:
    return PROFILES[config.getoption("kit_profile")]


def apply_profile(config: pytest.Config) -> None:
    """Gives options that are not on the command line the values of the profile."""
    profile = profile_of(config)
    for name in ("schedules", "draws"):
        if config.getoption(name) is None:
            setattr(config.option, name, getattr(profile, name))
    config.option.all_architectures |= profile.all_architectures


def leave_out(profile: Profile, items: list[pytest.Item]) -> list[pytest.Item]:
    """Takes the checks that a profile leaves out off the list, and returns them."""
    selected: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    seen = set()
    for item in items:
        group, check = group_of(item), (item.path, getattr(item, "originalname", None) or item.name)
        is_further_case = profile.has_first_cases_only and check in seen
        seen.add(check)
        is_left_out = group is not None and (is_further_case or group in profile.without)
        (left_out if is_left_out else selected).append(item)
    items[:] = selected
    return left_out
