"""Probes of the installed vLLM: what it has, and where. They look at vLLM itself, never at its version.

Every folder may import these, so they import no other folder of the base.
"""
