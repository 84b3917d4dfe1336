"""The only room that reads vLLM's step types and writes them; one file for each.

Inside the house a step is a ``Schedule``, a cache is a ``CacheLayout``. So a release of vLLM that changes its
``SchedulerOutput``, ``KVCacheConfig``, ``ModelRunnerOutput`` or ``CommonAttentionMetadata`` changes this room alone.
"""
