"""Eager calls that autograd differentiates."""
