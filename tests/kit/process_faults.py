"""Deliberate faults of foreign devices that show where an engine has several processes: stages, replicas."""

from device_fault import DeviceFault, variant

LATE_STATES = """
late = {}
def begin_to_host_from_graph(self, tensor):
    read, shape = super().begin_to_host_from_graph(tensor), tuple(tensor.shape)
    def read_late():
        states = read().copy()
        given, self.late[shape] = self.late.get(shape, states), states
        return given
    return read_late
"""

OTHER_SIZE = """
def _cache_device_properties(self):
    super()._cache_device_properties()
    if self.vllm_config.parallel_config.rank:
        self.graph_policy = Policy()
"""

LARGEST_SIZES = """
def configure(self, limits):
    super().configure(limits)
    self.set_sizes(limits.largest_sizes)
"""

OTHER_ROWS = """
from model_runner_base.heads import pipeline_stages
class Received(pipeline_stages.ReceivedTokens):
    def record(self, rows, positions, tokens):
        own = rows < len(rows)
        tokens = tokens.copy()
        tokens[own] = np.roll(tokens[own], 1)
        super().record(rows, positions, tokens)
pipeline_stages.ReceivedTokens = Received
"""

STEPS_TOGETHER = """
num_steps = 0
def execute_model(self, scheduler_output, intermediate_tensors=None):
    replica = self.vllm_config.parallel_config.data_parallel_rank_local
    self.num_steps += 1
    Path(__file__).with_name(f"step-{replica}-{self.num_steps}").touch()
    while not Path(__file__).with_name(f"step-{1 - replica}-{self.num_steps}").exists():
        time.sleep(0.01)
    return super().execute_model(scheduler_output)
"""

FAULTS = [
    DeviceFault(
        "a stage hands on the hidden states of the step before",
        18,
        variant(ops=LATE_STATES),
        "test_stages and test_greedy_tokens and asynchronous",
        r"two stages, a request alone, .*output \d+ is \d+, not \d+",
        options=("--stages", "2"),
        is_later=True,
    ),
    DeviceFault(
        "the last stage pads its steps to another size",
        18,
        variant(runner=OTHER_SIZE, policy=LARGEST_SIZES),
        "test_stages and test_greedy_tokens and asynchronous",
        r"StageError: stages 0 and 1 of the pipeline are at different steps: .*, \d+ and \d+ tokens",
        options=("--stages", "2"),
        is_later=True,
    ),
    DeviceFault(
        "tokens come home to another request's row",
        18,
        variant(top=OTHER_ROWS),
        "test_stages and test_greedy_tokens and asynchronous",
        r"two stages, requests at once, .*output \d+ is \d+, not \d+",
        options=("--stages", "2"),
        is_later=True,
    ),
    DeviceFault(
        "an idle replica does not join a step that waits for all replicas",
        18,
        variant(runner=STEPS_TOGETHER, top="import time\nfrom pathlib import Path"),
        "test_replicas and test_greedy_tokens",
        r"replica 0 alone, .*: no answer within 60 s; .*is in execute_model \(faulty_device\.py:\d+\)",
        options=("--replicas", "2"),
        is_later=True,
    ),
]
"""Faults of pipeline stages first, then of replicas. The newest lane runs them, whose servers start sooner."""
