"""Decoding on CPU cores: the forward kernel for CPUs, with keys that lie in pages and lengths of each sequence."""
