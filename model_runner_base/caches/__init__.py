"""KV-cache groups, one file a kind: what its caches look like, what a step sends for it, what its layers read."""
