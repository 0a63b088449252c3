"""The layers: one file each, with its problem, its function and its module."""
