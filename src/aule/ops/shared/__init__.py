"""What every op uses: its specification, plans, parameters and checks."""
