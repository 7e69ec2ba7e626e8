"""Relative attention of speech encoders after `optimize`, against Transformers' own code."""

import copy
import pickle

import pytest
import torch
from encoders import SIZES as TEXT_SIZES, RemoteConfig, RemoteModel
from transformers import SeamlessM4Tv2Config, Wav2Vec2BertConfig, Wav2Vec2BertModel
from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import SeamlessM4Tv2SpeechEncoder

from hf_relpos import optimize
from hf_relpos.attention.backends import chunked
from hf_relpos.live import speech


SIZES = {"hidden_size": 24, "feature_projection_input_dim": 8, "left_max_position_embeddings": 5}
SIZES |= {"right_max_position_embeddings": 2}
SEAMLESS = {"speech_encoder_layers": 2, "speech_encoder_attention_heads": 3, "speech_encoder_intermediate_size": 32}
SEAMLESS |= {"speech_encoder_chunk_size": 8}  # masks by pairs
MODELS = {
    "Wav2Vec2-BERT": lambda **more: Wav2Vec2BertModel(
        Wav2Vec2BertConfig(**SIZES, num_hidden_layers=2, num_attention_heads=3, intermediate_size=32, **more)
    ),
    "SeamlessM4T v2": lambda **more: SeamlessM4Tv2SpeechEncoder(SeamlessM4Tv2Config(**SIZES, **SEAMLESS, **more)),
}


def build(name, **more):
    torch.manual_seed(0)
    model = MODELS[name](**more).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def outputs_and_gradients(model):
    torch.manual_seed(1)
    features, real = torch.randn(2, 32, 8, dtype=torch.float64), torch.arange(32) < torch.tensor([32, 19])[:, None]
    model.zero_grad()
    states = model(features, attention_mask=real.long())[0]
    states[:, :2].square().sum().backward()  # of an adapter's fewer tokens, too
    return [states.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


# earlier releases have eager attention alone
@pytest.mark.parametrize("implementation", ["eager", *["sdpa"] * Wav2Vec2BertModel._supports_sdpa])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_stock(name, implementation, monkeypatch):
    monkeypatch.setattr(chunked, "FEWEST_SCORES", 0)
    model = build(name)
    model.set_attn_implementation(implementation)
    expected = outputs_and_gradients(model)
    handle = optimize(model, dtype=None)
    assert "2 layers): relative attention of sound" in str(handle)
    largest = max(each.abs().max() for each in expected)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for ours, theirs in zip(outputs_and_gradients(each), expected, strict=True):
            assert (ours - theirs).abs().max() <= 1e-12 * largest
    handle.undo()
    assert all(torch.equal(one, other) for one, other in zip(outputs_and_gradients(model), expected, strict=True))


def test_no_tensor_of_all_pairs_is_made(monkeypatch):
    """Which is what the gather of (L, L, d) and the einsum with it need."""
    monkeypatch.setattr(chunked, "FEWEST_SCORES", 0)
    model, features, sizes = build("Wav2Vec2-BERT"), torch.randn(1, 1500, 8, dtype=torch.float64), []
    optimize(model, dtype=None)
    gather = torch.nn.functional.embedding
    monkeypatch.setattr(
        torch.nn.functional, "embedding", lambda ids, *rest: sizes.append(ids.numel()) or gather(ids, *rest)
    )
    with torch.no_grad():
        model(features)
    assert sizes == [8, 8]


def test_calls_that_ask_for_weights_and_other_positions_go_to_stock(monkeypatch):
    monkeypatch.setattr(chunked, "FEWEST_SCORES", 0)
    model, features = build("Wav2Vec2-BERT", attn_implementation="eager"), torch.randn(1, 20, 8, dtype=torch.float64)
    expected = model(features, output_attentions=True).attentions
    optimize(model, dtype=None)
    for ours, theirs in zip(model(features, output_attentions=True).attentions, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert "sound" not in str(optimize(build("Wav2Vec2-BERT", position_embeddings_type="rotary"), dtype=None))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("implementation", ["eager", *["sdpa"] * Wav2Vec2BertModel._supports_sdpa])
def test_masks_of_any_kind_given_to_an_attention_module(implementation, gradients, monkeypatch):
    """A soft mask, one that hides some keys from some queries, and one that hides all of a row's keys."""
    monkeypatch.setattr(chunked, "FEWEST_SCORES", 0)
    model = build("Wav2Vec2-BERT")
    model.set_attn_implementation(implementation)
    attention = model.encoder.layers[0].self_attn
    torch.manual_seed(1)
    states, soft = torch.randn(2, 9, 24, dtype=torch.float64), torch.randn(2, 1, 9, 9, dtype=torch.float64)
    lowest = torch.tensor(torch.finfo(torch.float64).min, dtype=torch.float64)
    pairs = torch.where(soft > 0.5, lowest, torch.zeros_like(lowest))
    row = torch.zeros_like(soft)
    row[1] = lowest
    with torch.set_grad_enabled(gradients):
        expected = [attention(states, mask)[0] for mask in (soft, pairs, row)]
        optimize(model, dtype=None)
        for mask, theirs in zip((soft, pairs, row), expected, strict=True):
            assert (attention(states, mask)[0] - theirs).abs().max() <= 1e-12 * theirs.abs().max()


def test_undo_inside_a_call(monkeypatch):
    """As by another thread: calls of these modules do not make `undo` wait."""
    model, features = build("Wav2Vec2-BERT"), torch.randn(1, 20, 8, dtype=torch.float64)
    expected, handle = model(features)[0], optimize(model, dtype=None)
    monkeypatch.setattr(speech, "prefer_backend", lambda *sizes: handle.undo())
    assert torch.equal(model(features)[0], expected)


def test_optimize_text_encoder_with_speech_inside():
    text = RemoteModel(RemoteConfig(**TEXT_SIZES))
    text.sound = build("Wav2Vec2-BERT")
    report = optimize(text)
    assert [each.level for each in report.encoders] == ["", "by length"] and not report.skipped
    assert optimize(text).skipped[0].reason == "it is accelerated already"
