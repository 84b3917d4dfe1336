"""States of recurrent layers as vLLM's scheduler sees them: a KV-cache group with a pool of its own.

vLLM's groups share one pool of blocks, all of as many bytes. A state is as large as hundreds of tokens of attention, so
either would have to become as large as the other, and the pool has more blocks than there could be states. Here states
are numbered by a pool of their own, from 1 on, and the number is the state's place in the layers' tensors. The group is
added for the scheduler alone: what vLLM plans memory by does not have it, and the user's block size stays.

Where prefixes are kept (vLLM's cache mode "align"), a request has a state for each block of tokens that one of its
steps ends in, and gives up all but the last. States of full blocks stay in the pool, and are hit, until they are needed
for other requests.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core import single_type_kv_cache_manager
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

NOT_ENOUGH = 1 << 40
"""More blocks than any pool has."""
GROUP = "recurrent_states"
WAITS_FOR_STATES = hasattr(MambaManager, "new_step_starts")
"""Whether vLLM itself schedules a request one step later if it hits what this step writes."""
RESETS_ALL_POOLS = hasattr(KVCacheCoordinator, "reset_prefix_cache")
"""Whether vLLM forgets the prefixes of all groups' pools, not of the common one alone."""


@dataclass(frozen=True)
class StateSpec(MambaSpec):
    """The spec of the group: a request has one block, as long as the longest request.

    ``block_size`` is 1 all the same, since newer releases ask that it divides that of attention. Where prefixes are
    kept, it is that of attention, and a request has as many blocks as tokens ask for.
    """

    num_states: int = 0
    max_model_len: int = 0


class StatePool(BlockPool):
    """Pool of states for releases that lack two rules of newer ones.

    States that are written in this step are not hit before the next one: attention could read what the same step
    writes, but a recurrent layer reads all states first. States that nothing can hit are given out first: decoding
    requests give one up for each block, and would else take the place of all kept ones.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.unwritten: set[int] = set()
        """Ids of the states that became cached since the step began."""

    def cache_full_blocks(self, *args: Any, **kwargs: Any) -> None:
        super().cache_full_blocks(*args, **kwargs)
        cached = kwargs["blocks"][kwargs["num_cached_blocks"] : kwargs["num_full_blocks"]]
        self.unwritten.update(block.block_id for block in cached)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        for block in reversed(blocks):
            if not (block.ref_cnt or block.is_null or block.block_hash):
                self._put_first(block)

    def _put_first(self, block: KVCacheBlock) -> None:
        """Moves a free block to the front of the queue, which has a method for the end alone."""
        queue: Any = self.free_block_queue
        queue.remove(block)
        head, second = queue.fake_free_list_head, queue.fake_free_list_head.next_free_block
        block.prev_free_block, block.next_free_block = head, second
        head.next_free_block = second.prev_free_block = block
        queue.num_free_blocks += 1

    def get_cached_block(self, *args: Any) -> list[KVCacheBlock] | None:
        blocks = super().get_cached_block(*args)
        return None if blocks and any(block.block_id in self.unwritten for block in blocks) else blocks


class StateManager(MambaManager):
    """Gives states to requests that have blocks, from a pool of its own: one each, unless prefixes are kept."""

    def __init__(self, kv_cache_spec: StateSpec, block_pool: BlockPool, **kwargs: Any) -> None:
        self._is_kept = is_kept = kv_cache_spec.mamba_cache_mode == "align"
        cls = BlockPool if WAITS_FOR_STATES or not is_kept else StatePool
        pool = cls(kv_cache_spec.num_states + 1, is_kept and block_pool.enable_caching, block_pool.hash_block_size)
        super().__init__(kv_cache_spec, block_pool=pool, **kwargs)
        if not is_kept:
            self.block_size = kv_cache_spec.max_model_len
            return
        common: Any = block_pool
        common.states, reset = pool, common.reset_prefix_cache  # vLLM may ask the common pool for hits.
        if not RESETS_ALL_POOLS:
            common.reset_prefix_cache = lambda: reset() and pool.reset_prefix_cache()

    @classmethod
    def find_longest_cache_hit(cls, *args: Any, **kwargs: Any) -> Any:
        kwargs["block_pool"] = getattr(kwargs["block_pool"], "states", kwargs["block_pool"])
        return super().find_longest_cache_hit(*args, **kwargs)

    def cache_blocks(self, request: Request, num_tokens: int, **kwargs: Any) -> None:
        """Keeps states of prompts, as newer releases do unless they are asked for others.

        Those of outputs, one for each block, would soon have taken the place of all others.
        """
        if not WAITS_FOR_STATES:
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        super().cache_blocks(request, num_tokens, **kwargs)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Gives states for the tokens of a step, drafts among them.

        A request whose drafts were wrong may need fewer than it has, which older releases do not expect.
        """
        if self._is_kept and not WAITS_FOR_STATES:
            num_known = len(self.req_to_blocks[request_id]) * self.block_size
            if num_tokens_main_model <= num_known:
                return []
        return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)

    def get_num_blocks_to_allocate(self, *args: Any, **kwargs: Any) -> int:
        """Blocks of the common pool: none, or more than it has where no state is free."""
        count = super().get_num_blocks_to_allocate(*args, **kwargs)
        return 0 if count <= self.block_pool.get_num_free_blocks() else NOT_ENOUGH


