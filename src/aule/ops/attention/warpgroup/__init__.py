"""Attention kernels on the warpgroup engine."""
