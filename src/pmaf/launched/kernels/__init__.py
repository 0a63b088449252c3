"""Kernels in Triton, one file for each problem and two for what these share."""
