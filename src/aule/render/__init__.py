"""Renderers: one module per kernel language, each with a function ``render(kernel, target) -> Artifact``."""
