"""Matrix products: the one of a linear layer behind a normalisation, and those of its gradient."""
