"""The code of a saved model: two files, made for its configuration and saved with its weights."""
