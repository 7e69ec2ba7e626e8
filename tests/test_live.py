"""`optimize` of attention alone: a live stock model with our attention, beside an untouched copy of itself."""

import random
from functools import partial

import encoders
import pytest
import torch
from stock import older_than
from transformers import (
    BertConfig,
    BertModel,
    DebertaConfig,
    DebertaModel,
    DebertaV2Config,
    DebertaV2Model,
    MPNetConfig,
    MPNetModel,
    MT5Config,
    MT5EncoderModel,
    RoFormerConfig,
    RoFormerModel,
    T5Config,
    T5EncoderModel,
    XLNetConfig,
    XLNetModel,
)

from hf_relpos import optimize
from hf_relpos.attention.backends import chunked as backend_chunked
from hf_relpos.host.declarations import T5_BIAS


attention_alone = partial(optimize, dtype=None, unpad=False)
SIZES = encoders.SIZES | {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4}
RELATIVE = encoders.DISENTANGLED
V3 = SIZES | RELATIVE | encoders.BUCKETS | {"norm_rel_ebd": "layer_norm", "position_biased_input": False}
V3 |= {"max_relative_positions": -1}
T5_SIZES = encoders.T5 | {"vocab_size": 50, "d_model": 32, "num_heads": 4, "dropout_rate": 0.0}
XLNET_SIZES = dict(vocab_size=50, d_model=32, n_layer=2, n_head=4, d_inner=24, initializer_range=0.3)
XLNET_SIZES["ff_activation"] = "gelu"
V1, V2 = (DebertaModel, DebertaConfig), (DebertaV2Model, DebertaV2Config)
UNBUCKETED = {"position_buckets": -1, "max_relative_positions": 6, "norm_rel_ebd": "none"}
MODELS = {
    "v3": (*V2, V3),
    "v2 with projections of its own": (*V2, V3 | {"share_att_key": False}),
    "v2 c2p": (*V2, V3 | {"pos_att_type": ["c2p"]}),
    "v2 p2c": (*V2, V3 | {"pos_att_type": "p2c", "share_att_key": False}),
    "v2 no terms": (*V2, V3 | {"pos_att_type": []}),
    "v2 without buckets": (*V2, V3 | UNBUCKETED),
    "v2 with positions at the input": (*V2, V3 | {"position_biased_input": True}),
    "v2 with a convolution": (*V2, V3 | {"conv_kernel_size": 3, "conv_act": "gelu"}),
    "v2 absolute": (*V2, {**SIZES, "relative_attention": False, "pos_att_type": []}),
    "v1": (*V1, {**SIZES, **RELATIVE, "max_relative_positions": -1}),
    "v1 c2p": (*V1, {**SIZES, **RELATIVE, "pos_att_type": ["c2p"]}),
    "v1 p2c, clipped": (*V1, {**SIZES, **RELATIVE, "pos_att_type": ["p2c"], "max_relative_positions": 5}),
    "v1 absolute": (*V1, {**SIZES, "relative_attention": False}),
    "MPNet": (MPNetModel, MPNetConfig, {**SIZES, "relative_attention_num_buckets": 32}),
    "RoFormer": (RoFormerModel, RoFormerConfig, {**SIZES, "embedding_size": 24}),
    "RoFormer with rotated values": (RoFormerModel, RoFormerConfig, {**SIZES, "rotary_value": True}),
    "T5": (T5EncoderModel, T5Config, T5_SIZES),
    "mT5": (MT5EncoderModel, MT5Config, T5_SIZES | {"d_kv": 12, "feed_forward_proj": "gated-gelu"}),
    "XLNet": (XLNetModel, XLNetConfig, XLNET_SIZES),
    "XLNet, clamped": (XLNetModel, XLNetConfig, XLNET_SIZES | {"clamp_len": 4}),
}
WITHOUT_TOKEN_TYPES = ("MPNet", "T5", "mT5")
# Up to Transformers 5.14 they are computed by length alone.
ACCELERATED = [name for name in MODELS if "T5" not in name or T5_BIAS.is_released]
T5 = ["T5"] if "T5" in ACCELERATED else []
PADDING = {"none": None, "right": [15, 9, 12], "left": [15, 9, 12]}


