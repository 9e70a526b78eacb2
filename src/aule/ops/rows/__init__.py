"""Common parts of the row operations: checks, layout of rows over a device, kernels, and column sums."""
