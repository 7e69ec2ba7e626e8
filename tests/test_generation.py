"""Decoding with Transformers' caches, for every scheme that needs nothing but tokens; more of it in test_models.py.

There: token by token and several tokens at a time against the full forward, greedy generation, windows. Here: rows
padded on the left through a cache, sampling, beams.
"""

import pytest
import torch
from oracles import ON_TOKENS, padding, tiny_model
from transformers import DynamicCache, StaticCache

from hf_relpos import RelPosBertLMHeadModel


WORDS = 50
every_scheme = pytest.mark.parametrize("name", ON_TOKENS)
CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=15),
}
SETTINGS = {"max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0}
WAYS = {
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
}


def causal(name):
    return tiny_model(RelPosBertLMHeadModel, name, is_decoder=True)


def prompts(lengths, total):
    """Random words padded on the left with 0, and the mask of what is real."""
    real = padding(lengths, total).flip(1)
    return torch.randint(1, WORDS, real.shape) * real, real


@pytest.mark.covering(2)
@pytest.mark.parametrize("cache", CACHES)
@every_scheme
@torch.no_grad()
def test_padded_rows_through_a_cache(name, cache):
    """Calls of several tokens and of one; every row as it is alone without a cache."""
    model = causal(name)
    lengths, total = [13, 9, 10], 13
    ids, real = prompts(lengths, total)
    made, parts, place = CACHES[cache](model.config), [], 0
    for size in (6, 1, 4, 1, 1):
        part = slice(place, place + size)
        place += size
        mask = real[:, :place].long()
        positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, part]} if name in ABSOLUTE else {}
        parts.append(model(ids[:, part], attention_mask=mask, past_key_values=made, **positions).logits)
    together = torch.cat(parts, dim=1)
    for row, length in enumerate(lengths):
        alone = model(ids[row : row + 1, total - length :], use_cache=False).logits
        assert (together[row : row + 1, total - length :] - alone).abs().max() <= 1e-5


ABSOLUTE = ("absolute", "sinusoidal", "cape")  # their input is told by position_ids, as `generate` does


@pytest.mark.covering(3)
@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@pytest.mark.parametrize("way", WAYS)
@every_scheme
def test_sampling_and_beams_with_a_cache(name, way, how):
    """The tokens are those without a cache, from the same random state."""
    model = causal(name)
    ids, real = prompts([8, 5, 1], 8)
    found = []
    for settings in ({"use_cache": False}, how):
        torch.manual_seed(1)
        out = model.generate(ids, attention_mask=real.long(), **SETTINGS, **WAYS[way], **settings)
        found.append(out.tolist())
    assert found[0] == found[1]


@every_scheme
def test_beams_of_padded_rows(name):
    """Every row as it is alone."""
    model = causal(name)
    lengths = [8, 5, 2]
    ids, real = prompts(lengths, 8)
    settings = {**SETTINGS, "do_sample": False, "num_beams": 3}
    together = model.generate(ids, attention_mask=real.long(), **settings)
    for row, length in enumerate(lengths):
        prompt = ids[row : row + 1, 8 - length :]
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        assert together[row, 8 - length :].tolist() == alone[0].tolist()
