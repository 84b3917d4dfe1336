"""Everything that follows a release of vLLM: its step types, its differences, the methods that are wrapped."""
