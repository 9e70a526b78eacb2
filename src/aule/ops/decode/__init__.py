"""Decoding: few query rows of each sequence attend to its cache of keys and values, contiguous or paged."""
