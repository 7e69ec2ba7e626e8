"""A live stock model computes its attention with our backends: `accelerate_attention`."""

from .accelerate import AcceleratedAttention, accelerate_attention, restore_attention


__all__ = ["AcceleratedAttention", "accelerate_attention", "restore_attention"]
