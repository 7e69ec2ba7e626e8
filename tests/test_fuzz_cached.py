"""What goes on from earlier calls, beside one call for the whole text, in float64: caches, beams, segment memory.

And second derivatives beside those of eager attention, or an error that says where there are none.
"""

import pytest
import torch
from fuzzing import attempt, examples
from hypothesis import assume, given, reject, strategies as st
from oracles import stir
from test_fuzz_numbers import TOLERANCE, TRAINED, check_close, configurations
from test_optimize import MODELS, build
from transformers import DynamicCache, StaticCache

import hf_relpos
from hf_relpos import RelPosBertConfig, RelPosBertLMHeadModel, RelPosBertModel
from hf_relpos.attention.backends import chunked


WORDS = 50
BACKENDS = st.sampled_from(["relpos", "relpos", "eager", "sdpa"])
SEEDS = st.integers(0, 2**32)
WAYS = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static"},
    "sliding cache": {"cache_implementation": "sliding_window"},
    "no cache": {"use_cache": False},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
}


@st.composite
def models(draw, head, **given):
    """A random model in float64; backends that a scheme does not have are left out."""
    config = draw(configurations(**given))
    config._attn_implementation = draw(BACKENDS)
    torch.manual_seed(draw(SEEDS))
    try:
        return stir(head(config)).double().eval()
    except ValueError:
        reject()


def greedy(model, row, count):
    """A row of tokens, (1, L), and the most probable ones after it, each by one call for all before."""
    for _ in range(count):
        row = torch.cat([row, model(row, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return row


@examples(few=12, share=0.2)
@given(data=st.data())
@torch.no_grad()
def test_generation(data):
    """Rows padded on the left, as each is alone without a cache."""
    model = data.draw(models(RelPosBertLMHeadModel, is_decoder=True, memory_length=0))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    new, length = data.draw(st.integers(1, 5)), max(lengths)
    real = (torch.arange(length)[None] < torch.tensor(lengths)[:, None]).flip(1)
    ids = torch.randint(1, WORDS, real.shape) * real
    way = data.draw(st.sampled_from(sorted(WAYS)))
    assume(way != "prompt lookup" or len(lengths) == 1)
    settings = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **WAYS[way]}
    beams = data.draw(st.sampled_from([1, 1, 3]), label="beams") if way != "prompt lookup" else 1
    rows = [ids[row : row + 1, length - count :] for row, count in enumerate(lengths)]
    if beams == 1:
        expected = [greedy(model, row, new) for row in rows]
    else:
        alone = {**settings, "num_beams": beams, "use_cache": False, "cache_implementation": None}
        expected = [model.generate(row, attention_mask=torch.ones_like(row), **alone) for row in rows]
    with attempt(f"decoders: {way}{', beams' if beams > 1 else ''}"):
        found = model.generate(ids, attention_mask=real.long(), num_beams=beams, **settings)
        for row, count, each in zip(found, lengths, expected, strict=True):
            assert row[length - count :].tolist() == each[0].tolist()


@examples(few=12, share=0.2)
@given(data=st.data())
@torch.no_grad()
def test_several_tokens_at_a_time(data):
    """Logits of a text that is cut anywhere, through a cache; the last tokens may be taken back."""
    model = data.draw(models(RelPosBertLMHeadModel, is_decoder=True, memory_length=0))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4), label="sizes")
    ids = torch.randint(1, WORDS, (data.draw(st.integers(1, 2)), sum(sizes)))
    kind = data.draw(st.sampled_from([DynamicCache, StaticCache]))
    cache = kind(config=model.config, **({} if kind is DynamicCache else {"max_cache_len": sum(sizes) + 3}))
    expected, parts, place = model(ids, use_cache=False).logits, [], 0
    taken_back = data.draw(st.integers(0, 3)) if kind is DynamicCache else 0
    with attempt(f"decoders: {kind.__name__}, several tokens at a time"):
        for size in sizes:
            if taken_back and place + taken_back <= TRAINED:
                model(torch.randint(1, WORDS, (len(ids), taken_back)), past_key_values=cache)
                cache.crop(-taken_back)
            mask = torch.ones(len(ids), place + size, dtype=torch.long) if data.draw(st.booleans()) else None
            part = ids[:, place : place + size]
            parts.append(model(part, attention_mask=mask, past_key_values=cache).logits)
            place += size
        check_close({"logits": torch.cat(parts, 1)}, {"logits": expected}, TOLERANCE)


