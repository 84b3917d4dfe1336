"""Releases of vLLM on which models with recurrent layers are served."""

from importlib.util import find_spec

SERVES_STATES = find_spec("vllm.v1.kv_cache_spec_registry") is None
"""Whether a KV-cache group of the base's own can be added for the scheduler (scheduling/state_group.py).

Later releases register the managers of groups elsewhere, where it was not tried.
"""
