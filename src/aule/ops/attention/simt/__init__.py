"""Attention kernels on the simt engine."""
