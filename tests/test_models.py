"""Every scheme under every head: what a user of a BERT does with it, and what must not change its output."""

import contextlib
import itertools
import math

import pytest
import torch
import transformers
from errors import raises
from huggingface_hub.errors import StrictDataclassFieldValidationError
from oracles import ON_TOKENS, extra_inputs, padding, tiny_config, tiny_model, uncompiled
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from hf_relpos import (
    RelPosBertForMaskedLM,
    RelPosBertForSequenceClassification,
    RelPosBertLMHeadModel,
    RelPosBertModel,
)
from hf_relpos.attention.dispatch import AUTO, BY_NAME
from hf_relpos.models.capabilities import probe_call, supported_implementations
from hf_relpos.models.modeling_relpos_bert import HEADS
from hf_relpos.schemes import SCHEMES
from hf_relpos.schemes.registry import build_input


pytestmark = pytest.mark.usefixtures("none_too_short")
BATCH, CHOICES, LENGTH, WORDS, WIDTH = 2, 3, 9, 50, 24
RELATIVE = [name for name, scheme in SCHEMES.items() if scheme.relative]
UNBOUNDED = [name for name, scheme in SCHEMES.items() if scheme.out_of_range[0] != "error"]
CAPABLE = {name: supported_implementations(tiny_config(name)) for name in SCHEMES}
ON_CPU = ("eager", "sdpa", "relpos")  # those that run here without compiling

# (scheme, backend) for every backend that can run it
PAIRS = [(name, backend) for name in ON_TOKENS for backend in ON_CPU if backend in CAPABLE[name]]
every_scheme = pytest.mark.parametrize("name", ON_TOKENS)
every_pair = pytest.mark.parametrize("name, backend", PAIRS, ids=["-".join(pair) for pair in PAIRS])
MODELS = {
    f"{name}-{head.__name__.removeprefix('RelPosBert')}": (name, auto)
    for name in SCHEMES
    for auto, head in HEADS.items()
    if name in ON_TOKENS or auto != "AutoModelForMultipleChoice"  # whose stock forward knows no other inputs
}
COMBINED = ("relative_key+alibi", "tupe+disan", "absolute+t5", "rope+t5", "shaw+disan+relation", "huang_m3+alibi")
MODELS |= {f"{names}-MaskedLM": (names.split("+"), "AutoModelForMaskedLM") for names in COMBINED}
every_model = pytest.mark.parametrize("name, auto", list(MODELS.values()), ids=list(MODELS))
encoder_and_decoder = pytest.mark.parametrize("is_decoder", [False, True], ids=["encoder", "decoder"])


def token_ids(*shape):
    """Random words; 0 is padding and not among them."""
    return torch.randint(1, WORDS, shape)


def head_model(name, auto, **overrides):
    """The head that this Auto class gives, in eval mode."""
    labels = {} if auto == "AutoModelForQuestionAnswering" else {"num_labels": 4}
    return tiny_model(HEADS[auto], name, **{"is_decoder": auto == "AutoModelForCausalLM", **labels, **overrides})


