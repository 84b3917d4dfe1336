"""Towers: the encoders of a multimodal model and their projectors, on the host or as graphs of their own."""
