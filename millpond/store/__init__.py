"""Checkpoints outside the engine: stores and the records in them; knows no device and no torch."""
