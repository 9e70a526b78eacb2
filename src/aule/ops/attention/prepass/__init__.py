"""Launches before the main kernel: what a mask makes of each tile, and Q and K rotated."""
