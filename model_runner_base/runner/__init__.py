"""Runner of a model's steps: wiring, warm-up, memory, updates of states, the forward pass."""
