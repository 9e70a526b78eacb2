"""aule as operators of PyTorch, for tracing and transforms: Dynamo, export, vmap."""
