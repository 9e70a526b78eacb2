"""Public functions and classes, re-exported by `aule`."""
