"""What becomes of the model's hidden states."""
