"""Fused kernels as torch operators, each with a plain twin that says what it computes."""
