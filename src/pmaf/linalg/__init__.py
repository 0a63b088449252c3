"""Batched kernels of linear algebra."""
