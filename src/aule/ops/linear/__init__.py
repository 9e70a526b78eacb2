"""A linear layer behind a normalisation: its matrix products, and those of its gradient."""
