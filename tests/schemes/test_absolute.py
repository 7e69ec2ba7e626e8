"""Absolute positions: plain attention, and one learned table at the input (Devlin et al. 2018)."""

import numpy as np
import pytest
import torch
from errors import raises
from oracles import array, padding, tiny_model
from transformers import BertConfig, BertModel

from hf_relpos import RelPosBertModel


def test_input_is_layernorm_of_word_type_and_position():
    embeddings = tiny_model(RelPosBertModel, "absolute").double().embeddings
    ids, types = torch.randint(1, 50, (2, 7)), torch.randint(0, 2, (2, 7))
    got = array(embeddings(input_ids=ids, token_type_ids=types))
    word, kind = array(embeddings.word_embeddings.weight), array(embeddings.token_type_embeddings.weight)
    position = array(embeddings.position_embeddings.weight)
    gain, bias = array(embeddings.LayerNorm.weight), array(embeddings.LayerNorm.bias)
    for b in range(2):
        for i in range(7):
            x = word[ids[b, i]] + kind[types[b, i]] + position[i]
            x = (x - x.mean()) / np.sqrt(x.var() + embeddings.LayerNorm.eps)
            assert np.abs(got[b, i] - (gain * x + bias)).max() <= 1e-10


CASES = ["eager", "sdpa"]


def parity(implementation: str) -> float:
    """Largest difference from the BERT of the installed Transformers."""
    model = tiny_model(RelPosBertModel, "absolute", attn_implementation=implementation)
    sizes = ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
    stock = BertModel(
        BertConfig(
            **{size: getattr(model.config, size) for size in sizes},
            max_position_embeddings=model.config.max_position_embeddings,
            attn_implementation=implementation,
        )
    ).eval()
    assert not stock.load_state_dict(model.state_dict(), strict=False).missing_keys
    ids, real = torch.randint(1, 50, (3, 12)), padding([12, 8, 1], 12).long()
    with torch.no_grad():
        ours, theirs = model(ids, attention_mask=real), stock(ids, attention_mask=real)
    return max((a - b).abs().max().item() for a, b in zip(ours.to_tuple(), theirs.to_tuple(), strict=True))


@pytest.mark.parametrize("implementation", CASES)
def test_equals_stock_bert(implementation):
    assert parity(implementation) <= 2e-6


def test_refuses_more_tokens_than_positions():
    model = tiny_model(RelPosBertModel, "absolute")
    model(torch.ones(1, 16, dtype=torch.long))
    with raises(ValueError, 17, "max_position_embeddings = 16"):
        model(torch.ones(1, 17, dtype=torch.long))
