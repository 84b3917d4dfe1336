"""Measurements, each a command that prints a table and, with --json, one JSON object."""
