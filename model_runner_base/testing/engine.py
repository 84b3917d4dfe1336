"""Real engines in this process, one at a time, kept for the checks that follow with the same options."""

import gc
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import vllm.model_executor.models.registry
import vllm.v1.engine.core
from transformers import AutoConfig, PretrainedConfig
from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from model_runner_base.testing.precision import PRECISION, NotLooked
from model_runner_base.testing.step_log import StepLog

# vLLM inspects a model's class in a process of its own, which takes ten seconds for each architecture. That process
# spares its caller the start of an accelerator, which tests start anyway.
_registry: Any = vllm.model_executor.models.registry
_registry._run_in_subprocess = lambda function: function()

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 8 << 20,
    "disable_log_stats": False,
}
"""Options of every engine; ``Engines`` has the kit's dtype. Limits are small, since a device with graphs captures every
size within them at start."""

_core: Any = vllm.v1.engine.core
_end = _core.EngineCore.shutdown


def _end_frozen(core: Any) -> None:
    """Ends an engine core and leaves frozen what is, which ``start`` wants. vLLM 0.33 thaws all."""
    with patch("gc.unfreeze"):
        _end(core)


_core.EngineCore.shutdown = _end_frozen
# An engine that is frozen when it starts would not be freed when it ends.
_core.freeze_gc_heap = lambda: None

_starts = count(1)
"""Engines started so far."""


def has_cache_lines() -> bool:
    """Whether the device keeps each request in one block, so that none is preempted, and no prefix is found again."""
    return bool(getattr(current_platform, "has_cache_lines", False))


SIZES_OF_BLOCKS = ("block_size", "num_gpu_blocks_override", "kv_cache_memory_bytes")
"""Options with which checks make a cache of few small blocks."""


def with_lines(options: dict[str, Any]) -> dict[str, Any]:
    """A check's options for a device with cache lines, of which all running requests have one."""
    return {name: value for name, value in options.items() if name not in SIZES_OF_BLOCKS or value is None}


def require_small_blocks(what: str) -> None:
    """Raises NotLooked on a device with cache lines; ``what`` is so there, in words."""
    if has_cache_lines():
        raise NotLooked(f"{what} where a block holds a whole request")


def check_preempted(llm: LLM, num_before: float) -> None:
    """Raises AssertionError if there are no more preemptions than ``num_before``; NotLooked if the device has none."""
    if metric(llm, "vllm:num_preemptions") == num_before:
        require_small_blocks("no request is preempted")
        raise AssertionError("nothing was preempted")


def check_hit(is_hit: bool) -> None:
    """Raises AssertionError if no prefix was found in the cache; NotLooked if the device finds none."""
    if not is_hit:
        require_small_blocks("no prefix is kept for others")
        raise AssertionError("the prefix cache was not hit")


def cache_bytes(model: str | Path, num_tokens: int) -> int:
    """``kv_cache_memory_bytes`` for ``num_tokens`` tokens in the kit's dtype. If requests need more, some are
    preempted."""
    config = AutoConfig.from_pretrained(model)
    num_heads = _num_kv_heads(config)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return num_tokens * config.num_hidden_layers * 2 * num_heads * head_size * PRECISION.dtype.itemsize


def _num_kv_heads(config: PretrainedConfig) -> int:
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    names = ("num_key_value_heads", "num_kv_heads", "num_attention_heads")
    return next(value for name in names if (value := getattr(config, name, None)))


