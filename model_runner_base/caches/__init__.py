"""Kinds of KV-cache groups, one file each: form of the caches, what a step sends for them, what their layers read."""
