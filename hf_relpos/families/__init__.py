"""Families of checkpoints: how each is recognised, renamed, read and exported.

A family is a subclass of `family.Family` in a module that `registry` lists. Transformers' own mechanisms do not
suffice. `register_checkpoint_conversion_mapping` is keyed by the loaded class, but here one class reads many layouts
that only config.json or the tensors distinguish. `save_pretrained` would undo such a conversion, so a folder of
`relpos_bert` would have DeBERTa's names. Its operations split and join tensors, but do not copy one to several layers
(ALBERT) or add one to another.
"""