def head_inputs(auto, name):
    """Inputs with padding, arguments that make the head return a loss, and the shapes of its outputs."""
    rows = (BATCH, CHOICES) if auto == "AutoModelForMultipleChoice" else (BATCH,)
    real = padding([LENGTH, LENGTH - 4], LENGTH)
    real = real[:, None].expand(*rows, LENGTH) if len(rows) == 2 else real
    inputs = {
        "input_ids": token_ids(*rows, LENGTH) * real,
        "attention_mask": real.long(),
        "token_type_ids": (torch.arange(LENGTH) > 4).long().expand(*rows, LENGTH),
        **extra_inputs(name, BATCH * (CHOICES if len(rows) == 2 else 1), LENGTH),
    }
    words = token_ids(BATCH, LENGTH)
    per_token = {"logits": (BATCH, LENGTH, WORDS)}
    labels, shapes = {
        "AutoModel": ({}, {"last_hidden_state": (BATCH, LENGTH, WIDTH), "pooler_output": (BATCH, WIDTH)}),
        "AutoModelForPreTraining": (
            {"labels": words, "next_sentence_label": torch.tensor([0, 1])},
            {"prediction_logits": (BATCH, LENGTH, WORDS), "seq_relationship_logits": (BATCH, 2)},
        ),
        "AutoModelForMaskedLM": ({"labels": words}, per_token),
        "AutoModelForCausalLM": ({"labels": words}, per_token),
        "AutoModelForNextSentencePrediction": ({"labels": torch.tensor([1, 0])}, {"logits": (BATCH, 2)}),
        "AutoModelForSequenceClassification": ({"labels": torch.tensor([3, 0])}, {"logits": (BATCH, 4)}),
        "AutoModelForMultipleChoice": ({"labels": torch.tensor([2, 0])}, {"logits": (BATCH, CHOICES)}),
        "AutoModelForTokenClassification": ({"labels": words % 4}, {"logits": (BATCH, LENGTH, 4)}),
        "AutoModelForQuestionAnswering": (
            {"start_positions": torch.tensor([2, 1]), "end_positions": torch.tensor([5, 3])},
            {"start_logits": (BATCH, LENGTH), "end_logits": (BATCH, LENGTH)},
        ),
    }[auto]
    return inputs, labels, shapes


def last_state(model, ids, **arguments):
    """Outputs (B, L, D) of a bare model."""
    with torch.no_grad():
        return model(ids, **arguments).last_hidden_state


def difference(one, other):
    assert one.shape == other.shape
    return (one - other).abs().max().item()


# Heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@every_model
def test_forward_loss_and_a_gradient_for_every_parameter(name, auto):
    model = head_model(name, auto).train()
    inputs, labels, shapes = head_inputs(auto, name)
    outputs = model(**inputs, **labels)
    for output, shape in shapes.items():
        assert tuple(outputs[output].shape) == shape, output
    loss = outputs.loss if labels else sum(outputs[output].square().sum() for output in shapes)
    assert loss.ndim == 0 and loss.isfinite()
    loss.backward()
    for key, parameter in model.named_parameters():  # DistributedDataParallel waits for all of them
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key
        assert "distance" not in key or parameter.grad.abs().max() > 0, key


@pytest.mark.covering(1)
@every_model
def test_save_and_load_is_exact(name, auto, tmp_path):
    model = head_model(name, auto)
    inputs, labels, shapes = head_inputs(auto, name)
    model.save_pretrained(tmp_path)
    loaded, info = getattr(transformers, auto).from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is HEADS[auto]
    assert not any(info.values()), info
    assert loaded.config.to_dict() == model.config.to_dict() | {"_name_or_path": str(tmp_path)}
    assert loaded.config._attn_implementation == model.config._attn_implementation
    before, after = model.state_dict(), loaded.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) for key in before)
    for parameter in loaded.parameters():  # tensors of a file are not aligned, which may change the last bit of a sum
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        expected, got = model(**inputs, **labels), loaded(**inputs, **labels)
    assert all(torch.equal(expected[output], got[output]) for output in shapes)


@every_scheme
def test_fresh_parameters_are_initialised(name, tmp_path):
    """Also those a checkpoint lacks, which Transformers leaves as memory came: load from the bare encoder."""
    torch.manual_seed(1)
    model = RelPosBertModel(tiny_config(name), add_pooling_layer=False)
    model.save_pretrained(tmp_path)
    for fresh in (model, RelPosBertForSequenceClassification.from_pretrained(tmp_path)):
        for key, parameter in fresh.named_parameters():
            most = 2 * math.pi if name == "pope" else 2  # angles
            assert parameter.isfinite().all() and parameter.abs().max() < most, key


@every_scheme
def test_inputs_embeds(name):
    model = tiny_model(RelPosBertModel, name)
    ids = token_ids(BATCH, LENGTH)
    embeds = model.get_input_embeddings()(ids)
    assert difference(last_state(model, None, inputs_embeds=embeds), last_state(model, ids)) <= 1e-6
    for arguments in ({}, {"input_ids": ids, "inputs_embeds": embeds}):
        with raises(ValueError, "input_ids", "inputs_embeds"):
            model(**arguments)


