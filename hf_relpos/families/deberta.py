"""DeBERTa v1, v2 and v3, and mDeBERTa, as in Transformers.

Queries at padding attend to nothing there, and to the real tokens here, so outputs at padding differ.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..checkpoints.errors import check_shape
from ..models.checks import Rule, integer
from ..schemes.deberta import KINDS
from .family import MOST, NAME_OR_NAMES, Family, Layout, Positions
from .joints import QUERY_KEY_VALUE, Joint
from .names import of_attention


def _split_heads(config: Mapping[str, Any], name: str, tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """Split in_proj (3D, D), with q, k and v of each head in turn, into three projections (D, D)."""
    heads, size = config["num_attention_heads"], config["hidden_size"]
    check_shape(name, tensor.shape, (3 * heads * (size // heads), size))
    return [rows.flatten(0, 1) for rows in tensor.unflatten(0, (heads, 3, -1)).unbind(1)]


def _join_heads(config: Mapping[str, Any], name: str, *parts: torch.Tensor) -> Iterable[torch.Tensor]:
    heads = config["num_attention_heads"]
    return [torch.stack([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 2)]


class _Deberta(Family):
    """What all versions have in common."""

    parts = {
        "deberta": "bert",
        "encoder.rel_embeddings": "encoder.distance_embedding.rel_embeddings",
        "encoder.LayerNorm": "encoder.distance_embedding.LayerNorm",
        "embeddings.embed_proj": "embeddings.embeddings_project",
        "lm_predictions.lm_head.dense": "cls.predictions.transform.dense",
        "lm_predictions.lm_head.LayerNorm": "cls.predictions.transform.LayerNorm",
        "lm_predictions.lm_head.bias": "cls.predictions.bias",
        # a name that 5.14 ties to the word embeddings
        "lm_predictions.lm_head.weight": "cls.predictions.decoder.weight",
    }
    # optional ones, which are not among the fields of Transformers' classes
    dropped_fields = ("attention_head_size", "cls_dropout", "norm_rel_ebd", "position_buckets", "share_att_key")
    types = {
        "conv_kernel_size": integer(-1, optional=True),
        "max_relative_positions": integer(-1),
        "pos_att_type": NAME_OR_NAMES,
    }
    read_directly = True
    masks_queries = True
    tolerance = 1e-5  # Transformers rounds the scale, and in v1 inputs of LayerNorms, to float32

    @property
    def kinds(self) -> list[str]:
        """`pos_att_type` as in Transformers."""
        value = self.config.get("pos_att_type") or []
        return [name.strip() for name in value.lower().split("|")] if isinstance(value, str) else list(value)

    @property
    def terms(self) -> list[str]:
        """The `kinds` that the scheme has."""
        return [kind for kind in KINDS if kind in self.kinds]

    @property
    def max_distance(self) -> int:
        """The largest distance."""
        distance = self.config.get("max_relative_positions", -1)
        return distance if distance >= 1 else self.config.get("max_position_embeddings", 512)

    def find_positions(self) -> Positions:
        """DeBERTa's terms, with or without absolute positions."""
        absolute, terms = bool(self.config.get("position_biased_input", True)), self.terms
        if self.config.get("relative_attention", False):
            return Positions(absolute, "deberta", {"pos_att_type": terms, "max_distance": self.max_distance})
        if absolute and not terms:
            return Positions(absolute)
        return Positions(absolute, "deberta", {"pos_att_type": terms, "relative_attention": False})

    def more_fields(self) -> dict[str, Any]:
        """Token classifiers use the dropout of hidden states, and the newer language head is tied."""
        config, is_of_tokens = self.config, self.head.endswith("ForTokenClassification")
        fields = {
            "classifier_dropout": None if is_of_tokens else config.get("cls_dropout"),
            "embedding_projection": "before_norm",
            "embedding_size": config.get("embedding_size"),
            "conv_kernel_size": max(config.get("conv_kernel_size") or 0, 0),
            "conv_groups": config.get("conv_groups", 1),
            "conv_act": config.get("conv_act", "tanh"),
        }
        if not config.get("legacy", True):
            fields["tie_word_embeddings"] = True
        return fields

    def infer_from_tensors(self, names: list[str]) -> dict[str, Any]:
        """The published v3 has the newer language head, but no field for it."""
        newer = any(name.startswith("lm_predictions.") for name in names)
        return {"legacy": False} if newer and not any(name.startswith("cls.predictions.") for name in names) else {}


