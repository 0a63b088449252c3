"""Reductions: each turns a problem into an equivalent one, and its solution back."""
