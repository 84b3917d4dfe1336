"""Code that depends on vLLM's release: its types, differences between releases, and patches of its methods."""
