"""Benchmarks: each is run by hand, alone on its machine."""
