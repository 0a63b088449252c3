"""The linear system behind every derivative, and the ways to solve it."""
