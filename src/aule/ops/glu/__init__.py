"""Gated units: SwiGLU and GeGLU."""
