"""Models of vLLM as this library runs them: loading, layers, and patches of their classes."""
