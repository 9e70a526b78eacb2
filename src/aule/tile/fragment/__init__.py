"""The fragment engine: products on matrix units by one subgroup."""
