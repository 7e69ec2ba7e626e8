"""The files shipped as remote code.

Every file of this folder is copied, flat, into each Hub repository saved with its code, so the files obey what remote
code allows: siblings are imported as `from .name import x`, everything else comes from the standard library, torch,
transformers and huggingface_hub (which it brings), and no other module of this package is imported.
`tests/test_travels.py` holds them to it. This file itself is not copied.
"""
