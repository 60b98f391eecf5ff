"""Weights in eight bits: the method, and how it is put on a finished model's linears."""
