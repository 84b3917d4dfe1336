"""Deliberate faults of foreign devices that show in what an engine does with requests."""

from textwrap import indent

from device_fault import DeviceFault, variant


def with_worker(body: str, **parts: str) -> str:
    """Text of a variant whose worker has methods of its own."""
    return variant(**parts) + indent(body, "    ")


def with_masks(body: str) -> str:
    """A device whose bitmasks of grammars are its own class."""
    masks = "from model_runner_base.heads import generate\nclass Masks(generate.TokenMasks):\n"
    return variant(top=masks + indent(body, "    ") + "\ngenerate.TokenMasks = Masks")


def with_scheduler(body: str) -> str:
    """A device whose platform names a scheduler of its own; ``body`` changes ``scheduler``."""
    make = f"""
from model_runner_base.scheduling import make_scheduler
def make(*args, **kwargs):
    scheduler = make_scheduler(*args, **kwargs)
{indent(body, "    ")}
    return scheduler
vars(make).update(vars(make_scheduler))
"""
    return variant(platform='scheduler_cls = "faulty_device.make"\n') + make


ANSWERS_TWICE = """
resumed = frozenset()
def _update_states(self, schedule):
    known = self.parts.requests.infos
    self.resumed = self.resumed | {arrival.req_id for arrival in schedule.arrivals if arrival.req_id in known}
    return super()._update_states(schedule)
def make_output(self, batch, results):
    made, resumed = super().make_output(batch, results), self.resumed
    self.resumed, read = frozenset(), made.get_output
    def of_prefill_and_decode():
        output = read()
        for tokens, req_id in zip(output.sampled_token_ids, output.req_ids):
            tokens += tokens if req_id in resumed else []
        return output
    made.get_output = of_prefill_and_decode
    return made
"""

PREEMPTS_AGAIN = """
import time
schedule, seen = scheduler.schedule, set()
def again(*args):
    for request in [request for request in scheduler.running if request.num_preemptions and request not in seen]:
        seen.add(request)
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    return schedule(*args)
scheduler.schedule = again
"""

COUNTS_WHAT_THE_HOST_HAS_READ = """
from model_runner_base.heads import generate
class Penalties(generate.Penalties):
    is_async = False
    def apply(self, forward, asking, logits):
        if self.is_async:
            self._lacks_last_step[forward.batch.rows[asking]] = 0
        return super().apply(forward, asking, logits)
generate.Penalties = Penalties
"""

READS_STATES_BESIDE_NO_DRAFTS = """
from model_runner_base.caches.states import StateCaches
rows_of = StateCaches._rows
def without_drafts(self, call, rows):
    first, *others = rows_of(self, call, rows)
    if not rows.is_token[:, 1:].any():
        first = first._replace(sources=first.states)
    return (first, *others)
StateCaches._rows = without_drafts
"""

READS_THE_NEXT_BLOCKS_STATE = """
import numpy as np
from model_runner_base.caches import states
from model_runner_base.step.packing import pad_into
fill = states.StateCaches.fill
def filled(self, batch, size, views):
    fill(self, batch, size, views)
    if states.SOURCES in views:
        first, counts = batch.num_decodes, batch.num_computed[batch.num_decodes:]
        blocks = states.block_at(self._table, batch.rows[first:], counts)
        num_tiles = -(-batch.query_len[first:] // self._limits.chunk.query)
        places = states.place_of(blocks, counts, self._num_places)
        pad_into(views[states.SOURCES], np.repeat(places, num_tiles), 0)
states.StateCaches.fill = filled
"""

