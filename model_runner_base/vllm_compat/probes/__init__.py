"""Probes of the installed vLLM: what it has, and where; asked of vLLM itself, never of its version.

Every folder may import these, so they import no other folder of the base.
"""
