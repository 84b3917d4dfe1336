"""Code that depends on vLLM's release: its step types, differences between releases, and patches of its methods."""
