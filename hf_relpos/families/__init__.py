"""Families of checkpoints: how each is recognised, renamed, read, exported, and accelerated in a live model.

A family is one file with its entry, and one line in `registry`. Transformers' own mechanisms do not carry this.
`register_checkpoint_conversion_mapping` is keyed by the class that is loaded, and here one class reads a dozen layouts
that only config.json or the tensors tell apart; `save_pretrained` would undo such a conversion, so that a folder of
`relpos_bert` would hold DeBERTa's names; and its operations split and join tensors, but neither copy one to several
layers (ALBERT) nor add one to another. `register_patch_mapping` replaces classes of models that are still to be made,
and `accelerate_attention` is for those that are loaded.
"""
