"""Kinds of prompts that only some releases of vLLM have."""

from vllm.v1.engine import EngineCoreRequest

HAS_MIXED_PROMPTS = "prompt_is_token_ids" in EngineCoreRequest.__struct_fields__
"""Whether a prompt may have tokens and embeddings."""
