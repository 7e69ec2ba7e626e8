"""Contrastive training on documents longer than the source of a conversion reads: data, readers, training, card."""
