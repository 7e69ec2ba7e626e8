"""Tiny encoders of Transformers for the tests of `optimize`: architectures, heads of others, and comparisons."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from oracles import tiny_model
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_relpos import RelPosBertModel


WORDS, LONGEST = 60, 64
PAD, MASK, OTHER = 0, 4, 7  # tokens from 10 on are words
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": LONGEST,
    "type_vocab_size": 2,
    "initializer_range": 0.3,  # as large as in a trained model, or all attention is flat
    "pad_token_id": PAD,
}
T5 = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "pad_token_id": PAD}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "initializer_factor": 3.0}
SHARED = {"num_key_value_heads": 1, "head_dim": 8}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "mask_token_id": MASK}
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
BUCKETS = {"position_buckets": 8, "share_att_key": True}
LAYERS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
GEMMA = {**SHARED, **LAYERS, "use_cache": False}
ESM = {"position_embedding_type": "rotary", **IDS}
XLNET = {"d_inner": 24, "d_head": 8, "use_mems_eval": False, "max_position_embeddings": None}
BART = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}


class RemoteConfig(transformers.BertConfig):
    """Of `RemoteModel`."""

    model_type = "remote"


class RemoteModel(PreTrainedModel):
    """As code beside a checkpoint: absolute positions, masks and attention of its own, no keywords that it ignores."""

    config_class = RemoteConfig

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        rate = config.hidden_dropout_prob
        layer = nn.TransformerEncoderLayer(config.hidden_size, 2, 24, rate, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList([layer])
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids, attention_mask, token_type_ids=None, position_ids=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        columns = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        states = self.words(input_ids) + self.places(columns)
        for layer in self.layers:
            states = layer(states, src_key_padding_mask=attention_mask == 0)
        return BaseModelOutput(last_hidden_state=states)


# Model, configuration, fields; without those that the installed Transformers does not have.
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("BertModel", "BertConfig", {}),
    "RoBERTa": ("RobertaModel", "RobertaConfig", {"pad_token_id": 1}),
    "DistilBERT": ("DistilBertModel", "DistilBertConfig", {"hidden_dim": 24}),
    "ELECTRA": ("ElectraModel", "ElectraConfig", {"embedding_size": 24}),
    "ALBERT": ("AlbertModel", "AlbertConfig", {"embedding_size": 24}),
    "DeBERTa v1": ("DebertaModel", "DebertaConfig", DISENTANGLED),
    "DeBERTa v2": ("DebertaV2Model", "DebertaV2Config", DISENTANGLED | BUCKETS),
    "MPNet": ("MPNetModel", "MPNetConfig", {"pad_token_id": 1}),
    "RoFormer": ("RoFormerModel", "RoFormerConfig", {"embedding_size": 24}),
    "XLNet": ("XLNetModel", "XLNetConfig", XLNET),
    "T5": ("T5EncoderModel", "T5Config", T5),
    "mT5": ("MT5EncoderModel", "MT5Config", T5),
    "UMT5": ("UMT5EncoderModel", "UMT5Config", T5),
    "ModernBERT": ("ModernBertModel", "ModernBertConfig", {"local_attention": 16, "mlp_dropout": 0.1, **IDS}),
    "NomicBERT": ("NomicBertModel", "NomicBertConfig", {"head_dim": 8}),
    "GTE": ("GteModel", "GteConfig", {}),
    "EuroBERT": ("EuroBertModel", "EuroBertConfig", {**SHARED, **IDS}),
    "Jina v3": ("JinaEmbeddingsV3Model", "JinaEmbeddingsV3Config", {"pad_token_id": 1}),
    "ESM-2": ("EsmModel", "EsmConfig", ESM),
    "ESM-2, token dropout": ("EsmModel", "EsmConfig", {**ESM, "token_dropout": True}),
    "Qwen3": ("Qwen3Model", "Qwen3Config", {**SHARED, "use_cache": False}),
    "Qwen3 with a cache": ("Qwen3Model", "Qwen3Config", SHARED),
    "Llama": ("LlamaModel", "LlamaConfig", {**SHARED, "use_cache": False}),
    "Gemma3": ("Gemma3TextModel", "Gemma3TextConfig", GEMMA),
    "Gemma3, two-sided": ("Gemma3TextModel", "Gemma3TextConfig", {**GEMMA, "use_bidirectional_attention": True}),
    "LFM2": ("Lfm2Model", "Lfm2Config", {"num_key_value_heads": 1, "full_attn_idxs": [1], "use_cache": False}),
    "UltraBERT": ("UltrabertModel", "UltrabertConfig", {**SHARED, **LAYERS, **IDS}),
    "BART's encoder": ("transformers.models.bart.modeling_bart:BartEncoder", "BartConfig", BART),
    "remote code": ("encoders:RemoteModel", "encoders:RemoteConfig", {}),
}
SCHEMES = ("absolute", "relative_key", "deberta", "harmonic")
# With rotations by `rope_parameters`, and the names of kinds of layers that have their own.
ROTARY: dict[str, tuple[str, ...]] = dict.fromkeys(("NomicBERT", "GTE", "EuroBERT", "Jina v3", "Qwen3", "Llama"), ())
ROTARY |= dict.fromkeys(("ModernBERT", "Gemma3", "UltraBERT"), ("full_attention", "sliding_attention"))
TRAINED = 24  # tokens of rows that rotations were made for
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope")


def _found(name: str) -> Any:
    module, _, attribute = name.rpartition(":")
    return getattr(__import__(module, fromlist=[attribute]) if module else transformers, attribute, None)


ARCHITECTURES = {name: each for name, each in ARCHITECTURES.items() if _found(each[0]) is not None}


def rope_fields(name: str, rope_type: str) -> dict[str, Any]:
    """Fields of a configuration for rotations of a kind."""
    parameters: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 100.0}
    if rope_type != "default":
        parameters |= {"factor": 4.0, "original_max_position_embeddings": TRAINED}
    if rope_type == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    kinds = ROTARY[name]
    found = {"rope_parameters": {kind: dict(parameters) for kind in kinds} if kinds else parameters}
    # "dynamic" takes the trained length from here
    return found | ({} if rope_type == "default" else {"max_position_embeddings": TRAINED})


def build(
    name: str, dtype: torch.dtype = torch.float64, task: str = "", dropout: float = 0.0, **fields: Any
) -> nn.Module:
    """An encoder, random in every parameter, in evaluation.

    Args:
        task: "SequenceClassification" and the like for a model of Transformers around it.
        dropout: the rate of all dropout.
        fields: of its configuration.
    """
    torch.manual_seed(0)
    if name in SCHEMES:
        model = tiny_model(RelPosBertModel, name, vocab_size=WORDS, max_position_embeddings=LONGEST, **fields)
    else:
        kind, config_kind, own = ARCHITECTURES[name]
        values = {key: value for key, value in (SIZES | own | fields).items() if value is not None}
        config = _found(config_kind)(**values)
        for field in config.to_dict():
            if "drop" in field and field not in ("token_dropout", "encoder_layerdrop"):
                setattr(config, field, dropout)
        model = getattr(transformers, f"AutoModelFor{task}").from_config(config) if task else _found(kind)(config)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = dropout
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:  # not zeros in checkpoints either
            nn.init.normal_(part.weight.data[part.padding_idx], std=0.3)
    for parameter in model.parameters():  # biases and LayerNorms begin as zeros and ones
        nn.init.normal_(parameter, std=0.3) if parameter.dim() == 1 else None
    return model.to(dtype).eval()


def tasks_of(name: str) -> tuple[str, ...]:
    """The models of Transformers around an encoder."""
    tasks = ("SequenceClassification", "TokenClassification", "MaskedLM", "MultipleChoice")
    if name not in ARCHITECTURES or name in ("BART's encoder", "remote code"):
        return ()
    config = _found(ARCHITECTURES[name][1])
    return tuple(task for task in tasks if config in getattr(transformers, f"AutoModelFor{task}")._model_mapping)


class Head(nn.Module):
    """A model of somebody else around an encoder: what its users read of the states of a batch."""

    def __init__(self, encoder: Any, kind: str) -> None:
        super().__init__()
        self.encoder, self.kind = encoder, kind
        width = encoder.config.hidden_size
        self.lstm = nn.LSTM(width, 4, bidirectional=True, batch_first=True)
        self.convolution, self.norm = nn.Conv1d(width, 4, 3, padding=1), nn.BatchNorm1d(width)
        self.to(next(encoder.parameters()).dtype)

    def forward(self, input_ids=None, attention_mask=None, **others):
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **others)[0]
        if self.kind == "mean of tokens":
            mask = attention_mask[..., None].to(states.dtype)
            return (states * mask).sum(1) / mask.sum(1).clamp(min=1)
        if self.kind == "BiLSTM":
            return self.lstm(states)[0]
        if self.kind == "convolution":
            return self.convolution(states.transpose(1, 2)).transpose(1, 2)
        if self.kind == "BatchNorm":
            return self.norm(states.transpose(1, 2)).transpose(1, 2)
        return {"mean": states.mean, "maximum": states.amax, "last": lambda dim: states[:, -1]}[self.kind](1)


HEADS = ("mean of tokens", "BiLSTM", "convolution", "BatchNorm", "mean", "maximum", "last")


def tokens(real: torch.Tensor, pad: int = PAD, seed: int = 1) -> dict[str, torch.Tensor]:
    """Words under a mask (B, L), and padding."""
    words = torch.randint(10, WORDS, real.shape, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": torch.where(real, words, torch.tensor(pad)), "attention_mask": real.long()}


def pad_of(model: Any) -> int:
    """The padding token of an encoder's configuration."""
    found: int = (model.encoder if isinstance(model, Head) else model).config.pad_token_id
    return found


def tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model's outputs by name, or by number in a tuple."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from tensors_of(each, f"{name}.{key}")
    elif isinstance(value, tuple | list):
        for index, each in enumerate(value):
            yield from tensors_of(each, f"{name}.{index}")


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest, as a share of the largest value; none where Transformers has NaN, as in rows without tokens."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    if not theirs.numel():
        return 0.0
    same = theirs.isnan() | (theirs.isinf() & (ours == theirs))
    ours, theirs = (each.detach().double().masked_fill(same, 0.0) for each in (ours, theirs))
    return float((ours - theirs).abs().nan_to_num(float("inf")).max() / theirs.abs().max().clamp(min=1e-30))