class DebertaV2(_Deberta, name="deberta-v2"):
    """DeBERTa v2 and v3."""

    class_prefixes = ("DebertaV2",)
    suffixes = (*MOST, "ForMultipleChoice")
    title = "DeBERTa v2 and v3, mDeBERTa"
    parts = {
        **_Deberta.parts,
        **of_attention("*.attention.self.{}_proj", "query", "key", "value"),
        "*.attention.self.pos_key_proj": "*.attention.self.distance_embedding.pos_key_proj",
        "*.attention.self.pos_query_proj": "*.attention.self.distance_embedding.pos_query_proj",
    }
    types = {
        **_Deberta.types,
        "attention_head_size": integer(1, optional=True),
        "norm_rel_ebd": Rule(lambda value: isinstance(value, str), "a string"),
        "position_buckets": integer(-1),
    }
    published = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]}
    layout = Layout("DeBERTa v2 or v3", (r"\.attention\.self\.query_proj\.",))

    def find_positions(self) -> Positions:
        """DeBERTa's terms with the options of v2: a normalisation, buckets and shared projections."""
        config, positions = self.config, super().find_positions()
        options: dict[str, Any] = {}
        if "layer_norm" in [word.strip() for word in config.get("norm_rel_ebd", "none").lower().split("|")]:
            options["norm_rel_ebd"] = "layer_norm"
        if config.get("relative_attention", False):
            buckets, shared = config.get("position_buckets", -1), bool(config.get("share_att_key", False))
            options |= {"buckets": buckets if buckets > 0 else None, "share_att_key": shared}
            options["pos_key_bias"] = not shared
        elif options and positions.scheme is None:  # there is a normalisation without embeddings
            options |= {"pos_att_type": [], "relative_attention": False}
        scheme = "deberta" if options else positions.scheme
        return Positions(positions.absolute, scheme, {**positions.options, **options})

    def unsupported_reason(self) -> str:
        """Heads must add up to the hidden size, and buckets leave room for the logarithmic scale."""
        config, size = self.config, self.config.get("attention_head_size")
        if size is not None and size * config["num_attention_heads"] != config["hidden_size"]:
            sizes = f"num_attention_heads = {config['num_attention_heads']} and hidden_size = {config['hidden_size']}"
            return f"attention_head_size = {size!r} with {sizes}: only heads that add up to hidden_size are read here"
        buckets, distance = config.get("position_buckets", -1), self.max_distance
        if config.get("relative_attention", False) and buckets > 0 and (buckets < 2 or distance - 1 <= buckets // 2):
            source = "max_relative_positions, or max_position_embeddings if that is below 1"
            few = f"position_buckets = {buckets} with a largest distance of {distance} ({source})"
            return f"{few} leaves nothing for the logarithmic scale; correct config.json"
        return ""


class Deberta(_Deberta, name="deberta"):
    """DeBERTa v1."""

    class_prefixes = ("Deberta",)
    suffixes = MOST
    title = "DeBERTa v1"
    parts = {
        **_Deberta.parts,
        "*.attention.self.pos_proj": "*.attention.self.distance_embedding.pos_key_proj",
        "*.attention.self.pos_q_proj": "*.attention.self.distance_embedding.pos_query_proj",
        "*.attention.self.q_bias": "*.attention.self.query.bias",
        "*.attention.self.v_bias": "*.attention.self.value.bias",
    }
    only = {"talking_head": ([False, None], "scores are mixed between heads, which AutoModel of Transformers reads")}
    published = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["c2p", "p2c"]}
    layout = Layout("DeBERTa v1", (r"\.attention\.self\.in_proj\.",))

    def joints(self) -> Iterable[Joint]:
        """One projection with the queries, keys and values of each head in turn."""
        return [Joint((".attention.self.in_proj.",), QUERY_KEY_VALUE, _split_heads, _join_heads)]

    def more_fields(self) -> dict[str, Any]:
        """Keys have no bias."""
        return {**super().more_fields(), "attention_biases": ["query", "value"], "conv_kernel_size": 0}

    def unsupported_reason(self) -> str:
        """Terms that the scheme lacks are not supported."""
        if len(self.kinds) == len(self.terms):
            return ""
        return f"pos_att_type = {self.config['pos_att_type']!r}: only 'c2p' and 'p2c', once each, are read here"
