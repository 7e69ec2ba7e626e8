"""BERTs with ALiBi and a gated feed-forward: JinaBERT v2, and MosaicBERT, whose code DNABERT-2 and mRNABERT use, too.

The variant of JinaBERT v2 for code has further LayerNorms, other names and the halves of its gated unit exchanged.
Both have model_type "bert", and Transformers has no class for either. The original code of JinaBERT is named in
`auto_map` (jinaai/jina-bert-implementation), that of MosaicBERT is mosaicml/examples, examples/benchmarks/bert/src.
"""

from collections.abc import Iterable
from typing import Any

from ..models.checks import FEED_FORWARD_TYPES
from .family import ALL, Family, Layout, Positions
from .joints import Joint, exchanged_halves, projections


# Activations of the feed-forward by its type; the heads use `hidden_act`. "original" is a feed-forward without a gate.
ACTIVATIONS = {"geglu": "gelu", "reglu": "relu"}
BERT_DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-12}
GATED = {
    "*.mlp.gated_layers": "*.intermediate.dense",
    "*.mlp.wo": "*.output.dense",
    "*.mlp.layernorm": "*.output.LayerNorm",
}
# Of the variant for code, which its repository or the field that its tensors set tells.
FOR_CODE = {
    "*.mlp.down_layer": "*.output.dense",
    "*.layer_norm_1": "*.attention.output.second_norm",
    "*.layer_norm_2": "*.output.LayerNorm",
}
CODE_GATE, CODE_REPOSITORY, CODE_VARIANT = ".mlp.up_gated_layer.", "qk-post-norm", "_code_variant"


class _Alibi(Family):
    """What both families have in common."""

    stock = None
    computes_positions = True
    told_by_tensors = True
    read_directly = True

    def find_positions(self) -> Positions:
        """ALiBi."""
        return Positions(absolute=False, scheme="alibi")

    def head_refusal(self, part: str, name: str, value: Any) -> str:
        """Why a language modelling head cannot be converted; empty for other heads, and if it can.

        Args:
            part: the part of the model that has a value of its own, whatever the field says.
            name: the field.
            value: that value.
        """
        own = self.config.get(name, BERT_DEFAULTS[name])
        if own == value or not self.head.endswith(("ForMaskedLM", "ForPreTraining")):
            return ""
        other = f"{name} = {own!r}: {part} of {self.head} has {value!r} all the same"
        return f"{other}; set architectures to the encoder's class in config.json to convert it without its head"


# Before JinaBERT in the order of recognition, since its tensors have all that shows JinaBERT.
class MosaicBert(_Alibi, name="mosaicbert"):
    """MosaicBERT."""

    class_prefixes = ("Bert",)
    suffixes = ("Model", "ForMaskedLM", "ForSequenceClassification")
    title = "MosaicBERT, DNABERT-2, DNABERT-S, mRNABERT"
    parts = GATED
    # the field marks an exported model; its value has no effect
    defaults = {"attention_probs_dropout_prob": 0.0, "alibi_starting_size": 512}
    marker = "alibi_starting_size"
    published = {"alibi_starting_size": 512}
    layout = Layout("MosaicBERT, DNABERT-2", (r"\.mlp\.gated_layers\.", r"\.mlp\.wo\.", r"\.attention\.self\.Wqkv\."))

    def joints(self) -> Iterable[Joint]:
        """One projection of queries, keys and values."""
        return [projections(".attention.self.Wqkv.")]

    def more_fields(self) -> dict[str, Any]:
        """Its feed-forward part is a gated unit with GELU."""
        return {"feed_forward_type": "glu", "hidden_act": "gelu"}

    def written(self) -> dict[str, str]:
        """The bias of predictions once, as the decoder's."""
        return {"cls.predictions.bias": ""}

    def unsupported_reason(self) -> str:
        """A head is not supported if a field contradicts a constant of the original code."""
        head = self.head_refusal("the head", "layer_norm_eps", BERT_DEFAULTS["layer_norm_eps"])
        return head or self.head_refusal("the feed-forward", "hidden_act", "gelu")


class JinaBert(_Alibi, name="jinabert"):
    """JinaBERT v2."""

    class_prefixes = ("JinaBert", "Bert")
    suffixes = ALL
    title = "JinaBERT v2: embeddings, rerankers"
    parts = {**GATED, **FOR_CODE}
    only = {"feed_forward_type": (["original", *ACTIVATIONS], "unknown"), "alibi_scaling": ([1, None], "not ALiBi")}
    marker = "feed_forward_type"
    not_marking = FEED_FORWARD_TYPES
    published = {"feed_forward_type": "geglu", "position_embedding_type": "alibi"}
    layout = Layout("JinaBERT v2", (r"\.mlp\.(gated_layers|up_gated_layer)\.", r"\.mlp\.(wo|down_layer)\."))

    @property
    def activation(self) -> str | None:
        """The activation of its gated unit; None without a gate."""
        return ACTIVATIONS.get(self.config.get("feed_forward_type", "original"))

    @property
    def is_for_code(self) -> bool:
        """Whether it is the variant for code."""
        return bool(self.config.get(CODE_VARIANT)) or CODE_REPOSITORY in str(self.config.get("auto_map"))

    def joints(self) -> Iterable[Joint]:
        """The gated unit of the variant for code."""
        return [exchanged_halves(CODE_GATE, ".intermediate.dense.")] if self.is_for_code else []

    def written(self) -> dict[str, str]:
        """The names of its variant."""
        own = FOR_CODE if self.is_for_code else GATED if self.activation else {}
        return {ours: ours for ours in self.parts.values()} | {ours: theirs for theirs, ours in own.items()}

    def infer_from_tensors(self, names: list[str]) -> dict[str, Any]:
        """The variant, and a gate that no field names."""
        is_for_code = any(CODE_GATE in name for name in names)
        is_gated = is_for_code or any(".mlp.gated_layers." in name for name in names)
        found: dict[str, Any] = {CODE_VARIANT: True} if is_for_code else {}
        if is_gated and self.config.get("feed_forward_type", "original") == "original":
            found["feed_forward_type"] = "geglu"
        return found

    def more_fields(self) -> dict[str, Any]:
        """A gated unit, and the norms of the variant for code."""
        if self.activation is None:
            return {"feed_forward_type": "mlp"}
        norms = {"extra_attention_norms": True} if self.is_for_code else {}
        return {"feed_forward_type": "glu", "hidden_act": self.activation, **norms}

    def unsupported_reason(self) -> str:
        """A head is not supported if its activation is not that of the feed-forward part."""
        return self.head_refusal("the feed-forward", "hidden_act", self.activation) if self.activation else ""
