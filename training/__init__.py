"""Trains the bundled tiny models; not part of the installed package."""
