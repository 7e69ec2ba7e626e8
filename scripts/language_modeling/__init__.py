"""Parts of scripts/train_lm.py: variants, texts, the card."""
