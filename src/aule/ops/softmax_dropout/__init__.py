"""Softmax of rows, with masks and dropout."""
