"""Attention with functions of the user (`aule.flex_attention`) on torch tensors.

- `trace`: functions of torch operations become programs.
- `record`: functions inside of graphs that PyTorch's compiler makes.
- `masks`: masks of blocks, ours and PyTorch's, as one function.
- `calls`: the forward and backward pass as calls; `autograd`: gradients; `captured`: gradients of captured tensors.
- `evaluate`: programs on tensors, by torch's operations; `max_scores`: the largest score of each row, made so.
"""
