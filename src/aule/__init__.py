"""FlashAttention for whatever hardware a person has."""
