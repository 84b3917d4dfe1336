"""Start-up, before the first request: wiring, warm-up, memory."""
