"""Sampling on the device: parameters as tensors by row, one graph a mode."""
