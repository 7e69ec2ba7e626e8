"""Attention weights of models whose body is not BERT's: Transformer-XL, XLNet, DeBERTa, RoFormer, TENER, TUPE.

A whole checkpoint of these does not fit BERT, since norms, biases or embeddings differ. One attention layer does:

```python
config = RelPosBertConfig(**attention_config("xlnet", xlnet_config))
weights = attention_weights("xlnet", state_dict, 0, xlnet_config)
```

Each family is one function that cuts a layer's tensors, and one that reads its configuration.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from ..families.errors import ConversionError, abbreviate
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..models.modeling_relpos_bert import RelPosBertSelfAttention
from ..schemes.registry import build_shared


Tensors = dict[str, torch.Tensor]
LINEARS = ("query", "key", "value")
# One thing, spelled as in Transformers' BERT, in XLNet and Transformer-XL, and in fairseq.
SPELLINGS = {
    "hidden_size": ("hidden_size", "d_model", "encoder_embed_dim"),
    "num_attention_heads": ("num_attention_heads", "n_head", "encoder_attention_heads"),
    "max_position_embeddings": ("max_position_embeddings", "max_positions"),
    "layer_norm_eps": ("layer_norm_eps", "layer_norm_epsilon"),
    "hidden_dropout_prob": ("hidden_dropout_prob", "dropout"),
    "attention_probs_dropout_prob": ("attention_probs_dropout_prob", "dropatt", "attention_dropout"),
}
REQUIRED = ("hidden_size", "num_attention_heads")


@dataclass(frozen=True)
class Weights:
    """A state dict, and the prefix of one layer in it.

    Attributes:
        tensors: name to tensor.
        prefix: of the layer's tensors.
    """

    tensors: Mapping[str, torch.Tensor]
    prefix: str

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self:
            raise ConversionError(f"state_dict lacks {self.prefix + name}; give the weights as the family stores them")
        return self.tensors[self.prefix + name]

    def beside(self, name: str) -> "Weights":
        """The weights beside the one tensor of that name, which all layers share.

        Raises:
            ConversionError: for none, or several.
        """
        matches = [key for key in self.tensors if key == name or key.endswith(f".{name}")]
        if len(matches) != 1:
            raise ConversionError(
                f"state_dict has {len(matches)} tensors {name} ({abbreviate(matches) or 'none'}), not one"
            )
        return Weights(self.tensors, matches[0].removesuffix(name))


@dataclass(frozen=True)
class LayerFamily:
    """How one family stores an attention layer.

    Attributes:
        scheme: key of `hf_relpos.SCHEMES`.
        anchors: a tensor that every layer has, in each of its spellings.
        options: configuration to the options of the scheme.
        own: the layer's weights, under our names.
        shared: those that all layers share; None for none.
        defaults: of RelPosBertConfig's fields, where the family's are others and they matter.
    """

    scheme: str
    anchors: tuple[str, ...]
    options: Callable[[Mapping[str, Any]], dict[str, Any]]
    own: Callable[[Weights, Mapping[str, Any]], Tensors]
    shared: Callable[[Weights, Mapping[str, Any]], Tensors] | None = None
    defaults: dict[str, Any] = field(default_factory=dict)


def attention_config(family: str, config: Any) -> dict[str, Any]:
    """Arguments of RelPosBertConfig for the attention layers of another model.

    Args:
        family: key of `LAYER_FAMILIES`.
        config: its configuration: what its config.json holds, or a PreTrainedConfig. TENER has `d_model`, `n_head`
            and `scale`; TUPE `rel_pos` beside the sizes.

    Raises:
        ConversionError: for an unknown family, sizes that are missing or that our heads cannot have, and a variant
            that has no counterpart here.
    """
    spec, config = _find(family), _mapping(config)
    fields = dict(spec.defaults)
    for ours, spellings in SPELLINGS.items():
        spelled = [name for name in spellings if config.get(name) is not None]
        if spelled:
            fields[ours] = config[spelled[0]]
        elif ours in REQUIRED:
            raise ConversionError(f"config has none of {', '.join(spellings)}; give the sizes of the layer")
    head_size = config.get("d_head", config.get("attention_head_size"))
    if head_size is not None and head_size * fields["num_attention_heads"] != fields["hidden_size"]:
        raise ConversionError(
            f"config: heads of {head_size} do not add up to {fields['hidden_size']}; ours are hidden_size / "
            "num_attention_heads wide"
        )
    return {**fields, "position_embedding_type": spec.scheme, "position_options": spec.options(config)}


def attention_weights(family: str, state_dict: Mapping[str, torch.Tensor], layer: int, config: Any) -> Tensors:
    """One self-attention layer of another model as ours.

    The output projection, which belongs to `attention.output` here, is left out, and so is everything around it.

    Args:
        family: key of `LAYER_FAMILIES`.
        state_dict: of the whole model, or of one layer alone (then `layer` is 0).
        layer: its number.
        config: as for `attention_config`.

    Returns:
        State dict of `encoder.layer.N.attention.self`: query, key and value, (D, D) with biases (D,), zero where the
        model has none, and `distance_embedding.*`. What all layers share, that of `encoder.distance_embedding`, has
        the prefix `shared.`.

    Raises:
        ConversionError: for what `attention_config` refuses, a layer that is not there, and tensors that are missing
            or have another shape than the configuration gives them.
    """
    spec, fields = _find(family), attention_config(family, config)
    weights, config = _locate(spec, state_dict, layer), _mapping(config)
    result = spec.own(weights, config)
    for name in LINEARS:
        result.setdefault(f"{name}.bias", result[f"{name}.weight"].new_zeros(len(result[f"{name}.weight"])))
    if spec.shared is not None:
        result |= {f"shared.{name}": tensor for name, tensor in spec.shared(weights, config).items()}
    try:
        ours = RelPosBertConfig(**fields)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ConversionError(f"config: {error}") from error
    with torch.device("meta"):
        modules = {"": RelPosBertSelfAttention(ours), "shared.": build_shared(ours)}
    expected = {
        prefix + name: tensor.shape
        for prefix, module in modules.items()
        if module is not None
        for name, tensor in module.state_dict().items()
    }
    actual = {name: tensor.shape for name, tensor in result.items()}
    for name in {**expected, **actual}:
        if expected.get(name) != actual.get(name):
            by_weights, by_config = (tuple(shapes[name]) if name in shapes else None for shapes in (actual, expected))
            raise ConversionError(
                f"{name}: the weights give {by_weights}, the configuration {by_config} (None: no such tensor); give "
                "the configuration that belongs to the weights"
            )
    return {name: tensor.detach().clone().contiguous() for name, tensor in result.items()}


def _find(family: str) -> LayerFamily:
    if family not in LAYER_FAMILIES:
        raise ConversionError(f"family = {family!r} is unknown; known: {', '.join(LAYER_FAMILIES)}")
    return LAYER_FAMILIES[family]


def _mapping(config: Any) -> Mapping[str, Any]:
    return config if isinstance(config, Mapping) else config.to_dict()


def _locate(family: LayerFamily, tensors: Mapping[str, torch.Tensor], layer: int) -> Weights:
    """The layer of that number: the one whose prefix has it as a part, or the only one of a layer stored alone."""
    prefixes = [
        name.removesuffix(anchor)
        for anchor in family.anchors
        for name in tensors
        if (name == anchor or name.endswith(f".{anchor}")) and "crossattention" not in name
    ]
    chosen = [prefix for prefix in prefixes if str(layer) in prefix.split(".")]
    if not chosen and layer == 0 and not any(part.isdigit() for prefix in prefixes for part in prefix.split(".")):
        chosen = prefixes
    if len(chosen) != 1:
        raise ConversionError(
            f"layer = {layer}: state_dict has {len(chosen)} layers of that number with {' or '.join(family.anchors)} "
            f"({abbreviate(prefixes) or 'none of any number'})"
        )
    return Weights(tensors, chosen[0])


def _refuse(config: Mapping[str, Any], field: str, supported: Any, reason: str) -> None:
    if config.get(field, supported) != supported:
        raise ConversionError(f"{field} = {config[field]!r}: {reason}")


def _split(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Tensors:
    """Query, key and value stacked in this order, (3D, D) and (3D,)."""
    parts = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    return {
        f"{name}.{part}": chunk
        for part, tensor in parts.items()
        for name, chunk in zip(LINEARS, tensor.chunk(3), strict=True)
    }


def _clamp_len(config: Mapping[str, Any]) -> dict[str, Any]:
    length = config.get("clamp_len", -1)
    return {"clamp_len": length if length and length > 0 else None}


def _transformer_xl_options(config: Mapping[str, Any]) -> dict[str, Any]:
    _refuse(config, "attn_type", 0, "only 0, with the relative positions of the paper, has a counterpart here")
    return _clamp_len(config)


def _transformer_xl(weights: Weights, config: Mapping[str, Any]) -> Tensors:
    """qkv_net (3D, D) without biases; the two biases of the scheme may be stored once for all layers."""
    result = _split(weights["qkv_net.weight"])
    result["distance_embedding.r_net.weight"] = weights["r_net.weight"]
    for name in ("r_w_bias", "r_r_bias"):
        result[f"distance_embedding.{name}"] = (weights if name in weights else weights.beside(name))[name]
    return result


def _xlnet(weights: Weights, config: Mapping[str, Any]) -> Tensors:
    """q, k, v (D, H, d), the product being x·w."""
    result = {f"{name}.weight": weights[name[0]].flatten(1).T for name in LINEARS}
    names = ("r", "r_w_bias", "r_r_bias", "r_s_bias", "seg_embed")
    return result | {f"distance_embedding.{name}": weights[name] for name in names}


def _deberta_options(config: Mapping[str, Any]) -> dict[str, Any]:
    _refuse(config, "relative_attention", True, "this DeBERTa has no relative positions")
    _refuse(config, "talking_head", False, "scores that are mixed between heads have no counterpart here")
    span, buckets = config.get("max_relative_positions", -1), config.get("position_buckets", -1)
    kinds = config.get("pos_att_type") or []
    return {
        "pos_att_type": [kind.strip() for kind in kinds.split("|")] if isinstance(kinds, str) else list(kinds),
        "max_distance": span if span > 0 else config.get("max_position_embeddings", 512),
        "buckets": buckets if buckets > 0 else None,
        "share_att_key": bool(config.get("share_att_key", False)),
        "norm_rel_ebd": "layer_norm" if "layer_norm" in config.get("norm_rel_ebd", "none").split("|") else "none",
    }


def _position_projections(weights: Weights, key: str, query: str) -> Tensors:
    """Without the bias of the key projection, which would add the same to all scores of a query."""
    names = {f"{key}.weight": "pos_key_proj.weight"}
    names |= {f"{query}.{part}": f"pos_query_proj.{part}" for part in ("weight", "bias")}
    return {f"distance_embedding.{name}": weights[source] for source, name in names.items() if source in weights}


def _deberta(weights: Weights, config: Mapping[str, Any]) -> Tensors:
    """Version 1: in_proj (3D, D) has q, k and v of one head after those of another; keys have no bias."""
    heads = config["num_attention_heads"]
    parts = weights["in_proj.weight"].unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(1, 2)
    result = {f"{name}.weight": part for name, part in zip(LINEARS, parts, strict=True)}
    result |= {"query.bias": weights["q_bias"], "value.bias": weights["v_bias"]}
    return result | _position_projections(weights, "pos_proj", "pos_q_proj")


def _deberta_v2(weights: Weights, config: Mapping[str, Any]) -> Tensors:
    """Versions 2 and 3, whose own projections may also serve for the positions."""
    result = {f"{name}.{part}": weights[f"{name}_proj.{part}"] for name in LINEARS for part in ("weight", "bias")}
    if config.get("share_att_key"):
        return result
    return result | _position_projections(weights, "pos_key_proj", "pos_query_proj")


def _deberta_shared(weights: Weights, config: Mapping[str, Any]) -> Tensors:
    encoder = weights.beside("rel_embeddings.weight")
    normed = _deberta_options(config)["norm_rel_ebd"] == "layer_norm"
    names = ("rel_embeddings.weight", *(("LayerNorm.weight", "LayerNorm.bias") if normed else ()))
    return {name: encoder[name] for name in names}


def _roformer_options(config: Mapping[str, Any]) -> dict[str, Any]:
    _refuse(config, "rotary_value", False, "rotated values have no counterpart here: the output would be absolute")
    return {"pairing": "adjacent"}


def _roformer(weights: Weights, config: Mapping[str, Any]) -> Tensors:
    return {f"{name}.{part}": weights[f"{name}.{part}"] for name in LINEARS for part in ("weight", "bias")}


def _tener(weights: Weights, config: Mapping[str, Any]) -> Tensors:
    """qkv_linear (3D, D) without biases."""
    names = ("r_r_bias", "r_w_bias")
    return _split(weights["qkv_linear.weight"]) | {f"distance_embedding.{name}": weights[name] for name in names}


def _tupe(weights: Weights, config: Mapping[str, Any]) -> Tensors:
    """fairseq's in_proj (3D, D) and (3D,)."""
    parts = ("in_proj_weight", "in_proj_bias") if "in_proj_weight" in weights else ("in_proj.weight", "in_proj.bias")
    return _split(*(weights[part] for part in parts))


