"""Readers of vLLM's types of caches, layers, drafts and prompts, a file for each.

Elsewhere a cache is a ``CacheLayout`` and a step is a ``Schedule``. So a release of vLLM that changes its
``KVCacheConfig`` or ``CommonAttentionMetadata`` changes this folder alone. Its ``SchedulerOutput`` is read in
step/schedule.py, and its ``ModelRunnerOutput`` is made in heads/outputs.py.
"""
