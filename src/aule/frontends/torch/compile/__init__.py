"""Operators of PyTorch that call aule, for tracing and transforms: Dynamo, export, vmap."""
