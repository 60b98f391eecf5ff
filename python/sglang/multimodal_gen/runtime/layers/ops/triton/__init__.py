"""The kernels behind the operators; importing one needs Triton."""
