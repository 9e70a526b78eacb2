"""Softmax as kernels compute it: online softmax and dropout's random bits."""
