"""Corrections of vLLM's scheduler: classes over it that need no rows.

Each is inherited from before ``Scheduler`` or ``AsyncScheduler``. ``SessionTurns`` includes ``TurnParams``, which
includes ``RequestFailures``, since a session may fail. ``BidirectionalImages`` and ``SessionTurns`` are for vLLM 0.16;
the others are for all releases.
"""
