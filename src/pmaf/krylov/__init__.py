"""Spaces that grow by products with a matrix."""
