"""Paged caches of keys and values: the page table, and the kernels that write into the cache."""