FAULTS = [
    DeviceFault(
        "a worker's method has the parameters of an older release",
        1,
        with_worker("def load_model(self):\n    super().load_model()\n"),
        "test_interfaces",
        r"PlainWorker\.load_model .*load_dummy_weights",
        on_both_releases=True,
    ),
    DeviceFault(
        "a function imports a name that vLLM has moved",
        1,
        variant(runner="def graph_captured(self):\n    from vllm.attention.selector import gone_from_here\n"),
        "test_interfaces",
        r"not in this release: .*faulty_device\.py:\d+: vllm\.attention\.selector\.gone_from_here",
        on_both_releases=True,
    ),
    DeviceFault(
        "a step in which no row has drafts reads states where it writes them",
        2,
        variant(top=READS_STATES_BESIDE_NO_DRAFTS),
        "test_steps_without_drafts and qwen3",
        r"qwen3-next, prompt of \d+ tokens?",
    ),
    DeviceFault(
        "a prefix that ends with a block is continued from the next block's state",
        3,
        variant(top=READS_THE_NEXT_BLOCKS_STATE),
        "test_prefix_hits_around_blocks and qwen3",
        r"qwen3-next, prompt of \d+ tokens?",
    ),
    DeviceFault(
        "tokens after the end of reasoning count, though no grammar masked them",
        4,
        with_masks(
            "def apply_grammar(self, forward, logits, grammar):\n"
            "    logits, _ = super().apply_grammar(forward, logits, grammar)\n"
            "    return logits, forward.sample_slots\n"
        ),
        "test_grammar_after_reasoning and known",
        r"StructuredOutputsParams\(.*output \d+ is \d+, ",
    ),
    # Here the scheduler masks what follows the end among drafts, so that no place after it is left free.
    DeviceFault(
        "whether a request still reasons is asked for the first of its places alone",
        4,
        with_masks(
            "def apply_grammar(self, forward, logits, grammar):\n"
            "    if grammar is not None:\n"
            "        masks = grammar.bitmask.reshape(len(grammar.req_ids), -1, grammar.bitmask.shape[1]).copy()\n"
            "        masks[(masks[:, 0] == -1).all(axis=1)] = -1\n"
            "        grammar = grammar._replace(bitmask=masks.reshape(grammar.bitmask.shape))\n"
            "    logits, _ = super().apply_grammar(forward, logits, grammar)\n"
            "    return logits, forward.sample_slots\n"
        ),
        "test_grammar_after_reasoning and known",
        r"StructuredOutputsParams\(.*output \d+ is \d+, not \d+; step \d+, ",
        is_later=True,
    ),
    DeviceFault(
        "a request that resumes is answered as a prompt and once more as a decode",
        5,
        variant(runner=ANSWERS_TWICE),
        "test_preemption_at_every_step and asynchronous",
        r"preempted after step \d, prompt of \d+ tokens?.*: output \d+ is \d+, not \d+; step \d+, ",
        on_both_releases=True,
    ),
    DeviceFault(
        "a request that resumes is preempted again",
        6,
        with_scheduler(PREEMPTS_AGAIN),
        "test_preemption_at_every_step and asynchronous and second",
        r"preempted after step \d: \d+ preemptions, and \d+ were asked for",
        on_both_releases=True,
    ),
    DeviceFault(
        "penalties under asynchronous scheduling count what the host has read",
        7,
        variant(
            top=COUNTS_WHAT_THE_HOST_HAS_READ,
            runner="def initialize_kv_cache(self, config):\n"
            "    Penalties.is_async = self.scheduler_config.async_scheduling\n"
            "    super().initialize_kv_cache(config)\n",
        ),
        "test_strong_penalties",
        r"presence_penalty=2.0, frequency_penalty=2.0.*output \d+ is \d+, not \d+; step \d+, ",
    ),
    DeviceFault(
        "the bitmask's rows go to the first rows of the batch",
        14,
        with_masks(
            "def apply_grammar(self, forward, logits, grammar):\n"
            "    masks = {} if grammar is None else dict(enumerate(grammar.bitmask))\n"
            "    return self.apply(logits, masks), forward.sample_slots\n"
        ),
        "test_beside_plain_and_finished_rows and xgrammar",
        r"output \d+ is \d+, not \d+",
    ),
    DeviceFault(
        "a batch of greedy requests skips the rules",
        15,
        variant(
            runner="def _prepare_sampling(self, batch):\n"
            "    plan = super()._prepare_sampling(batch)\n"
            "    plan.stages = plan.stages if plan.mode else []\n"
            "    return plan\n"
        ),
        "test_each_parameter_at_temperature_0",
        r"\[presence_penalty\]",
    ),
    DeviceFault(
        "encoder outputs of a request that resumes are given up",
        19,
        variant(
            runner="def _update_states(self, schedule):\n"
            "    infos = self.parts.requests.infos\n"
            "    for arrival in schedule.arrivals:\n"
            "        if arrival.req_id in infos:\n"
            "            self.encoder.give_up(item.identifier for item in infos[arrival.req_id].items)\n"
            "    return super()._update_states(schedule)\n"
        ),
        "test_preemption_within_images and qwen3",
        r"KeyError|preempted after step \d",
    ),
    DeviceFault(
        "an adapter is known by its name",
        20,
        with_worker(
            "names = frozenset()\n"
            "def add_lora(self, lora_request):\n"
            "    if lora_request.lora_name in self.names:\n"
            "        return False\n"
            "    self.names = self.names | {lora_request.lora_name}\n"
            "    return super().add_lora(lora_request)\n",
            runner="named = {}\n"
            "def _update_states(self, schedule):\n"
            "    for arrival in schedule.arrivals:\n"
            "        if arrival.adapter is not None:\n"
            "            arrival.adapter = self.named.setdefault(arrival.adapter.lora_name, arrival.adapter)\n"
            "    return super()._update_states(schedule)\n",
        ),
        "test_new_files_under_an_old_name",
        r"llama\S* with new files of .*output \d+ is \d+, not \d+.*; step \d+, ",
    ),
    DeviceFault(
        "a draft model does not come back from sleep",
        20,
        variant(
            ops="def sleep(self, tag, kept, dropped):\n"
            "    is_lost = lambda each: dropped and isinstance(each, torch.nn.Parameter)\n"
            "    lost = [each for each in kept if is_lost(each)]\n"
            "    super().sleep(tag, [each for each in kept if not is_lost(each)], [*dropped, *lost])\n"
        ),
        "test_sleep",
        r"\[2-with drafts\] \d+ drafts were accepted after sleep at level 2, \d+ before",
    ),
    DeviceFault(
        "weights that sleep at level 1 come back as zeros",
        20,
        variant(ops="def sleep(self, tag, kept, dropped):\n    super().sleep(tag, [], [*kept, *dropped])\n"),
        "test_sleep and alone and 1",
        r"prompt of \d+ tokens?, .*: output 0 is \d+, not \d+",
    ),
    DeviceFault(
        "weights that sleep at level 1 are rounded to 16 bits",
        20,
        variant(
            ops="def sleep(self, tag, kept, dropped):\n"
            "    for tensor in kept:\n"
            "        if tensor.is_floating_point():\n"
            "            tensor.copy_(tensor.half())\n"
            "    super().sleep(tag, kept, dropped)\n"
        ),
        "test_sleep and alone and 1",
        r"\d+ weights come back from sleep at level 1 changed: model\.",
        on_both_releases=True,
    ),
    DeviceFault(
        "caches come back from sleep as their memory happens to be",
        20,
        variant(
            ops="def sleep(self, tag, kept, dropped):\n"
            '    if tag == "kv_cache":\n'
            "        self.slept = dropped\n"
            "    super().sleep(tag, kept, dropped)\n"
            "def wake(self, tag):\n"
            "    super().wake(tag)\n"
            '    for each in self.slept if tag == "kv_cache" else ():\n'
            '        each.fill_(float("nan"))\n'
        ),
        "test_sleep and alone and 1",
        "caches come back from sleep with numbers other than zero",
    ),
    DeviceFault(
        "the logits' weights are a copy, which a reload leaves as it was",
        20,
        variant(
            runner="def load_model(self):\n"
            "    super().load_model()\n"
            "    weight = self.model.lm_head.weight.clone()\n"
            "    self.model.compute_logits = lambda hidden: hidden @ weight.T\n"
        ),
        "test_reloaded_weights",
        r"other, prompt of \d+ tokens",
    ),
    DeviceFault(
        "a kernel's workspace holds 1,024 keys",
        0,
        variant(
            attention="def attend_decode(self, query, kv_cache, plan):\n"
            "    from dataclasses import replace\n"
            "    is_left_out = (plan.pair_start >= 1024).unsqueeze(1)\n"
            "    plan = replace(plan, last=torch.where(is_left_out, -1, plan.last))\n"
            "    return super().attend_decode(query, kv_cache, plan)\n"
        ),
        "test_long_contexts",
        r"prompt of \d+ tokens?",
    ),
    DeviceFault(
        "a turn of a session keeps the last output of the turn before",
        0,
        variant(
            runner="def _update_states(self, schedule):\n"
            "    for arrival in schedule.arrivals:\n"
            "        if arrival.req_id in self.parts.requests.infos and arrival.params is not None:\n"
            "            place = min(arrival.num_computed, len(arrival.token_ids) - 1)\n"
            "            arrival.token_ids = list(arrival.token_ids)\n"
            "            arrival.token_ids[place] = arrival.token_ids[place - 1]\n"
            "    return super()._update_states(schedule)\n"
        ),
        "test_turns_among",
        r"session \d, turn 1, prompt of \d+ tokens: .*; step \d+, ",
    ),
    DeviceFault(
        "the device is opened in the process of the front end",
        0,
        with_worker(
            "def make_device(self):\n"
            "    if opened_in != os.getpid():\n"
            '        raise RuntimeError("the device is open in another process")\n'
            "    return super().make_device()\n",
            top="import os\nopened_in = None",
            platform="@classmethod\n"
            "def check_and_update_config(cls, vllm_config):\n"
            "    global opened_in\n"
            "    super().check_and_update_config(vllm_config)\n"
            "    opened_in = os.getpid()\n",
        ),
        "test_server",
        r"the server ended before it was ready: .*(the device is open in another process|Engine core)",
    ),
    DeviceFault(
        "a helper process of the worker outlives a server that is killed",
        0,
        with_worker(
            'def make_device(self):\n    subprocess.Popen(["sleep", "600"])\n    return super().make_device()\n',
            top="import subprocess",
        ),
        "test_processes_of_a_server_that_is_killed",
        r"processes outlive the one that started them by 5 s: \d+ \(sleep 600\)",
        on_both_releases=True,
    ),
    DeviceFault(
        "each rank draws with noise of its own",
        18,
        variant(
            runner="def _update_states(self, schedule):\n"
            "    for arrival in schedule.arrivals:\n"
            "        if arrival.params is not None:\n"
            "            arrival.params.seed = (arrival.params.seed or 0) + self.vllm_config.parallel_config.rank\n"
            "    return super()._update_states(schedule)\n",
        ),
        "test_ranks",
        r"output \d+ is \d+, which the rules exclude",
        options=("--ranks", "2"),
    ),
]
"""Faults in the order of their kinds."""
