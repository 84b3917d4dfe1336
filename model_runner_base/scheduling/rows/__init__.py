"""Rows: arrays that keep requests in steady decode, for vLLM's scheduler with or without corrections.

``row_steps.py`` is the scheduler's part; the other files do not know the scheduler.
"""
