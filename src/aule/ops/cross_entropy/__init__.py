"""Cross entropy of logits and targets, over vocabularies so large that probabilities are never stored."""
