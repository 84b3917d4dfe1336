"""Heads: logits computed from the model's hidden states, and tokens sampled from them."""
