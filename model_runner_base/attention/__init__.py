"""Paged attention whose cost follows the tokens that exist: a plan made on the host, and its execution in plain
torch."""
