"""States of recurrent layers as vLLM's scheduler sees them: a KV-cache group with a pool of its own.

vLLM's groups share one pool of blocks, all of as many bytes. A state is as large as hundreds of tokens of attention, so
either would have to become as large as the other, and the pool has more blocks than there could be states. Here states
are numbered by a pool of their own, from 1 on, and the number is the state's place in the layers' tensors. The group is
added for the scheduler alone: what vLLM plans memory by does not have it, and the user's block size stays.

Where prefixes are kept (vLLM's cache mode "align"), a request has a state for each block of tokens that one of its
steps ends in, and gives up all but the last. States of full blocks stay in the pool, and are hit, until they are needed
for other requests.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core import single_type_kv_cache_manager as managers
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

NOT_ENOUGH = 1 << 40
"""More blocks than any pool has."""
GROUP = "recurrent_states"


@dataclass(frozen=True)
class StateSpec(MambaSpec):
    """The spec of the group: a request has one block, as long as the longest request.

    ``block_size`` is 1 all the same, since newer releases ask that it divides that of attention. Where prefixes are
    kept, it is that of attention, and a request has as many blocks as tokens ask for.
    """

    num_states: int = 0


class StateManager(managers.MambaManager):
    """Gives each request that has blocks one state, from a pool of its own."""

    def __init__(self, kv_cache_spec: StateSpec, block_pool: BlockPool, **kwargs: Any) -> None:
        pool = BlockPool(kv_cache_spec.num_states + 1, False, block_pool.hash_block_size)
        super().__init__(kv_cache_spec, block_pool=pool, **kwargs)

    def get_num_blocks_to_allocate(self, *args: Any, **kwargs: Any) -> int:
        """Blocks of the common pool: none, or more than it has where no state is free."""
        count = super().get_num_blocks_to_allocate(*args, **kwargs)
        return 0 if count <= self.block_pool.get_num_free_blocks() else NOT_ENOUGH


if hasattr(managers, "spec_manager_map"):  # Where it is not, models with states are refused (limits.py).
    managers.spec_manager_map[StateSpec] = StateManager


def state_spec(max_model_len: int, num_states: int) -> StateSpec:
    """The group's spec: blocks of ``max_model_len`` tokens, of which a request has one; memory is not planned by it."""
    return StateSpec(
        block_size=max_model_len,
        shapes=((1,),),
        dtypes=(torch.uint8,),  # type: ignore[arg-type]
        num_states=num_states,
    )


def with_states(config: KVCacheConfig, vllm_config: VllmConfig) -> KVCacheConfig:
    """The scheduler's configuration, with the group of states last if the model has any."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    if not (model.is_hybrid or model.is_attention_free):
        return config
    if not config.kv_cache_groups:
        # vLLM switches it off without a KV cache, and a prompt longer than a step would wait for ever.
        scheduler.enable_chunked_prefill = True
    spec = state_spec(model.max_model_len, scheduler.max_num_seqs)
    return replace(config, kv_cache_groups=[*config.kv_cache_groups, KVCacheGroupSpec([GROUP], spec)])
