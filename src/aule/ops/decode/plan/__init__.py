"""From a decoding problem and a target to launches. Pure."""
