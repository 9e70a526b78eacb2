"""The decoding kernel on plain arithmetic."""
