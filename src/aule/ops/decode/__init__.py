"""Decoding: few query rows of each sequence against its cache of keys and values, contiguous or in pages."""
