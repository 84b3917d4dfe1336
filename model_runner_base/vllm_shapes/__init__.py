"""What this release of vLLM has, and where: asked of vLLM itself, never of its version.

Every room may ask here, so nothing here imports another room. What takes vLLM's step apart and puts it together is
``vllm_port/``.
"""
