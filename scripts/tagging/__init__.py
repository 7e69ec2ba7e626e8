"""Parts of scripts/train_ner.py: variants, rows of tokens from CoNLL files, entity scores, the card."""
