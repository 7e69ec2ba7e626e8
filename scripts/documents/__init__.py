"""Parts of scripts/classify_documents.py: reading strategies, models, cached states, the card."""
