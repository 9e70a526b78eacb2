"""Attention on CPU cores: schedules over the vector engine, with the score modifiers of the GPU kernels."""
