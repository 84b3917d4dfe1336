"""What the model is called with for its tokens."""
