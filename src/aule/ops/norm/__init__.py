"""Normalisation of rows: RMSNorm and LayerNorm, alone and behind the addition of a residual."""
