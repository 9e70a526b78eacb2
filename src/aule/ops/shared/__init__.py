"""Shared by all ops: specification, plans, parameters and checks."""
