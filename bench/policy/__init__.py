"""Which checkpoints to keep, on traces, without a model."""
