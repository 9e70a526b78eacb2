"""Decoding on CPU cores: the CPU's forward kernel over paged caches with a length for each sequence."""