def _tupe_shared(weights: Weights, config: Mapping[str, Any]) -> Tensors:
    encoder = weights.beside("pos.weight")
    names = ["pos.weight"]
    names += [f"{name}.{part}" for name in ("pos_ln", "pos_q_linear", "pos_k_linear") for part in ("weight", "bias")]
    names += ["relative_attention_bias.weight"] if config.get("rel_pos") else []
    return {name: encoder[name] for name in names}


NARROW = {"layer_norm_eps": 1e-7}
LAYER_FAMILIES = {
    "transformer_xl": LayerFamily("transformer_xl", ("qkv_net.weight",), _transformer_xl_options, _transformer_xl),
    "xlnet": LayerFamily("xlnet", ("q",), lambda config: {**_clamp_len(config), "segments": True}, _xlnet),
    "deberta": LayerFamily("deberta", ("in_proj.weight",), _deberta_options, _deberta, _deberta_shared, NARROW),
    "deberta_v2": LayerFamily(
        "deberta", ("query_proj.weight",), _deberta_options, _deberta_v2, _deberta_shared, NARROW
    ),
    "roformer": LayerFamily("rope", ("query.weight",), _roformer_options, _roformer),
    "tener": LayerFamily("tener", ("qkv_linear.weight",), lambda config: {"scale": bool(config.get("scale"))}, _tener),
    "tupe": LayerFamily(
        "tupe",
        ("in_proj_weight", "in_proj.weight"),
        lambda config: {"variant": "R" if config.get("rel_pos") else "A"},
        _tupe,
        _tupe_shared,
    ),
}
