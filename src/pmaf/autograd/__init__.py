"""Solves that PyTorch's automatic differentiation can differentiate."""
