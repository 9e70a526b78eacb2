"""The decoding kernel on matrix units."""
