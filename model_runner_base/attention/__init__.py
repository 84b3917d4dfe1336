"""Paged attention whose cost follows the tokens that exist: a host-side plan and its execution in plain torch."""
