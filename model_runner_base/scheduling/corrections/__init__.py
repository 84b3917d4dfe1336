"""Corrections of vLLM's scheduler: mixins that need no rows.

A scheduler class lists them before ``Scheduler`` or ``AsyncScheduler`` among its bases. ``SessionTurns`` includes
``TurnParams``, which includes ``RequestFailures``, since a session may fail. ``BidirectionalImages``,
``SessionTurns`` and ``StatePrefixes`` are for vLLM 0.16; the others are for all releases.
"""
