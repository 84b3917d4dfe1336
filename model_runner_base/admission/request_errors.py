"""Errors of single requests in vLLM's front end: checks before a request is queued, and errors that an engine reports.

vLLM lets its platform check a prompt and its parameters only. Other parts of a request, and whether it fits the
engine's sizes, are checked on the request that goes to the engine.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput

from model_runner_base.admission.our_engines import Checks, arriving, is_ours
from model_runner_base.admission.request_ranges import check_rest
from model_runner_base.admission.request_rules import check_fits, check_rules, check_session
from model_runner_base.errors import RequestError
from model_runner_base.vllm_compat.patches.wrap_once import wrap_once
from model_runner_base.vllm_compat.types.mixed_prompts import mark_tokens

CHECKS = "_request_checks"
"""Attribute of an ``InputProcessor`` that holds the checks of its engine."""


def hold_requests(make_checks: Callable[[ModelConfig], Checks]) -> None:
    """Patches vLLM's front end, once in its process; ``make_checks`` makes the checks of a model's requests."""
    wrap_once(InputProcessor, "process_inputs", partial(_checked, make_checks))
    wrap_once(OutputProcessor, "process_outputs", _raising)


def _checked(make_checks: Callable[[ModelConfig], Checks], process_inputs: Any) -> Any:
    @wraps(process_inputs)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises RequestError for a request that the engine could not serve as it is."""
        config = self.vllm_config
        if not is_ours(config):
            return process_inputs(self, *args, **kwargs)
        if CHECKS not in self.__dict__:
            setattr(self, CHECKS, make_checks(config.model_config))
        token = arriving.set(getattr(self, CHECKS))
        try:
            request = process_inputs(self, *args, **kwargs)
        finally:
            arriving.reset(token)
        if (is_token := getattr(request, "prompt_is_token_ids", None)) is not None:
            request.prompt_embeds = mark_tokens(request.prompt_embeds, is_token)
        vocab_size = config.model_config.get_vocab_size()
        check_rest(request, vocab_size)
        embeds = request.prompt_embeds
        num_tokens = len(request.prompt_token_ids or ()) if embeds is None else len(embeds)
        check_fits(num_tokens, config)
        check_session(request.resumable, config)
        if isinstance(request.sampling_params, SamplingParams):
            check_rules(request.sampling_params, vocab_size)
        return request

    return checked


def _raising(process_outputs: Any) -> Any:
    @wraps(process_outputs)
    def raising(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> OutputProcessorOutput:
        """Raises errors of requests to the readers of their queues; ``LLM`` has none, and its outputs report them."""
        failed = [
            output
            for output in engine_core_outputs
            if output.finish_reason is FinishReason.ERROR and output.stop_reason
        ]
        aborted: list[str] = []
        _give_vectors(self, failed)
        for output in failed:
            aborted += _end(self, output)
        processed = process_outputs(self, engine_core_outputs, *args, **kwargs)
        processed.reqs_to_abort.extend(aborted)
        return processed

    return raising


def _give_vectors(processor: OutputProcessor, failed: Sequence[Any]) -> None:
    """Gives failed requests for vectors an empty one, since vLLM takes an output without a vector for text."""
    for output in failed:
        state = processor.request_states.get(output.request_id)
        if state is not None and state.detokenizer is None:
            output.pooling_output = torch.empty(0)


def _end(processor: OutputProcessor, output: Any) -> list[str]:
    """Raises an output's error to the reader of its queue; returns ids of the reader's requests that still run."""
    state = processor.request_states.get(output.request_id)
    if state is None or state.queue is None:
        return []
    state.queue.put(RequestError(str(output.stop_reason)))
    reader = output.request_id if state.parent_req is None else state.parent_req.request_id
    others = processor.abort_requests((reader,), internal=True)
    return [req_id for req_id in others if req_id != output.request_id]
