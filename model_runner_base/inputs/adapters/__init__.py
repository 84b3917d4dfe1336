"""Low-rank adapters (LoRA): many in one batch, each request with its own or none."""
