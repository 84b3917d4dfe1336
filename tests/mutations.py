"""Deliberate faults, each of which the conformance kit must catch: one replacement in one file."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    """Under model_runner_base."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    selection: str
    """Pytest's -k expression for the checks that should catch it."""


STEPS = "test_random_schedules and llama"
WINDOW = "test_random_schedules and window"
STEADY = "test_steady_decode_is_interrupted"

MUTATIONS = [
    # Request states and block tables
    Mutation(
        "a finished request keeps its row",
        "request_states.py",
        "        self.release_row(req_id)\n        self.infos.pop(req_id, None)",
        "        self.infos.pop(req_id, None)",
        STEADY,
    ),
    Mutation(
        "a resumed request has computed nothing, although it found a prefix",
        "request_states.py",
        "self.num_computed[row] = num_computed",
        "self.num_computed[row] = num_computed if len(token_ids) == info.num_prompt_tokens else 0",
        STEPS,
    ),
    Mutation(
        "what counts as sampled is one token late",
        "batch_builder.py",
        "= after >= num_known[row]",
        "= after > num_known[row]",
        STEADY,
    ),
    Mutation(
        "in steady decode new blocks go to the first requests, whoever needs them",
        "model_runner.py",
        "list(compress(steady.rows, extended))",
        "steady.rows[: len(extended) - extended.count(None)]",
        STEPS,
    ),
    Mutation(
        "resumed requests append their blocks to the old ones",
        "block_tables.py",
        "        put_ints(block_ids, self.table[row])\n        self.num_blocks[row] = len(block_ids)",
        "        self.append([row], [block_ids])",
        STEADY,
    ),
    Mutation(
        "new blocks overwrite the last one",
        "block_tables.py",
        "end = num_blocks[row]",
        "end = max(0, num_blocks[row] - 1)",
        STEPS,
    ),
    # Steady decode
    Mutation(
        "steady decode does not look for resumed requests",
        "steady_decode.py",
        "        and not scheduler_output.scheduled_cached_reqs.resumed_req_ids\n",
        "",
        STEADY,
    ),
    Mutation(
        "steady decode does not look at the order of requests",
        "steady_decode.py",
        "scheduled_cached_reqs.req_ids == last.req_ids",
        "scheduled_cached_reqs.req_ids and len(last.req_ids)",
        STEPS,
    ),
    Mutation(
        "steady decode does not look up a block that it enters",
        "attention/steady.py",
        "        pair_blocks[last_pair[tile], block % pair_blocks.shape[1]] = block_id\n",
        "",
        STEPS,
    ),
    # Plan, masks, merge tree, cache slots
    Mutation(
        "the window is one token too wide",
        "attention/paged.py",
        "visible & (distance < self.sliding_window)",
        "visible & (distance <= self.sliding_window)",
        WINDOW,
    ),
    Mutation(
        "the window of a query tile is that of its last token",
        "attention/loops.py",
        "max(0, position - window + 1) // kv_tile",
        "max(0, position + length - window) // kv_tile",
        WINDOW,
    ),
    Mutation(
        "a token does not see itself",
        "attention/paged.py",
        "visible = distance >= 0",
        "visible = distance > 0",
        STEADY,
    ),
    Mutation(
        "the last KV tile of a context is left out",
        "attention/loops.py",
        "return start, (position + length - 1) // kv_tile + 1",
        "return start, max(start + 1, (position + length - 1) // kv_tile)",
        STEPS,
    ),
    Mutation(
        "the merge tree takes the first pair of a tile for all",
        "attention/loops.py",
        "= child + lane if child + lane < last else neutral",
        "= child if child + lane < last else neutral",
        STEPS,
    ),
    Mutation(
        "in mixed steps a node of the merge tree takes one child too many",
        "attention_metadata.py",
        "children < starts[1:, None]",
        "children <= starts[1:, None]",
        STEPS,
    ),
    Mutation(
        "partial results are merged without a common maximum",
        "attention/paged.py",
        "scale = torch.exp(child_max - new_max.unsqueeze(1))",
        "scale = torch.ones_like(child_max)",
        STEPS,
    ),
    Mutation(
        "keys are written one slot further",
        "attention_metadata.py",
        "slot_offsets=positions % group.geometry.block_size",
        "slot_offsets=(positions + 1) % group.geometry.block_size",
        STEADY,
    ),
    # Output
    Mutation(
        "results are handed out in sorted order",
        "outputs.py",
        "req_ids=self._req_ids,",
        "req_ids=sorted(self._req_ids),",
        STEPS,
    ),
    Mutation(
        "the tokens of unfinished prompts are handed out",
        "outputs.py",
        "            tokens[index] = []",
        "            pass",
        STEPS,
    ),
    Mutation(
        "the host waits for each step",
        "model_runner.py",
        "        output = self._make_output(inputs.batch, sampled)\n",
        "        output = self._make_output(inputs.batch, sampled)\n        output.get_output()\n",
        "test_host_does_not_wait",
    ),
    Mutation(
        "what lasts of a request outlives it",
        "request_states.py",
        "        self.infos.pop(req_id, None)",
        "        pass",
        "test_soak",
    ),
    Mutation(
        "the KV caches are copied by each step",
        "model_runner.py",
        "        batch, packed = self._prepare_inputs(scheduler_output)\n",
        "        batch, packed = self._prepare_inputs(scheduler_output)\n"
        "        self.kv_caches[:] = [cache.clone() for cache in self.kv_caches]\n        self._bind_kv_caches()\n",
        "test_caches_are_written_in_place",
    ),
    # Sampling
    Mutation(
        "top-k keeps one token more",
        "sample/sampler.py",
        "ordered.gather(-1, (top_k - 1).long())",
        "ordered.gather(-1, top_k.clamp(max=ordered.shape[-1] - 1).long())",
        "test_kept_tokens",
    ),
    Mutation(
        "top-p leaves out the token that crosses it",
        "sample/sampler.py",
        "before = probabilities.cumsum(dim=-1) - probabilities",
        "before = probabilities.cumsum(dim=-1)",
        "test_distribution and top_p",
    ),
    Mutation(
        "min-p is relative to the sum and not to the likeliest",
        "sample/sampler.py",
        "floor = vocabulary.maximum(scaled) + torch.log(min_p)",
        "floor = scaled.logsumexp(dim=-1, keepdim=True) + torch.log(min_p)",
        "test_distribution and min_p",
    ),
    Mutation(
        "presence and frequency penalties count the prompt",
        "sample/penalties.py",
        "in_output = count & (IN_PROMPT - 1)",
        "in_output = (count & (IN_PROMPT - 1)) + (count >= IN_PROMPT).to(torch.int32)",
        "test_presence_penalty",
    ),
    Mutation(
        "repetition penalty comes last",
        "sample/penalties.py",
        "    return logits - frequency * in_output - presence * (in_output > 0)",
        "    return logits - repetition * (frequency * in_output + presence * (in_output > 0))",
        "test_penalties_together",
    ),
    Mutation(
        "a resumed request's penalties forget its output",
        "sample/penalties.py",
        "counts = np.bincount(token_ids[info.num_prompt_tokens :], minlength",
        "counts = np.bincount([], minlength",
        STEPS,
    ),
    Mutation(
        "noise ignores the position",
        "sample/random.py",
        "stream = _mix(stream ^ (position * _GOLDEN))",
        "stream = _mix(stream)",
        "test_positions_are_independent",
    ),
    Mutation(
        "the upper half of a seed is ignored",
        "sample/random.py",
        "stream = _mix(_mix(seed_low) ^ seed_high)",
        "stream = _mix(_mix(seed_low))",
        "test_seeds_that_differ_in_high_bits",
    ),
    Mutation(
        "ranks count only the likelier tokens",
        "sample/logprobs.py",
        "ranks = (values >= chosen_value).sum(dim=-1)",
        "ranks = (values > chosen_value).sum(dim=-1)",
        "test_logprobs",
    ),
    Mutation(
        "min_tokens ends one token early",
        "sample/token_edits.py",
        "if num_outputs < params.min_tokens:",
        "if num_outputs < params.min_tokens - 1:",
        "test_min_tokens",
    ),
]
