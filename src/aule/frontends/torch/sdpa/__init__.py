"""PyTorch's own attention functions, served by aule.

- `translate`: arguments of ``scaled_dot_product_attention`` as a call of `aule.flash_attention`, or a refusal.
- `functions`: aule's function of that name, and the replacement that `aule.install` sets for PyTorch's.
- `flash`: aule as PyTorch's flash-attention implementation for CPU tensors.

The public functions, and the counts of calls, are in `aule.api.sdpa`.
"""