@pytest.mark.covering(2)
@every_scheme
@encoder_and_decoder
def test_output_attentions(name, is_decoder):
    model = tiny_model(RelPosBertModel, name, attn_implementation="eager", is_decoder=is_decoder)
    ids, real = token_ids(BATCH, LENGTH), padding([LENGTH, 5], LENGTH)
    with torch.no_grad():
        outputs = model(ids, attention_mask=real.long(), output_attentions=True, output_hidden_states=True)
    assert len(outputs.attentions) == 2 and len(outputs.hidden_states) == 3
    for weights in outputs.attentions:
        assert tuple(weights.shape) == (BATCH, 3, LENGTH, LENGTH)
        sums = weights.sum(-1)
        if probe_call(model.config).terms.allow:  # a query without keys has no weights
            sums = sums[sums > 0]
        assert (weights >= 0).all() and (sums - 1).abs().max() <= 1e-6
        assert weights[1, ..., 5:].max() == 0
        if is_decoder:
            assert weights.triu(1).max() == 0
    assert difference(outputs.last_hidden_state, last_state(model, ids, attention_mask=real.long())) <= 1e-6


@every_scheme
def test_word_order_matters(name):
    """Without positions, attention would return the same vectors in the new order."""
    model, order = tiny_model(RelPosBertModel, name), torch.randperm(LENGTH)
    ids = token_ids(1, LENGTH)
    assert difference(last_state(model, ids[:, order]), last_state(model, ids)[:, order]) > 1e-3


@pytest.mark.covering(2)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@every_pair
def test_gradient_checkpointing(name, backend, reentrant, dropout):
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = head_model(name, "AutoModelForMaskedLM", attn_implementation=backend, **rates).train()
    inputs, labels, _ = head_inputs("AutoModelForMaskedLM", name)

    def gradients():
        model.zero_grad()
        torch.manual_seed(0)
        model(**inputs, **labels).loss.backward()
        return {key: parameter.grad.clone() for key, parameter in model.named_parameters()}

    plain = gradients()
    # the first name is the newer one, and the second is gone from Transformers 6
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    assert model.bert.encoder.layer[0].gradient_checkpointing
    if reentrant:  # needs an input with a gradient, which Transformers provides
        model.enable_input_require_grads()
    again = gradients()
    assert all(difference(plain[key], again[key]) <= 3e-6 for key in plain)


@pytest.mark.covering(2)
@every_pair
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_is_finite(name, backend, dtype):
    """Forward and backward, with a row that is padding from end to end."""
    model = tiny_model(RelPosBertForMaskedLM, name, attn_implementation=backend).to(dtype)
    ids, real = token_ids(3, LENGTH), padding([LENGTH, 4, 0], LENGTH)
    outputs = model(ids, attention_mask=real.long(), labels=ids)
    assert outputs.logits.dtype == dtype and outputs.logits.isfinite().all()
    outputs.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# Backends --------------------------------------------------------------------------------------------------------


OTHERS = [(name, backend) for name in ON_TOKENS for backend in ("sdpa", "flex_attention") if backend in CAPABLE[name]]


@pytest.mark.covering(2)
@encoder_and_decoder
@pytest.mark.parametrize("name, backend", OTHERS, ids=["-".join(pair) for pair in OTHERS])
def test_backends_agree(name, backend, is_decoder):
    model = tiny_model(RelPosBertModel, name, attn_implementation="eager", is_decoder=is_decoder)
    ids, whole, real = token_ids(3, LENGTH), torch.ones(3, LENGTH).bool(), padding([LENGTH, 6, 1], LENGTH)
    packed = torch.tensor([[*range(4), *range(5)], [*range(8), 0], [*range(9)]])
    cases = [
        ({}, whole),
        ({"attention_mask": whole.long()}, whole),
        ({"attention_mask": real.long()}, real),
        ({"position_ids": packed}, whole),
        ({"attention_mask": real.long(), "position_ids": packed}, real),
    ]
    expected = [last_state(model, ids, **arguments) for arguments, _ in cases]
    model.set_attn_implementation(backend)
    with uncompiled() if backend == "flex_attention" else contextlib.nullcontext():
        got = [last_state(model, ids, **arguments) for arguments, _ in cases]
    for one, other, (_, seen) in zip(expected, got, cases, strict=True):
        assert difference(one[seen], other[seen]) <= 1e-5


