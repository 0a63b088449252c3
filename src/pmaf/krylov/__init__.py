"""Krylov spaces, which grow by products with a matrix."""
