"""What the package needs of Transformers and Transformers keeps private: each access once, with its reason."""

from transformers import PreTrainedConfig


def attn_implementation(config: PreTrainedConfig) -> str | dict | None:
    """The `attn_implementation` a configuration carries, or None where none was chosen yet.

    The constructors and `from_pretrained` take the choice as a public argument, but `to_dict` leaves it out, and the
    only way to read it back is this attribute.
    """
    return config._attn_implementation
