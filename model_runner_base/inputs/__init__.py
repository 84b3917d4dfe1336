"""Inputs of the model for the tokens of a step: ids, embeddings, adapters, images and sounds."""