managers: Any = single_type_kv_cache_manager
if hasattr(managers, "spec_manager_map"):
    managers.spec_manager_map[StateSpec] = StateManager
else:
    # Newer releases have a registry. vLLM fills it when it is asked while it is empty, so it must not have this alone.
    managers.register_all_kvcache_specs(None)
    managers.KVCacheSpecRegistry.register(StateSpec, StateManager)


def state_spec(max_model_len: int, num_states: int, kept_block_size: int = 0) -> StateSpec:
    """The group's spec, for requests of up to ``max_model_len`` tokens; memory is not planned by it.

    ``kept_block_size`` is the number of tokens after which states are kept for later requests; 0: none are.
    """
    return StateSpec(
        block_size=kept_block_size or 1,
        mamba_cache_mode="align" if kept_block_size else "none",
        shapes=((1,),),
        dtypes=(torch.uint8,),  # type: ignore[arg-type]
        num_states=num_states,
        max_model_len=max_model_len,
    )


def states_per_request(block_size: int, num_drafts: int) -> int:
    """Number of states for each request that may run, where prefixes are kept; the runner has as many.

    A request holds those of the blocks that a step may touch: that of the token before it, and those of its own tokens.
    While the step before it is not read, either may lie as many tokens further back. One more is for a release that
    frees states a step late.
    """
    tokens = 2 * (1 + num_drafts)
    return 2 + -(-tokens // block_size)


def keeps_states(vllm_config: VllmConfig) -> bool:
    """Whether states of recurrent layers are kept for later requests with the same prefix."""
    return vllm_config.cache_config.mamba_cache_mode == "align"


def with_states(config: KVCacheConfig, vllm_config: VllmConfig) -> KVCacheConfig:
    """The scheduler's configuration, with the group of states last if the model has any."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    if not (model.is_hybrid or model.is_attention_free):
        return config
    if not config.kv_cache_groups:
        # vLLM switches it off without a KV cache, and a prompt longer than a step would wait for ever.
        scheduler.enable_chunked_prefill = True
    num_states, kept_block_size = scheduler.max_num_seqs, 0
    if keeps_states(vllm_config):
        kept_block_size = vllm_config.cache_config.block_size
        drafts = vllm_config.speculative_config
        num_states *= states_per_request(kept_block_size, drafts.num_speculative_tokens if drafts else 0)
    spec = state_spec(model.max_model_len, num_states, kept_block_size)
    return replace(config, kv_cache_groups=[*config.kv_cache_groups, KVCacheGroupSpec([GROUP], spec)])
