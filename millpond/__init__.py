"""A serving engine for hybrid linear-attention language models, built around one pool of state."""
