"""Kernels in Numba, arrays in and arrays out: the scalar step, CPU loop and GPU grid of one noun share a file."""
