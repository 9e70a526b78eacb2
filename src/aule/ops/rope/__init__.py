"""Rotary position embedding, alone and behind RMSNorm."""
