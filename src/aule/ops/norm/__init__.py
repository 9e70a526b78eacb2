"""Normalisation of rows: RMSNorm and LayerNorm, alone and after the addition of a residual."""
