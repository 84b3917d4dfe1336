"""Patches of vLLM's classes of models, which the loader applies."""
