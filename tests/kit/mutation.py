"""A deliberate fault, and the checks that most of them are caught by."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    """Path under model_runner_base."""
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    selection: str
    """Pytest's -k expression for the checks that should catch it."""
    device: str = "examples.plain_device"
    """Module of ``devices.MODULES``: a variant of the example device, where the example itself lacks what the fault
    is in."""
    is_later: bool = False
    """Whether only a later release of vLLM has the feature: then the lane with the newest one runs it, alone."""


STEPS = "test_random_schedules and llama"
WINDOW = "test_random_schedules and window"
CHUNKS = "test_random_schedules and chunks"
REPEAT = "test_repeated_step_is_interrupted"
