"""The configuration and the models."""
