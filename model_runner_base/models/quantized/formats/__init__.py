"""Quantised formats of checkpoints, by the ``quant_method`` of their config."""
