"""Inputs of the model for the tokens of a step: ids or embeddings."""
