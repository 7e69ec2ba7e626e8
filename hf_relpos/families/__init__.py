"""Families of checkpoints: how each is recognised, read, exported, and accelerated in a live model."""
