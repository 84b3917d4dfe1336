"""Comparison of gpu_runner with vLLM's own GPU worker; ``__main__.py`` is the command."""
