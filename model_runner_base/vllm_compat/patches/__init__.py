"""Methods of vLLM that are wrapped once in a process, where it has no hook for what is needed."""
