"""The layers: a problem, the ways to its solution, a function and a module each."""
