"""Quantised checkpoints on any device: their weights are dequantised while they are loaded."""
