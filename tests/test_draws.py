"""What training draws at random and chooses: with gradients as without, and with any number of threads.

Activation checkpointing and gradient caching repeat a pass without gradients, with them, from one random state.
"""

import pytest
import torch
from encoders import build, pad_of, tokens
from oracles import extra_inputs, padding, tiny_model
from test_live_speech import build as build_speech
from torch import nn
from transformers import Wav2Vec2BertModel

from hf_relpos import RelPosBertModel, explain_backend, optimize
from hf_relpos.attention.backends import chunked
from hf_relpos.products.cpu_gemm import Library
from hf_relpos.schemes import SCHEMES


# of each level, and every encoder with attention of its own
PLAIN = ("BERT", "MPNet", "RoFormer", "XLNet", "T5", "UMT5", "ModernBERT", "ALBERT", "remote code", "DeBERTa v1")
ENCODERS = {
    **{name: {} for name in PLAIN},
    "DeBERTa v2": {"position_buckets": -1, "share_att_key": False},
    "DeBERTa v2, as v3": {"position_buckets": 96},
}
LENGTHS = (40, 9, 3, 25)
FIELDS = {"vocab_size": 60, "max_position_embeddings": 64}
FIELDS |= {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}


def states(model, inputs, gradients=True, seed=3):
    torch.manual_seed(seed)
    with torch.set_grad_enabled(gradients):
        return model(**inputs)[0].detach()


def assert_same_draws(model, inputs):
    """With gradients and without them, from one random state."""
    expected = states(model, inputs)
    assert (states(model, inputs, seed=4) - expected).abs().max() > 1e-2  # there is dropout
    torch.testing.assert_close(states(model, inputs, gradients=False), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("fewest", [0, chunked.FEWEST_SCORES], ids=["in chunks", "short"])
@pytest.mark.parametrize("name", ENCODERS)
def test_optimized_encoder(name, fewest, monkeypatch):
    monkeypatch.setattr(chunked, "FEWEST_SCORES", fewest)
    model = build(name.partition(",")[0], torch.float32, dropout=0.2, **ENCODERS[name])
    assert optimize(model).encoders[0].level
    assert_same_draws(model.train(), tokens(padding(LENGTHS, max(LENGTHS)), pad_of(model)))


@pytest.mark.parametrize("fewest", [0, chunked.FEWEST_SCORES], ids=["in chunks", "short"])
@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_scheme(name, unpad, fewest, monkeypatch):
    monkeypatch.setattr(chunked, "FEWEST_SCORES", fewest)
    model = tiny_model(RelPosBertModel, name, unpad_inputs=unpad, **FIELDS).train()
    assert_same_draws(model, tokens(padding(LENGTHS, max(LENGTHS))) | extra_inputs(name, len(LENGTHS), max(LENGTHS)))


def test_scheme_with_dropout_modules_alone_in_training():
    """For an estimate of uncertainty. DeBERTa's scheme reads only the rows of its table that are in use."""
    model = tiny_model(RelPosBertModel, "deberta", **FIELDS)
    for part in model.modules():
        part.training = isinstance(part, nn.Dropout)
    assert_same_draws(model, tokens(padding(LENGTHS, max(LENGTHS))))


@pytest.mark.parametrize("implementation", ["eager", *["sdpa"] * Wav2Vec2BertModel._supports_sdpa])
def test_speech_encoder_with_a_soft_mask(implementation, none_too_short):
    model = build_speech("Wav2Vec2-BERT", attention_dropout=0.2)
    model.set_attn_implementation(implementation)
    optimize(model, dtype=None)
    attention = model.encoder.layers[0].self_attn.train()
    mask = torch.randn(2, 1, 40, 40, dtype=torch.float64)
    states = torch.randn(2, 40, 24, dtype=torch.float64)
    assert_same_draws(attention, {"hidden_states": states, "attention_mask": mask})


@pytest.mark.parametrize("scheme", ["shaw", "alibi"])
def test_threads(scheme, none_too_short):
    model = tiny_model(RelPosBertModel, scheme, **FIELDS).train()
    inputs, found = tokens(padding(LENGTHS, max(LENGTHS))), []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        found.append(states(model, inputs))
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)


def test_int8_is_for_evaluation():
    model = build("BERT", torch.float32, dropout=0.2)
    optimize(model, dtype="int8")
    assert_same_draws(model.train(), tokens(padding(LENGTHS, max(LENGTHS))))


@pytest.mark.parametrize("scheme", ["shaw", "t5"])
def test_backend_in_training_follows_from_sizes(scheme, monkeypatch):
    """And not from a measurement of the machine, with the threads that it had then."""
    model = tiny_model(RelPosBertModel, scheme, **FIELDS)
    chosen = []
    for onednn_rate in (1.0, 3.0):
        monkeypatch.setattr(chunked, "bmm_library", lambda rate=onednn_rate: Library(2.0, rate, 0.0, 0.0))
        chosen.append([explain_backend(model, batch, 256, dropout=0.1).split()[2] for batch in (1, 2, 3, 6)])
    assert chosen[0] == chosen[1] and len(set(chosen[0])) == 2