@pytest.mark.covering(2)
@encoder_and_decoder
@pytest.mark.parametrize("kind", ["boolean", "additive"])
@every_pair
def test_prepared_mask(name, backend, kind, is_decoder):
    """A mask (B, 1, L, K), boolean or additive, means what the same (B, L) mask means."""
    model = tiny_model(RelPosBertModel, name, attn_implementation=backend, is_decoder=is_decoder)
    ids, real = token_ids(BATCH, LENGTH), padding([LENGTH, 5], LENGTH)
    prepared = real[:, None, None, :].expand(BATCH, 1, LENGTH, LENGTH)
    if is_decoder:
        prepared = prepared & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if kind == "additive":
        prepared = torch.zeros(prepared.shape).masked_fill(~prepared, torch.finfo(torch.float32).min)
    expected = last_state(model, ids, attention_mask=real.long())
    assert difference(last_state(model, ids, attention_mask=prepared)[real], expected[real]) <= 1e-5


@every_scheme
def test_every_capable_backend_can_be_chosen(name, tmp_path):
    """By default it is the first of them."""
    model = RelPosBertModel(tiny_config(name))
    assert model.config._attn_implementation == CAPABLE[name][0]
    model.save_pretrained(tmp_path)
    assert '"relpos"' not in (tmp_path / "config.json").read_text()  # the choice is not saved
    assert RelPosBertModel.from_pretrained(tmp_path).config._attn_implementation == CAPABLE[name][0]
    for backend in CAPABLE[name]:
        loaded = RelPosBertModel.from_pretrained(tmp_path, attn_implementation=backend)
        assert loaded.config._attn_implementation == backend
        model.set_attn_implementation(backend)
        assert {layer.attention.self.config._attn_implementation for layer in model.encoder.layer} == {backend}


KNOWN = (AUTO, *BY_NAME, "flash_attention_2", "flash_attention_3")
INCAPABLE = [(name, backend) for name in ON_TOKENS for backend in KNOWN if backend not in CAPABLE[name]]


@pytest.mark.covering(1)
@pytest.mark.parametrize("name, backend", INCAPABLE, ids=["-".join(pair) for pair in INCAPABLE])
def test_incapable_backend_is_an_error(name, backend, tmp_path):
    model = RelPosBertForMaskedLM(tiny_config(name))
    model.save_pretrained(tmp_path)
    before = model.config._attn_implementation
    ways = {
        "from_pretrained": lambda: RelPosBertForMaskedLM.from_pretrained(tmp_path, attn_implementation=backend),
        "from_config": lambda: transformers.AutoModel.from_config(tiny_config(name), attn_implementation=backend),
        "config": lambda: RelPosBertModel(tiny_config(name, attn_implementation=backend)),
        "set": lambda: model.set_attn_implementation(backend),
        "set on the encoder": lambda: model.bert.set_attn_implementation(backend),
    }
    for ask in ways.values():
        with raises(ValueError, *map(repr, (backend, name, *CAPABLE[name]))):
            ask()
    assert model.config._attn_implementation == before
    model(token_ids(1, 4))


# Padding, batches, packing ---------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@encoder_and_decoder
@pytest.mark.parametrize("side", ["right", "left"])
@every_pair
def test_batch_and_padding_change_nothing(name, backend, side, is_decoder):
    """Relative schemes need nothing for padding on the left; an absolute one is told where the text begins."""
    model = tiny_model(RelPosBertModel, name, attn_implementation=backend, is_decoder=is_decoder)
    ids, real, given = token_ids(3, LENGTH), padding([LENGTH, 5, 1], LENGTH), {}
    if side == "left":
        real = real.flip(1)
        given = {} if name in RELATIVE else {"position_ids": (real.cumsum(-1) - 1).clamp(min=0)}
    together = last_state(model, ids, attention_mask=real.long(), **given)
    for row, kept in enumerate(real):
        alone = last_state(model, ids[row : row + 1, kept])
        assert difference(together[row : row + 1, kept], alone) <= 1e-5
        if side == "right" and not kept.all() and not is_decoder:  # the mask was needed
            assert difference(last_state(model, ids[row : row + 1])[:, kept], alone) > 1e-3
    elsewhere = last_state(model, ids.masked_fill(~real, 7), attention_mask=real.long(), **given)
    assert difference(elsewhere[real], together[real]) <= 1e-5


