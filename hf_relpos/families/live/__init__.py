"""Acceleration of live stock models with our attention backends: `accelerate_attention`."""

from .accelerate import AcceleratedAttention, accelerate_attention, restore_attention


__all__ = ["AcceleratedAttention", "accelerate_attention", "restore_attention"]
