"""Attention kernels on the fragment engine."""
