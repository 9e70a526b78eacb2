"""The vector engine: register-blocked products on one CPU core."""
