"""Backends: pairs of a renderer and a runtime."""
