"""Readers and writers of vLLM's step types, a file for each; no other folder imports these types.

Elsewhere a step is a ``Schedule`` and a cache is a ``CacheLayout``. So a release of vLLM that changes its
``SchedulerOutput``, ``KVCacheConfig``, ``ModelRunnerOutput`` or ``CommonAttentionMetadata`` changes this folder alone.
"""
