"""Graphs of steps: which sizes have one, how a function becomes one, and when they are compiled."""
