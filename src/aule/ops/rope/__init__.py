"""Rotary position embedding, alone and after RMSNorm."""
