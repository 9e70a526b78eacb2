"""Decoding of latent attention by warpgroup products."""
