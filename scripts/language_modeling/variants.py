"""The variants that scripts/train_lm.py compares: position schemes with and without a memory, of equal size."""

import argparse

import torch

from hf_relpos import SCHEMES, RelPosBertConfig, RelPosBertLMHeadModel


MEMORY = "+memory"


def scheme_of(variant: str) -> str:
    """Its position scheme."""
    return variant.removesuffix(MEMORY)


def has_memory(variant: str) -> bool:
    """Whether its segments attend to those before them."""
    return variant.endswith(MEMORY)


def config_of(args: argparse.Namespace, vocabulary: int, variant: str, wider: int = 0) -> RelPosBertConfig:
    """The configuration of a variant.

    Args:
        vocabulary: its size.
        wider: feed-forward units to add to `--intermediate`.

    Raises:
        ValueError: for sizes, options or memories that the scheme refuses.
    """
    scheme = scheme_of(variant)
    options = SCHEMES[scheme].options
    return RelPosBertConfig(
        vocab_size=vocabulary,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=args.intermediate + wider,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.attention_dropout,
        initializer_range=args.init,
        max_position_embeddings=args.segment,
        type_vocab_size=1,
        pad_token_id=None,
        position_embedding_type=scheme,
        position_options={key: value for key, value in args.options.items() if key in options},
        memory_length=args.memory if has_memory(variant) else 0,
        is_decoder=True,
        use_cache=False,
    )


def size_of(config: RelPosBertConfig) -> int:
    """Number of parameters."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in RelPosBertLMHeadModel(config).parameters())


def configs_of(args: argparse.Namespace, vocabulary: int, trained: int = 0) -> dict[str, RelPosBertConfig]:
    """The configurations of all variants, equal in size up to half a feed-forward unit in each layer.

    Args:
        vocabulary: its size.
        trained: number of parameters of the variants that were trained before; 0 if there are none.

    Raises:
        ValueError: for a variant larger than those.
    """
    sizes = {variant: size_of(config_of(args, vocabulary, variant)) for variant in args.variants}
    unit = args.layers * (2 * args.hidden + 1)  # what one feed-forward unit adds in all layers
    largest = max(sizes, key=sizes.__getitem__)
    if trained and sizes[largest] > trained + unit:
        raise ValueError(
            f"--variants {largest}: has {sizes[largest]:,} parameters, and the variants that were trained before "
            f"{trained:,}; train all of them anew with --again, or under another --name"
        )
    target = trained or sizes[largest]
    return {
        variant: config_of(args, vocabulary, variant, round((target - size) / unit)) for variant, size in sizes.items()
    }
