"""Kernels one by one: checked against the reference, then timed against what else there is."""
