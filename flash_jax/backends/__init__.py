"""Implementations of the kernel contract, one module or folder each; `base` is the seam."""
