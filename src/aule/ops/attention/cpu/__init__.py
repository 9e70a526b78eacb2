"""Attention on CPU cores: kernels on the vector engine, with the score modifiers of the GPU kernels."""
