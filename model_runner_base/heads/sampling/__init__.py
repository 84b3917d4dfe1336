"""Sampling on the device: parameters are tensors by request row, and each sampling mode is one graph."""
