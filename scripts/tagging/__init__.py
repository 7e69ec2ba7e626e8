"""Named entities: rows of tokens from CoNLL files, entity scores, and the card of scripts/train_ner.py."""
