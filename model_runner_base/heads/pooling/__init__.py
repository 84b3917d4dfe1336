"""Pooling: embeddings, classes and scores of whole prompts."""
