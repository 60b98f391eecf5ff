"""Ranks: how many work on one request, in which groups, and what they send each other."""
