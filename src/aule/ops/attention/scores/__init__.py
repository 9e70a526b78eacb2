"""Score modifiers, bands of kept keys, dropout of tiles, and launches that prepare masks and rotated operands."""
