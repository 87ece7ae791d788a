"""Rates of the stores for checkpoints."""
