"""Patches of vLLM's methods, each applied once in a process, where vLLM has no hook."""