class Engines:
    """Starts engines of one worker; ``options`` apply to each engine that is not asked for others."""

    def __init__(self, worker: str, enforce_eager: bool, **options: Any) -> None:
        own = {"dtype": PRECISION.name, "worker_cls": worker, "enforce_eager": enforce_eager}
        self._defaults = DEFAULTS | own | options
        self._key: tuple[str, str] | None = None
        self._llm: LLM | None = None
        self._stays_new = False
        self.log = StepLog()
        """Steps of the engine that runs."""

    @property
    def running(self) -> LLM | None:
        """The engine that runs, if any."""
        return self._llm

    def get(self, model: str | Path, is_new: bool = False, stays_new: bool = False, **options: Any) -> LLM:
        """The engine that runs already, with an empty prefix cache, if it has these options; otherwise a new one.

        All of its sizes are compiled, unless ``is_new`` was asked for: then some may still be compiling. If it
        ``stays_new``, because the caller does not use it, it is the new one of the next call.
        """
        options = with_lines(options) if has_cache_lines() else options
        key = str(model), repr(sorted(options.items()))
        is_used, self._stays_new = not self._stays_new, stays_new
        if (is_new and is_used) or key != self._key or self._llm is None or _is_busy(self._llm):
            self.close()
            self._llm = start(model, **(self._defaults | options))
            self._key = key
        if has_runner_here(self._llm):
            self.log.attach(runner_of(self._llm), core_of(self._llm).scheduler)
        if not is_new:
            wait_for_sizes(self._llm)
        self._llm.reset_prefix_cache()
        return self._llm

    def close(self) -> None:
        """Shuts the engine down, if one runs."""
        self._key = self._llm = None
        self.log = StepLog()
        shut_down()


def _is_busy(llm: LLM) -> bool:
    return llm.llm_engine.has_unfinished_requests()


def start(model: str | Path, **options: Any) -> LLM:
    """Starts an engine.

    The garbage collector leaves out what exists before. Most of that are modules, and a search through them takes
    longer than a tiny engine's start. Every eighth time they are searched, too, for an engine that was still in use
    when another one started.
    """
    if next(_starts) % 8 == 0:
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    try:
        return LLM(str(model), **options)
    except BaseException:
        shut_down()  # An engine that fails to load leaves parallel groups, which lack those of experts.
        raise


def shut_down() -> None:
    """Frees an engine that is no longer referenced, which its own reference cycles would keep."""
    with patch("gc.unfreeze"):
        gc.collect()
        cleanup_dist_env_and_memory()


def wait_for_sizes(llm: LLM) -> None:
    """Returns when every step size of an engine is compiled; raises the error of one that fails to compile."""
    if has_runner_here(llm):  # Several workers start with all of them.
        runner_of(llm).background_compiler.wait()


def has_runner_here(llm: LLM) -> bool:
    """Whether an engine's only runner is in this process."""
    return llm.llm_engine.vllm_config.parallel_config.world_size == 1


def runner_of(llm: LLM) -> Any:
    """The model runner inside an engine."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def core_of(llm: LLM) -> Any:
    """The engine core inside an engine: its scheduler, executor and KV-cache manager."""
    return llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]


def metric(llm: LLM, name: str) -> float:
    """The sum of one of the engine's counters, such as ``vllm:num_preemptions``."""
    return sum(m.value for m in llm.get_metrics() if m.name == name)  # type: ignore[attr-defined]


def generate(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    adapters: Sequence[LoRARequest | None] | None = None,
) -> list[RequestOutput]:
    """Outputs for prompts of token ids, as a user gets them; ``adapters`` has one, or None, for each prompt."""
    inputs = [TokensPrompt(prompt_token_ids=list(p)) for p in prompts]
    return llm.generate(inputs, params, use_tqdm=False, lora_request=adapters)  # type: ignore[arg-type]


def greedy(count: int, **options: Any) -> SamplingParams:
    """Exactly ``count`` greedy tokens, without text."""
    return SamplingParams(
        **({"temperature": 0, "max_tokens": count, "ignore_eos": True, "detokenize": False} | options)
    )


def sampled(count: int, **options: Any) -> SamplingParams:
    """Exactly ``count`` tokens, drawn unless a temperature of 0 is given."""
    return SamplingParams(**({"max_tokens": count, "ignore_eos": True} | options))


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The first completion's token ids of each request."""
    return [list(output.outputs[0].token_ids) for output in outputs]