@pytest.mark.covering(2)
@pytest.mark.parametrize("before", [1, 3, 20])
@pytest.mark.parametrize("name, backend", [pair for pair in PAIRS if pair[0] in RELATIVE], ids=lambda value: value)
def test_translation_changes_nothing(name, backend, before):
    """Hidden words in front move the text to other places; only offsets may count."""
    model = tiny_model(RelPosBertModel, name, attn_implementation=backend, max_position_embeddings=32)
    ids = token_ids(BATCH, LENGTH)
    moved = torch.cat([token_ids(BATCH, before), ids], dim=1)
    mask = (torch.arange(before + LENGTH) >= before).long().expand(BATCH, -1)
    expected = last_state(model, ids)
    assert difference(last_state(model, moved, attention_mask=mask)[:, before:], expected) <= 1e-5


PACKS = {"two": [[4, 5], [7, 2]], "of one token": [[1, 1, 7], [4, 4, 1]], "one row of one": [[9], [3, 6]]}


@pytest.mark.covering(2)
@encoder_and_decoder
@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS)
@every_pair
def test_packed_documents_do_not_see_each_other(name, backend, pack, is_decoder):
    """Also with the empty cache with which `generate` begins."""
    model = tiny_model(RelPosBertModel, name, attn_implementation=backend, is_decoder=is_decoder)
    ids = token_ids(BATCH, LENGTH)
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in pack])
    caches = [dict, lambda: {"use_cache": False}, lambda: {"past_key_values": DynamicCache(config=model.config)}]
    rows = [(slice(None), positions), (slice(0, 1), positions[:1])]
    for (chosen, row_positions), cache in itertools.product(rows, caches if is_decoder else caches[:1]):
        together = last_state(model, ids[chosen], position_ids=row_positions, **cache())
        for row, lengths in enumerate(pack[: len(together)]):
            for document, end in zip(lengths, itertools.accumulate(lengths), strict=True):
                alone = last_state(model, ids[row : row + 1, end - document : end])
                assert difference(together[row : row + 1, end - document : end], alone) <= 1e-5


# Decoders --------------------------------------------------------------------------------------------------------


CHUNKS = {"token by token": [1] * 12, "several at once": [5, 3, 1, 1, 2], "all at once": [12]}
CACHES = {
    "dynamic": lambda config, length: DynamicCache(config=config),
    "static": lambda config, length: StaticCache(config=config, max_cache_len=length),
    "static-with-room": lambda config, length: StaticCache(config=config, max_cache_len=length + 3),
}


@torch.no_grad()
@torch.no_grad()
def decode(model, ids, chunks, cache, **arguments):
    """Logits of all tokens, given to the model a chunk at a time."""
    parts = ids.split(chunks, dim=1)
    return torch.cat([model(part, past_key_values=cache, use_cache=True, **arguments).logits for part in parts], dim=1)


@pytest.mark.covering(2)
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("past_the_trained_range", [False, True])
@every_pair
def test_cached_decoding_equals_the_full_forward(name, backend, past_the_trained_range, cache, chunks):
    longest = {"max_position_embeddings": 5} if past_the_trained_range and name in UNBOUNDED else {}
    model = tiny_model(RelPosBertLMHeadModel, name, attn_implementation=backend, is_decoder=True, **longest)
    ids = token_ids(BATCH, 12)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
    made = CACHES[cache](model.config, 12)
    assert difference(decode(model, ids, chunks, made), full) <= 1e-5
    assert int(made.get_seq_length()) == 12


