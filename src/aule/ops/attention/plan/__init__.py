"""From an attention problem and a target to launches. Pure."""
