"""Vocabulary that all engines share: matrices in memory, mathematics, rotations, random numbers."""