@pytest.mark.covering(2, every_scheme=False)
@every_pair
def test_cached_decoding_with_cross_attention(name, backend):
    model = tiny_model(RelPosBertLMHeadModel, name, backend, is_decoder=True, add_cross_attention=True)
    ids, states = token_ids(BATCH, 12), torch.randn(BATCH, 7, WIDTH)
    encoder = {"encoder_hidden_states": states, "encoder_attention_mask": padding([7, 4], 7).long()}
    with torch.no_grad():
        full = model(ids, use_cache=False, **encoder).logits
        first = model(ids[:, :5], **encoder)
        assert isinstance(first.past_key_values, EncoderDecoderCache)
        assert difference(first.logits, full[:, :5]) <= 1e-5
    rest = decode(model, ids[:, 5:], [3, 1, 3], first.past_key_values, **encoder)
    assert difference(rest, full[:, 5:]) <= 1e-5
    changed = model(ids, use_cache=False, encoder_hidden_states=torch.randn(BATCH, 7, WIDTH)).logits
    assert difference(changed, full) > 1e-3


@pytest.mark.covering(2)
@pytest.mark.parametrize("cache", ["dynamic", "static-with-room"])
@every_scheme
def test_cached_decoding_of_padded_rows(name, cache):
    """Calls of several tokens and of one; every row as it is alone without a cache."""
    model = tiny_model(RelPosBertLMHeadModel, name, is_decoder=True)
    lengths, parts, place = [13, 9, 10], [], 0
    ids, real, made = token_ids(3, 13), padding(lengths, 13).flip(1), CACHES[cache](model.config, 13)
    with torch.no_grad():
        for part in ids.split([6, 1, 4, 1, 1], dim=1):
            place += part.shape[1]
            mask = real[:, :place].long()
            counted = (mask.cumsum(-1) - 1).clamp(min=0)[:, -part.shape[1] :]
            positions = {} if name in RELATIVE else {"position_ids": counted}
            parts.append(model(part, attention_mask=mask, past_key_values=made, **positions).logits)
        for row, length in enumerate(lengths):
            alone = model(ids[row : row + 1, 13 - length :], use_cache=False).logits
            assert difference(torch.cat(parts, 1)[row : row + 1, 13 - length :], alone) <= 1e-5


GENERATION = {"dynamic": {}, "no cache": {"use_cache": False}, "static": {"cache_implementation": "static"}}
GENERATION |= {"beams": {"num_beams": 3}}


def assert_rows_as_alone(model, lengths, how, **alone):
    """Generation without chance for rows with left padding gives what each row alone gives, with these arguments."""
    settings = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    alone |= {"num_beams": GENERATION[how].get("num_beams", 1)}
    ids, real = token_ids(len(lengths), 8), padding(lengths, 8).flip(1)
    together = model.generate(ids * real, attention_mask=real.long(), **settings, **GENERATION[how])
    assert tuple(together.shape) == (len(lengths), 14)
    for row, length in enumerate(lengths):
        prompt = ids[row : row + 1, 8 - length :]
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **alone, **settings)
        assert together[row, 8 - length :].tolist() == expected[0].tolist()


@pytest.mark.covering(2, every_scheme=False)
@pytest.mark.parametrize("how", GENERATION)
@every_pair
def test_generation_with_left_padding(name, backend, how):
    model = tiny_model(RelPosBertLMHeadModel, name, attn_implementation=backend, is_decoder=True)
    assert_rows_as_alone(model, [8, 5, 1], how)


@pytest.mark.parametrize("way", [{"num_beams": 3}, {"do_sample": True, "top_k": 20}], ids=["beams", "sampling"])
@pytest.mark.parametrize("how", ["dynamic", "static"])
@pytest.mark.parametrize("name", ON_TOKENS)
def test_several_returned_sequences_with_a_cache(name, how, way):
    """As without a cache, from the same random numbers, also of a padded row."""
    model = tiny_model(RelPosBertLMHeadModel, name, is_decoder=True)
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "pad_token_id": 0, "num_return_sequences": 3, **way}
    ids, real = token_ids(2, 8), padding([8, 5], 8).flip(1)
    found = []
    for cache in ("no cache", how):
        torch.manual_seed(1)
        found.append(model.generate(ids * real, attention_mask=real.long(), **settings, **GENERATION[cache]))
    assert found[0].shape == (6, 13) and torch.equal(*found)
    assert len(set(map(tuple, found[0].tolist()))) == 6


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=str)
def test_empty_batches(shape):
    with raises(ValueError, "input_ids", shape):
        tiny_model(RelPosBertModel, "shaw")(torch.zeros(shape, dtype=torch.long))


