"""Records of every request that holds a row: tokens, progress, cache blocks."""
