"""What the training recipes (scripts/examples/run_*.py) share.

- arguments: model and data flags, beside those of `TrainingArguments`, and how they are parsed
- models: tokenizer and model for the flags: a checkpoint, or a new model with any position scheme
- conll, scores: files of tagged sentences, and scores of named entities
- data: records of files or of the Hub, their columns and labels, a validation split
- running: the output folder, training from the last checkpoint on, evaluation, what is saved
"""