# the mask of a static cache does not tell where a row begins, which those with absolute positions must know
WINDOWED = [(*pair, how) for pair in PAIRS for how in ("dynamic", "static") if how == "dynamic" or pair[0] in RELATIVE]


@pytest.mark.covering(2, every_scheme=False)
@pytest.mark.parametrize("everywhere", [[0], []], ids=["cls", "none"])
@pytest.mark.parametrize("name, backend, how", WINDOWED, ids=["-".join(case) for case in WINDOWED])
def test_generation_in_a_window(name, backend, everywhere, how):
    """With either cache, as one row alone without a cache."""
    window = {"attention_window": 2, "global_tokens": everywhere}
    model = tiny_model(RelPosBertLMHeadModel, name, attn_implementation=backend, is_decoder=True, **window)
    assert_rows_as_alone(model, [8, 5], how, use_cache=False)


# Configuration ---------------------------------------------------------------------------------------------------


REFUSED = [
    ({"position_embedding_type": "no_such_scheme"}, ["position_embedding_type", "'no_such_scheme'", *SCHEMES]),
    *(({"position_embedding_type": value}, ["position_embedding_type"]) for value in (None, 3, [4])),
    *(({"num_attention_heads": n}, ["hidden_size", 24, "num_attention_heads", n]) for n in (5, 0, -3)),
    ({"attention_window": 0}, ["attention_window"]),
    ({"global_tokens": [0]}, ["global_tokens"]),
    ({"attention_window": 2, "global_tokens": [-1]}, ["global_tokens"]),
    ({"attention_temperature": "log"}, ["attention_temperature = 'log': give 'none'"]),  # of a later release
]


@pytest.mark.parametrize("fields, names", REFUSED, ids=[str(fields) for fields, _ in REFUSED])
def test_configuration_refused(fields, names):
    with raises((ValueError, StrictDataclassFieldValidationError), *names):
        tiny_config("shaw", **fields)


def test_a_misspelt_field_is_warned_of(caplog):
    tiny_config("shaw", num_hiden_layers=2, architecture_of_mine="x", attention_temperature="none")
    assert "num_hiden_layers is not a field" in caplog.text and "did you mean num_hidden_layers?" in caplog.text
    assert "architecture_of_mine" not in caplog.text and "attention_temperature" not in caplog.text


@every_scheme
def test_unknown_option(name):
    with raises(ValueError, "position_options", "'no_such_option'", 5, f"'{name}'", *SCHEMES[name].options):
        tiny_config(name, position_options={"no_such_option": 5})


OPTIONS = [(name, option) for name, scheme in SCHEMES.items() for option in scheme.options]


@pytest.mark.parametrize("name, option", OPTIONS, ids=["-".join(pair) for pair in OPTIONS])
def test_bad_option_value(name, option):
    value = ["no", "such", 1]
    with raises(ValueError, "position_options", f"'{option}'", value, f"'{name}'", SCHEMES[name].options[option].help):
        tiny_config(name, position_options={option: value})


def test_what_was_changed_later_is_checked_before_saving(tmp_path):
    config = tiny_config("shaw")
    config.position_options = {"clip": -1}
    with pytest.raises(Exception, match="clip"):
        config.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_options_of_the_caller_are_left_alone():
    options = {"clip": 4}
    config = tiny_config("shaw", position_options=options)
    config.position_options["clip"] = 5
    assert options == {"clip": 4}
    assert tiny_config("shaw").position_options == {}


