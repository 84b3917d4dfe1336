"""Layers of vLLM models in plain torch, for devices without kernels of their own."""