def build(name: str, dtype: torch.dtype = torch.float64, **changes) -> torch.nn.Module:
    head, config, fields = MODELS[name]
    torch.manual_seed(0)
    model = head(config(**fields | changes)).to(dtype).eval()
    for parameter in model.parameters():  # biases and LayerNorms begin as zeros and ones
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() == 1 else None
    return model


def batch(padding: str = "none", length: int = 15, seed: int = 1, token_types: bool = True) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    inputs = {"input_ids": torch.randint(3, 50, (3, length)), "token_type_ids": torch.randint(0, 2, (3, length))}
    if not token_types:
        del inputs["token_type_ids"]
    lengths = PADDING[padding]
    if lengths is not None:
        real = torch.arange(length) < torch.tensor(lengths)[:, None]
        inputs["attention_mask"] = (real if padding == "right" else real.flip(1)).long()
    return inputs


def forward_and_gradients(model, inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The first output, and the gradients of a loss that looks at every position, padding included."""
    model.zero_grad()
    out = model(**inputs)[0]
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_accelerated_as_stock(model, inputs, bound: float) -> None:
    """The output and all gradients of a model are the same once its attention is accelerated."""
    before, gradients_before = forward_and_gradients(model, inputs)
    handle = attention_alone(model)
    assert [each.layers for each in handle.encoders] == [model.config.num_hidden_layers] and not handle.skipped
    after, gradients_after = forward_and_gradients(model, inputs)
    assert_equal_numbers(after, before, bound)
    assert gradients_before.keys() == gradients_after.keys()
    for parameter, gradient in gradients_before.items():
        assert_equal_numbers(gradients_after[parameter], gradient, bound)


def tolerance(name: str) -> float:
    """Of float64; up to Transformers 5.14 stock T5 has a softmax in float32."""
    return 1e-4 if "T5" in name and not T5 else 1e-10


def assert_equal_numbers(ours, theirs, tolerance: float) -> None:
    """Where stock has numbers: up to Transformers 5.14 T5 has none in rows without tokens."""
    ours, theirs = (numbers.masked_fill(theirs.isnan(), 0.0) for numbers in (ours, theirs))
    error, size = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    assert error <= tolerance * max(1.0, size)


def assert_same_after(accelerate, model, outputs, bound: float) -> None:
    """The tensors that a function returns are the same once its model is accelerated."""
    before = outputs()
    accelerate(model)
    for ours, theirs in zip(outputs(), before, strict=True):
        assert_equal_numbers(ours, theirs, bound)


@pytest.fixture(params=["dense", "chunked"])
def backend(request, monkeypatch):
    """Small calls run on a dense bias and large ones in chunks: both, at a size that a test can afford."""
    if request.param == "chunked":
        monkeypatch.setattr(backend_chunked, "FEWEST_SCORES", 0)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", ACCELERATED)
def test_outputs_and_gradients_are_those_of_stock(name, padding, backend):
    model, inputs = build(name), batch(padding, token_types=name not in WITHOUT_TOKEN_TYPES)
    assert_accelerated_as_stock(model, inputs, tolerance(name))


@pytest.mark.parametrize("name", ACCELERATED)
def test_outputs_and_gradients_in_float32(name, backend):
    """To the bound that docs/live.md states."""
    model, inputs = build(name, torch.float32), batch("right", token_types=name not in WITHOUT_TOKEN_TYPES)
    assert_accelerated_as_stock(model, inputs, 1e-5)


@pytest.mark.parametrize("accelerate", [attention_alone, optimize])
@pytest.mark.parametrize("name", ["v3", "v1"])
def test_forward_mode_and_transforms_of_position_parameters(name, accelerate, backend):
    """Without gradients, the projections of an earlier call are at hand, and have no derivative."""
    model, inputs = build(name), batch("right")
    chosen = {key: value.detach() for key, value in model.named_parameters() if "rel_embeddings" in key}
    change = {key: torch.cos(value) for key, value in chosen.items()}
    several = {key: torch.stack([value, 2 * value]) for key, value in chosen.items()}

    def total(chosen):
        return torch.func.functional_call(model, chosen, (), inputs)[0][inputs["attention_mask"] != 0].sin().sum()

    def found():
        model(**inputs)
        gradients = torch.func.grad(total)(chosen)
        return [torch.func.jvp(total, (chosen,), (change,))[1], torch.func.vmap(total)(several), *gradients.values()]

    with torch.no_grad():
        assert found()[0].abs() > 1e-3
        assert_same_after(accelerate, model, found, 1e-9)


@pytest.mark.parametrize("name", ["v3", "v1", "MPNet", "RoFormer", *T5])
def test_rows_that_are_all_padding_are_as_stock(name, backend):
    """Outputs and gradients of a loss that looks at padding, too."""
    model, inputs = build(name), batch("right", token_types=name not in WITHOUT_TOKEN_TYPES)
    inputs["attention_mask"][1] = 0
    assert_accelerated_as_stock(model, inputs, tolerance(name))


def random_deberta(draw: random.Random) -> torch.nn.Module:
    heads, size = draw.choice([1, 2, 3, 4]), draw.choice([4, 6, 8, 16])
    kinds = draw.choice([["c2p"], ["p2c"], ["c2p", "p2c"], "p2c|c2p", []])
    fields = SIZES | {"hidden_size": heads * size, "num_attention_heads": heads}
    fields |= {"num_hidden_layers": draw.choice([1, 3]), "relative_attention": draw.random() < 0.9}
    fields |= {"pos_att_type": kinds, "max_relative_positions": draw.choice([-1, 20, 100])}
    fields |= {"max_position_embeddings": 128, "type_vocab_size": draw.choice([0, 2])}
    fields |= {"position_biased_input": draw.random() < 0.5}
    if draw.random() < 0.4:
        return DebertaModel(DebertaConfig(**fields))
    norm = draw.choice(["none", "layer_norm"]) if fields["relative_attention"] else "none"
    own = {"position_buckets": draw.choice([-1, 4, 8, 32]), "share_att_key": draw.random() < 0.5}
    own |= {"norm_rel_ebd": norm, "conv_kernel_size": draw.choice([0, 0, 3]), "conv_act": "gelu"}
    return DebertaV2Model(DebertaV2Config(**fields | own))


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.full) for n in range(4, 60))])
def test_random_configurations_masks_and_sizes(seed, monkeypatch):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(backend_chunked, "FEWEST_SCORES", draw.choice([0, 1 << 19]))
    model = random_deberta(draw).double().eval()
    rows, length = draw.randint(1, 3), draw.randint(1, 90)
    real = torch.rand(rows, length) < draw.choice([0.5, 0.9, 1.0])
    inputs = {"input_ids": torch.randint(3, 50, (rows, length)), "attention_mask": real.long()}
    assert_accelerated_as_stock(model, inputs, 1e-9)


@pytest.mark.parametrize("name", ["v3", "v2 without buckets", "v1", "MPNet", "RoFormer", *T5, "XLNet"])
def test_many_chunks_of_queries_are_as_stock(name, monkeypatch):
    """Longer than a chunk, the relative positions and, with all buckets, the distances that have one each."""
    monkeypatch.setattr(backend_chunked, "FEWEST_SCORES", 0)
    longer = {} if name in ("T5", "XLNet") else {"max_position_embeddings": 400}
    model = build(name, **longer | ({"max_relative_positions": 50} if name in ("v3", "v1") else {}))
    torch.manual_seed(2)
    inputs = {"input_ids": torch.randint(3, 50, (2, 301)), "attention_mask": torch.ones(2, 301, dtype=torch.long)}
    inputs["attention_mask"][1, 170:] = 0
    assert_accelerated_as_stock(model, inputs, tolerance(name))


@pytest.mark.parametrize("padding", [pytest.param("none", marks=pytest.mark.full), "right"])
@pytest.mark.parametrize("name", ACCELERATED)
def test_attention_weights_and_hidden_states_are_those_of_stock(name, padding, backend):
    model, inputs = build(name), batch(padding, token_types=name not in WITHOUT_TOKEN_TYPES)

    def found():
        outputs = model(**inputs, output_attentions=True, output_hidden_states=True)
        assert len(outputs.hidden_states) == 3
        assert len(outputs.attentions) == (0 if "T5" in name else 2)  # with sdpa T5 has none
        return outputs.attentions + outputs.hidden_states

    assert_same_after(attention_alone, model, found, tolerance(name))


def test_what_is_left_is_named_with_its_reason():
    talking = DebertaModel(DebertaConfig(**SIZES, **RELATIVE, talking_head=True))
    handle = attention_alone(talking)
    assert not handle.encoders and "skipped the model" in str(handle)
    assert "no level computes what it does on a probe batch (difference: attention alone" in str(handle)

    model = build("v3")
    attention = type(model.encoder.layer[1].attention.self)
    model.encoder.layer[1].attention.self.__class__ = type("Mine", (attention,), {})
    assert not attention_alone(model).encoders

    model = build("v3")
    hooked = model.encoder.layer[0].attention.self
    hooked.forward = hooked.forward
    assert not attention_alone(model).encoders

    assert "no module inside maps tokens" in str(attention_alone(torch.nn.Linear(2, 2)))
    bert = attention_alone(BertModel(BertConfig(**SIZES)))
    assert "(BertModel): padding is left to Transformers" in str(bert)
    with pytest.raises(TypeError, match="takes a torch"):
        attention_alone("microsoft/deberta-v3-base")


class Holder:
    """Raises an error of its own for names that it does not have."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        raise KeyError(name)


def test_optimize_object_with_names_of_its_own():
    assert [each.name for each in attention_alone(Holder(build("v3"))).encoders] == ["model"]


def test_xlnet_predictions_under_a_permutation_go_to_stock():
    model, inputs = build("XLNet", torch.float32), batch(token_types=False)
    perm_mask = torch.zeros(3, 15, 15)
    perm_mask[:, :, -1] = 1
    target_mapping = torch.zeros(3, 1, 15)
    target_mapping[:, 0, -1] = 1
    calls = [inputs | {"perm_mask": perm_mask}, inputs | {"perm_mask": perm_mask, "target_mapping": target_mapping}]
    assert_same_after(attention_alone, model, lambda: [model(**each)[0] for each in calls], 1e-5)


def test_decoders_are_left():
    """They attend to the left only, or half of a batch backwards."""
    for model, reason in (
        (RoFormerModel(RoFormerConfig(**SIZES, is_decoder=True)), "difference: attention alone"),
        (XLNetModel(XLNetConfig(**XLNET_SIZES, attn_type="uni")), "its own forward fails"),  # with a mask
        (XLNetModel(XLNetConfig(**XLNET_SIZES, bi_data=True)), "attention alone fails"),
    ):
        handle = attention_alone(model)
        assert not handle.encoders and reason in handle.skipped[0].reason


@pytest.mark.skipif(older_than("5.14"), reason="stock MPNet has no masks by pairs")
def test_additive_masks_of_any_kind(backend):
    """A soft mask, one that hides some keys from some queries, and one that hides all of a row's keys."""
    model = build("MPNet")
    inputs = {"input_ids": batch()["input_ids"]}
    lowest = torch.tensor(torch.finfo(torch.float64).min, dtype=torch.float64)
    soft = torch.randn(3, 1, 15, 15, dtype=torch.float64)
    pairs = torch.where(soft > 0.5, lowest, torch.zeros_like(lowest))
    rows = torch.zeros(3, 1, 15, 15, dtype=torch.float64)
    rows[1] = lowest
    calls = [inputs | {"attention_mask": mask} for mask in (soft, pairs, rows)]
    assert_same_after(attention_alone, model, lambda: [model(**each)[0] for each in calls], 1e-10)


@pytest.mark.parametrize("name", ["v3", "v1"])
def test_calls_that_are_not_covered_go_to_stock(name):
    """Explicit relative positions, and the second look of the enhanced mask decoder."""
    model, states = build(name), torch.randn(2, 7, 32, dtype=torch.float64)
    mask = (torch.arange(7) < torch.tensor([7, 5])[:, None]).float()
    relative = (torch.arange(7)[:, None] - torch.arange(7)).clamp(-3, 3)[None]
    calls = [{"relative_pos": relative}, *([{"query_states": states.flip(1)}] if name == "v3" else [])]

    def outputs():
        pairs = model.encoder(states, mask[:, None] * torch.ones(7, 7).tril())[0]
        return [pairs, *(model.encoder(states, mask, **more)[0] for more in calls)]

    assert_same_after(attention_alone, model, outputs, 1e-10)