@pytest.mark.parametrize("name", [name for name in ON_TOKENS if build_input(tiny_config(name)) is None] + ["absolute"])
def test_absolute_table_beside_a_scheme(name):
    """The hybrid has one table at the input, refuses longer inputs, and sees positions that are told to it."""
    plain = RelPosBertModel(tiny_config(name))
    assert (plain.embeddings.position_embeddings is not None) == (name == "absolute")
    model = tiny_model(RelPosBertModel, name, absolute_position_embeddings=True)
    assert tuple(model.embeddings.position_embeddings.weight.shape) == (16, WIDTH)
    ids = token_ids(1, LENGTH)
    positions = torch.arange(LENGTH)[None]
    assert difference(last_state(model, ids), last_state(model, ids, position_ids=positions)) <= 1e-6
    assert difference(last_state(model, ids), last_state(model, ids, position_ids=positions + 4)) > 1e-2
    with raises(ValueError, "max_position_embeddings = 16"):
        model(token_ids(1, 17))


# Positions and windows -------------------------------------------------------------------------------------------


@pytest.mark.covering(2, every_scheme=False)
@every_pair
def test_distances_follow_position_ids(name, backend):
    """Tokens left out of a text keep the others at their distances: hiding them must give the same."""
    model = tiny_model(RelPosBertModel, name, attn_implementation=backend)
    ids, kept = token_ids(BATCH, LENGTH), torch.tensor([0, 1, 3, 4, 7, 8])
    mask = torch.zeros(BATCH, LENGTH).long()
    mask[:, kept] = 1
    whole = last_state(model, ids, attention_mask=mask)[:, kept]
    for positions in (kept.expand(BATCH, -1), kept[None]):
        assert difference(last_state(model, ids[:, kept], position_ids=positions), whole) <= 1e-5


def visible_in_window(length, window, everywhere, causal=False):
    """Who sees whom, (L, L), one pair at a time."""

    def is_seen(i, j):
        return (abs(i - j) <= window or i in everywhere or j in everywhere) and (j <= i or not causal)

    return torch.tensor([[is_seen(i, j) for j in range(length)] for i in range(length)])


@pytest.mark.covering(2)
@encoder_and_decoder
@pytest.mark.parametrize("everywhere", [None, [], [0, 4]], ids=["cls", "none", "two"])
@every_pair
def test_attention_window(name, backend, everywhere, is_decoder):
    """The same weights with a prepared mask must give the same."""
    settings = {"attn_implementation": backend, "is_decoder": is_decoder}
    model = tiny_model(RelPosBertModel, name, attention_window=2, global_tokens=everywhere, **settings)
    full = tiny_model(RelPosBertModel, name, **settings)
    full.load_state_dict(model.state_dict())
    ids, real = token_ids(BATCH, LENGTH), padding([LENGTH, 6], LENGTH)
    seen = visible_in_window(LENGTH, 2, [0] if everywhere is None else everywhere, causal=is_decoder)
    prepared = (seen[None] & real[:, None, :])[:, None]
    expected = last_state(full, ids, attention_mask=prepared)
    got = last_state(model, ids, attention_mask=real.long())
    assert difference(got[real], expected[real]) <= 1e-5
    assert difference(got, last_state(full, ids, attention_mask=real.long())) > 1e-4


@pytest.mark.covering(2, every_scheme=False)
@pytest.mark.parametrize("name, backend", [pair for pair in PAIRS if pair[0] in RELATIVE], ids=lambda value: value)
def test_attention_window_in_packed_rows(name, backend):
    """Each document has its own global token."""
    model = tiny_model(RelPosBertModel, name, attn_implementation=backend, attention_window=1)
    ids = token_ids(1, LENGTH)
    together = last_state(model, ids, position_ids=torch.tensor([[*range(4), *range(5)]]))
    for part in (slice(0, 4), slice(4, 9)):
        assert difference(together[:, part], last_state(model, ids[:, part])) <= 1e-5


@pytest.mark.parametrize("shape", [(1, 5), (3, LENGTH), (LENGTH,)], ids=str)
def test_position_ids_of_another_shape(shape):
    model = tiny_model(RelPosBertModel, "relative_key")
    with raises(ValueError, "position_ids"):
        model(token_ids(BATCH, LENGTH), position_ids=torch.zeros(shape).long())
