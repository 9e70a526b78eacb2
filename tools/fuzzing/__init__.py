"""What `fuzz.py` is made of."""
