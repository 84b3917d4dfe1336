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
    device: str = "examples.plain_device"
    """A variant of the example device where that has nothing that the fault is in: a module of ``devices.MODULES``."""


STEPS = "test_random_schedules and llama"
WINDOW = "test_random_schedules and window"
CHUNKS = "test_random_schedules and chunks"
REPEAT = "test_repeated_step_is_interrupted"

MUTATIONS = [
    # Request states and block tables
    Mutation(
        "a finished request keeps its row",
        "requests/states.py",
        "        self.release(req_id)\n        self.infos.pop(req_id, None)",
        "        self.infos.pop(req_id, None)",
        REPEAT,
    ),
    Mutation(
        "a resumed request has computed nothing, although it found a prefix",
        "requests/states.py",
        "self.num_computed[row] = num_computed",
        "self.num_computed[row] = num_computed if len(token_ids) == info.num_prompt_tokens else 0",
        STEPS,
    ),
    Mutation(
        "what counts as sampled is one token late",
        "step/builder.py",
        "= after >= num_known[row]",
        "= after > num_known[row]",
        REPEAT,
    ),
    Mutation(
        "while a step is repeated new blocks go to the first requests, whoever needs them",
        "model_runner.py",
        "rows = list(compress(rows, every))",
        "rows = rows[: len(every) - every.count(None)]",
        STEPS,
    ),
    Mutation(
        "resumed requests append their blocks to the old ones",
        "requests/block_tables.py",
        "        put_ints(block_ids, self.table[row])\n        self.num_blocks[row] = len(block_ids)",
        "        self.append([row], [block_ids])",
        REPEAT,
    ),
    Mutation(
        "new blocks overwrite the last one",
        "requests/block_tables.py",
        "end = num_blocks[row]",
        "end = max(0, num_blocks[row] - 1)",
        STEPS,
    ),
    Mutation(
        "a resumed request starts where it was when it lost its blocks",
        "vllm_port/schedule.py",
        "Arrival(req_id, token_ids, num_computed, block_ids)",
        "Arrival(req_id, token_ids, len(token_ids) - 1, block_ids)",
        REPEAT,
    ),
    Mutation(
        "decode rows stand wherever the scheduler names them",
        "step/builder.py",
        "            is_sorted = False",
        "            is_sorted = True",
        STEPS,
    ),
    # What the device knows
    Mutation(
        "the device records a position that is one too small",
        "requests/device_rows.py",
        "computed.index_put_((slots[0],), slots[1])",
        "computed.index_put_((slots[0],), slots[1] - 1)",
        REPEAT,
    ),
    Mutation(
        "the device answers for the row behind",
        "requests/device_rows.py",
        "on_device[(-values - 1).clamp(min=0)]",
        "on_device[(-values).clamp(min=0)]",
        REPEAT,
    ),
    # Steps that repeat the last one
    Mutation(
        "a repeat does not look for resumed requests",
        "step/repeat.py",
        " or schedule.arrivals:",
        ":",
        REPEAT,
    ),
    Mutation(
        "a repeat does not look at which requests come, in which order",
        "step/repeat.py",
        "schedule.continued is not same and schedule.continued != batch.req_ids",
        "not schedule.continued",
        STEPS,
    ),
    Mutation(
        "a repeat does not look up a block that a request enters",
        "caches/growth.py",
        "            write(buffer, entries, num_entries, place, block_id)\n",
        "",
        STEPS,
    ),
    Mutation(
        "a repeat does not send what changed",
        "step/packing.py",
        "self.entries_on_device = self._sent_entries",
        "self.entries_on_device = self._no_entries",
        STEPS,
    ),
    Mutation(
        "a repeat that finds no room counts its step all the same",
        "step/repeat.py",
        "                self._requests.num_computed[batch.rows] -= 1  # Built from scratch, the step counts itself.\n",
        "",
        STEPS,
    ),
    Mutation(
        "a repeat hangs no new pair into the merge tree",
        "caches/growth.py",
        "                hang(tree, tile, pair, fan_in, places, buffer, entries, num_entries)\n",
        "",
        STEPS,
        device="padded_device",
    ),
    # Plan, masks, merge tree, cache slots
    Mutation(
        "the window is one token too wide",
        "attention/sight.py",
        "return (positions - (self.window - 1)).clamp(min=0)",
        "return (positions - self.window).clamp(min=0)",
        WINDOW,
    ),
    Mutation(
        "the window of a query tile is that of its last token",
        "attention/loops.py",
        "first, last = first_seen(position, window, chunk),",
        "first, last = first_seen(end - 1, window, chunk),",
        WINDOW,
    ),
    Mutation(
        "a chunk of local attention begins one token late",
        "attention/sight.py",
        "return positions - positions % self.chunk",
        "return positions - positions % self.chunk + (positions % self.chunk > 0)",
        CHUNKS,
    ),
    Mutation(
        "a token does not see itself",
        "attention/paged.py",
        "visible = position <= last",
        "visible = position < last",
        REPEAT,
    ),
    Mutation(
        "a decode row sees the key behind its own",
        "caches/paged.py",
        "last=last[pair_tile] - kv_start,\n        first=None if first is None else first[pair_tile]",
        "last=last[pair_tile] - kv_start + 1,\n        first=None if first is None else first[pair_tile]",
        REPEAT,
    ),
    Mutation(
        "the last KV tile of a context is left out",
        "attention/loops.py",
        "return first // kv_tile, last // kv_tile + 1",
        "return first // kv_tile, max(first // kv_tile + 1, last // kv_tile)",
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
        "among chunks a node of the merge tree takes one child too many",
        "caches/paged.py",
        "children < starts[1:, None]",
        "children <= starts[1:, None]",
        STEPS,
    ),
    Mutation(
        "partial results of a decode row are merged without a common maximum",
        "attention/paged.py",
        "scale = torch.exp(child_max - new_max.unsqueeze(1))",
        "scale = torch.ones_like(child_max)",
        STEPS,
    ),
    Mutation(
        "partial results of a chunk are added up without a common maximum",
        "attention/paged.py",
        "weights = torch.exp(scores - reference)",
        "weights = torch.exp(scores - scores.amax(dim=3, keepdim=True))",
        STEPS,
    ),
    Mutation(
        "keys are written one slot further",
        "caches/paged.py",
        "slot_offsets=call.positions % block_size",
        "slot_offsets=(call.positions + 1) % block_size",
        REPEAT,
    ),
    Mutation(
        "a chunk's keys are written to the block of their tile's first token",
        "caches/chunk_tiles.py",
        "self.positions % geometry.kv_tile // geometry.block_size]",
        "self.first[tile] % geometry.kv_tile // geometry.block_size]",
        STEPS,
    ),
    Mutation(
        "the padding of decode rows is not counted before chunks",
        "model_runner.py",
        "        batch.query_start[batch.num_decodes :] += parts.caches.chunk_start(size, num_tokens) - num_tokens\n",
        "",
        STEPS,
    ),
    Mutation(
        "the padding of chunks is written to a request's block",
        "caches/chunk_tiles.py",
        "return torch.where(self.is_real, block, 0)",
        "return block",
        STEPS,
        device="padded_device",
    ),
    # Output
    Mutation(
        "results are handed out in sorted order",
        "vllm_port/outputs.py",
        "req_ids=self._req_ids,",
        "req_ids=sorted(self._req_ids),",
        STEPS,
    ),
    Mutation(
        "the tokens of unfinished prompts are handed out",
        "vllm_port/outputs.py",
        "            tokens[index] = []",
        "            pass",
        STEPS,
    ),
    Mutation(
        "the host waits for each step",
        "model_runner.py",
        "        launched = self._make_output(batch, sampled)\n",
        "        launched = self._make_output(batch, sampled)\n        launched.get_output()\n",
        "test_host_does_not_wait",
    ),
    Mutation(
        "what lasts of a request outlives it",
        "requests/states.py",
        "        self.infos.pop(req_id, None)",
        "        pass",
        "test_soak",
    ),
    Mutation(
        "the KV caches are copied by each step",
        "model_runner.py",
        "        batch, step = self._prepare_inputs(schedule)\n",
        "        batch, step = self._prepare_inputs(schedule)\n        held = parts.kv_caches._tensors\n"
        "        held[:] = [tensor.clone() for tensor in held]\n        parts.bind_kv_caches()\n",
        "test_caches_are_written_in_place",
    ),
    # Sampling
    Mutation(
        "top-k keeps one token more",
        "heads/sampling/sampler.py",
        "ordered.gather(-1, (top_k - 1).long())",
        "ordered.gather(-1, top_k.clamp(max=ordered.shape[-1] - 1).long())",
        "test_kept_tokens",
    ),
    Mutation(
        "top-p leaves out the token that crosses it",
        "heads/sampling/sampler.py",
        "before = probabilities.cumsum(dim=-1) - probabilities",
        "before = probabilities.cumsum(dim=-1)",
        "test_distribution and top_p",
    ),
    Mutation(
        "min-p is relative to the sum and not to the likeliest",
        "heads/sampling/sampler.py",
        "floor = vocabulary.maximum(scaled) + torch.log(min_p)",
        "floor = scaled.logsumexp(dim=-1, keepdim=True) + torch.log(min_p)",
        "test_distribution and min_p",
    ),
    Mutation(
        "presence and frequency penalties count the prompt",
        "heads/sampling/penalties.py",
        "in_output = count & (IN_PROMPT - 1)",
        "in_output = (count & (IN_PROMPT - 1)) + (count >= IN_PROMPT).to(torch.int32)",
        "test_presence_penalty",
    ),
    Mutation(
        "repetition penalty comes last",
        "heads/sampling/penalties.py",
        "    return logits - frequency * in_output - presence * (in_output > 0)",
        "    return logits - repetition * (frequency * in_output + presence * (in_output > 0))",
        "test_penalties_together",
    ),
    Mutation(
        "a resumed request's penalties forget its output",
        "heads/sampling/penalties.py",
        "counts = np.bincount(token_ids[info.num_prompt_tokens :], minlength",
        "counts = np.bincount([], minlength",
        STEPS,
    ),
    Mutation(
        "noise ignores the position",
        "heads/sampling/random.py",
        "stream = _mix(stream ^ (position * _GOLDEN))",
        "stream = _mix(stream)",
        "test_positions_are_independent",
    ),
    Mutation(
        "the upper half of a seed is ignored",
        "heads/sampling/random.py",
        "stream = _mix(_mix(seed_low) ^ seed_high)",
        "stream = _mix(_mix(seed_low))",
        "test_seeds_that_differ_in_high_bits",
    ),
    Mutation(
        "ranks count only the likelier tokens",
        "heads/sampling/logprobs.py",
        "ranks = (values >= chosen_value).sum(dim=-1)",
        "ranks = (values > chosen_value).sum(dim=-1)",
        "test_logprobs",
    ),
    Mutation(
        "min_tokens ends one token early",
        "heads/sampling/token_edits.py",
        "if count < params.min_tokens:",
        "if count < params.min_tokens - 1:",
        "test_min_tokens",
    ),
    # Speculation
    Mutation(
        "a draft is accepted whatever was sampled",
        "requests/device_rows.py",
        "is_right = tokens == draft\n",
        "is_right = draft >= 0\n",
        "test_greedy_tokens and wrong",
    ),
    Mutation(
        "a step counts one token fewer than were right",
        "requests/device_rows.py",
        "for _ in range(num_tokens - 1):",
        "for _ in range(num_tokens - 2):",
        "test_greedy_tokens and always-right",
    ),
    Mutation(
        "drafts are drawn with the noise of the position before",
        "draft/device.py",
        "position = rows.position + place + 1",
        "position = rows.position + place",
        "test_acceptance and always-right",
    ),
    Mutation(
        "drafts are drawn without the row's own top-k",
        "draft/device.py",
        "token, _ = draw(mode, self",
        "token, _ = draw(SamplingMode.RANDOM, self",
        "test_acceptance and always-right",
    ),
    Mutation(
        "what an earlier step yielded is counted again by penalties",
        "requests/device_rows.py",
        "    recent.index_put_((begins,), torch.cat((nothing, last[begins, :1]), dim=1))\n",
        "",
        "test_drawn_tokens and prompt-lookup",
    ),
    Mutation(
        "penalties do not count the drafts before a place",
        "heads/sampling/penalties.py",
        "    if sample_slots.shape[0] == 3:\n",
        "    if sample_slots.shape[0] == 4:\n",
        "test_drawn_tokens and prompt-lookup",
    ),
    Mutation(
        "bad words do not see the drafts before a place",
        "heads/sampling/token_edits.py",
        "infos[owner].output_token_ids + drafts[index - place : index]",
        "infos[owner].output_token_ids",
        "test_drawn_tokens and prompt-lookup",
    ),
    Mutation(
        "a grammar masks the first place of a row alone",
        "heads/sampling/token_masks.py",
        "zip(every.rows.tolist(), grammar.bitmask, strict=True)",
        "zip(every.rows[every.place == 0].tolist(), grammar.bitmask[every.place == 0], strict=True)",
        "test_rules and prompt-lookup",
    ),
    Mutation(
        "the progress of wrong drafts is not taken back",
        "step/builder.py",
        "requests.num_computed[requests.rows_of(schedule.continued)] = schedule.num_computed",
        "pass",
        "test_arrivals and wrong",
    ),
    Mutation(
        "a repeated step does not list the positions that drafts may be at",
        "caches/growth.py",
        "            limits.decode.query,\n            limits.ahead,\n",
        "            1,\n            0,\n",
        "test_preemption and always-right",
    ),
    Mutation(
        "the draft model's cache is one token behind",
        "draft/model.py",
        "torch.stack((rows.position - 1, rows.position), dim=1)",
        "torch.stack((rows.position - 2, rows.position - 1), dim=1)",
        "test_acceptance and always-right",
    ),
    Mutation(
        "prompts do not go through the draft model",
        "draft/model.py",
        "pair.view(-1), call.size.kind == StepKind.MIXED",
        "pair.view(-1), call.size.kind == StepKind.LINES",
        "test_acceptance and always-right",
    ),
    Mutation(
        "a parallel pass takes the step's tokens one position behind",
        "draft/parallel.py",
        "positions = (rows.position - num_yielded).unsqueeze(1) + index",
        "positions = (rows.position - num_yielded).unsqueeze(1) + index - 1",
        "test_acceptance and in-parallel",
    ),
    Mutation(
        "log probabilities of one wrong draft go to the next request",
        "vllm_port/outputs.py",
        "return LogprobsLists(ids[kept], values[kept], ranks[kept], first.tolist())",
        "return LogprobsLists(ids, values, ranks, first.tolist())",
        "test_rules and wrong",
    ),
    # Start
    Mutation(
        "a size is offered before it is compiled",
        "start/behind.py",
        "        for wait in self._begin(size):\n            wait()\n",
        "        self._begin(size)\n",
        "test_serving_while_sizes_are_made",
        device="compiling_device",
    ),
    Mutation(
        "a size is offered when its model is compiled, and sampling is not",
        "start/behind.py",
        "for wait in self._begin(size):",
        "for wait in self._begin(size)[:2]:",
        "test_serving_while_sizes_are_made",
        device="compiling_device",
    ),
]
