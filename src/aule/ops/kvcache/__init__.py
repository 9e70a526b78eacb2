"""Paged caches of keys and values: the table of pages, and the kernels that write into them."""