@examples(few=60, share=0.4)
@given(data=st.data())
@torch.no_grad()
def test_segments(data):
    """Segments of any lengths with a memory, as the whole text under a mask of what each token remembers and sees."""
    window = data.draw(st.none() | st.integers(1, 12), label="window")
    fields = {"attention_window": window, "global_tokens": None if window is None else []}
    fields |= {"memory_length": data.draw(st.integers(1, 12)), "num_hidden_layers": data.draw(st.integers(1, 3))}
    model = data.draw(models(RelPosBertModel, **fields))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=4), label="sizes")
    ids = torch.randint(1, WORDS, (data.draw(st.integers(1, 2)), sum(sizes)))
    memory, parts = None, []
    for part in ids.split(sizes, dim=1):
        outputs = model(part, memory=memory, use_cache=False)
        memory = outputs.memory
        parts.append(outputs.last_hidden_state)

    index, ends = torch.arange(sum(sizes)), torch.tensor(sizes).cumsum(0)
    end = ends.repeat_interleave(torch.tensor(sizes))[:, None]
    begin = (ends - torch.tensor(sizes)).repeat_interleave(torch.tensor(sizes))[:, None]
    seen = (index >= begin - fields["memory_length"]) & (index < end)
    if model.config.is_decoder:
        seen &= index <= index[:, None]
    if window is not None:
        seen &= (index - index[:, None]).abs() <= window
    plain = {"memory_length": 0, "attention_window": None, "global_tokens": None}
    whole = RelPosBertConfig.from_dict({**model.config.to_dict(), **plain})
    whole._attn_implementation = "eager"
    other = RelPosBertModel(whole).double().eval()
    other.load_state_dict(model.state_dict())
    expected = other(ids, attention_mask=seen.expand(len(ids), 1, -1, -1), use_cache=False).last_hidden_state
    with attempt("memory: segments against whole texts"):
        check_close({"states": torch.cat(parts, 1)}, {"states": expected}, TOLERANCE)


@examples(few=8, share=0.2)
@given(data=st.data())
def test_second_derivatives(data):
    """Of a loss by the embeddings of words and all parameters, in random directions; for own and live models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "FEWEST_SCORES", data.draw(st.sampled_from([0, chunked.FEWEST_SCORES])))
        is_live = data.draw(st.booleans(), label="live")
        if is_live:
            model = build(data.draw(st.sampled_from(sorted(MODELS))))
        else:
            model = data.draw(models(RelPosBertModel, memory_length=0))
        torch.manual_seed(data.draw(SEEDS))
        length, width = data.draw(st.integers(2, 12)), model.get_input_embeddings().embedding_dim
        embeddings = torch.randn(2, length, width, dtype=torch.float64, requires_grad=True)
        mask = torch.ones(2, length, dtype=torch.long)
        mask[-1, data.draw(st.integers(1, length)) :] = 0
        leaves = [embeddings, *(each for each in model.parameters() if each.requires_grad)]
        directions = [torch.randn_like(each) for each in leaves]

        def second():
            states = model(inputs_embeds=embeddings, attention_mask=mask)[0] * mask[..., None]
            first = torch.autograd.grad(states.tanh().sum(), leaves, create_graph=True, allow_unused=True)
            slope = sum((each * way).sum() for each, way in zip(first, directions, strict=True) if each is not None)
            found = torch.autograd.grad(slope, leaves, allow_unused=True)
            return {str(place): each for place, each in enumerate(found) if each is not None}

        before = model.config._attn_implementation
        model.set_attn_implementation("eager")
        expected = second()
        model.set_attn_implementation(before)
        if is_live:
            hf_relpos.optimize(model)
        names = ["create_graph", "not implemented"]
        with attempt("second derivatives", NotImplementedError, RuntimeError, names=names):
            check_close(second(), expected, 1e-8)
