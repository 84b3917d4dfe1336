"""Kinds of prompts that only some releases of vLLM have."""

from importlib.resources import files

from vllm.v1.engine import EngineCoreRequest

HAS_MIXED_PROMPTS = "prompt_is_token_ids" in EngineCoreRequest.__struct_fields__
"""Whether a prompt may have tokens and embeddings."""

TAKE_LOGPROBS_MODE = "logprobs_mode" in (files("vllm") / "v1/worker/gpu/sample/prompt_logprob.py").read_text()
"""Whether ``logprobs_mode`` also applies to prompts. Otherwise they have log probabilities in all modes."""
