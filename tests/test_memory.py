"""Segment recurrence: parity with Transformer-XL's own model, and what holds for every scheme that takes memory.

That segments are parts of the whole text is in test_fuzz_cached.py.
"""

import pickle

import pytest
import torch
from errors import raises
from oracles import ON_TOKENS, golden, padding, tiny_config, tiny_model
from test_models import (
    BATCH,
    CACHES,
    CAPABLE,
    ON_CPU,
    PAIRS as EVERY_PAIR,
    WIDTH,
    difference,
    encoder_and_decoder,
    token_ids,
)

from hf_relpos import RelPosBertLMHeadModel, RelPosBertModel, SegmentMemory
from hf_relpos.models.modeling_relpos_bert import HEADS
from hf_relpos.schemes import SCHEMES


pytestmark = pytest.mark.usefixtures("none_too_short")
TAKERS = [name for name in ON_TOKENS if SCHEMES[name].memory_unsupported_reason(SCHEMES[name].defaults()) is None]
OTHERS = [name for name in SCHEMES if name not in TAKERS]
PAIRS = [pair for pair in EVERY_PAIR if pair[0] in TAKERS]
# every scheme with its default, and three kinds of terms with every backend
SOME = [pair for pair in PAIRS if pair[0] in ("transformer_xl", "shaw", "t5") or pair[1] == CAPABLE[pair[0]][0]]
some_pairs = pytest.mark.parametrize("name, backend", SOME, ids=["-".join(pair) for pair in SOME])
every_taker = pytest.mark.parametrize("name", TAKERS)


@torch.no_grad()
def by_segments(model, ids, lengths, memory=None, **arguments):
    """Outputs for all tokens, a segment at a time, and the last memory."""
    parts = []
    for segment in ids.split(lengths, dim=1):
        outputs = model(segment, memory=memory, use_cache=False, **arguments)
        memory = outputs.memory
        parts.append(outputs[0])
    return torch.cat(parts, dim=1), memory


# Parity ------------------------------------------------------------------------------------------------------------

SIZES, ORIGINAL = golden("transformer_xl")
# those without the original's option same_length, which there is none for here
CASES = [case for case, settings in SIZES["cases"].items() if not settings["same_length"]]


def original_model(case, backend):
    """Our causal model with the weights of the original, whose layers are BERT's without biases in attention."""
    clamp = SIZES["cases"][case]["clamp_len"]
    names = {"hidden_size": "d_model", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    names |= {"intermediate_size": "d_inner", "layer_norm_eps": "eps", "memory_length": "memory"}
    fields = {ours: SIZES[theirs] for ours, theirs in names.items()} | {"hidden_act": "relu", "is_decoder": True}
    options = {"clamp_len": clamp if clamp > 0 else None}
    config = tiny_config("transformer_xl", position_options=options, vocab_size=4, **fields)
    config._attn_implementation = backend
    model = RelPosBertModel(config, add_pooling_layer=False).eval()
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    state["embeddings.LayerNorm.weight"] += 1  # the inputs are normalised already
    for layer in range(SIZES["n_layer"]):
        ours, theirs = f"encoder.layer.{layer}.", f"layers.{layer}."
        own = ours + "attention.self."
        qkv = ORIGINAL[theirs + "dec_attn.qkv_net.weight"].chunk(3)
        for part, weight in zip(("query", "key", "value"), qkv, strict=True):
            state[f"{own}{part}.weight"] = weight
        for table in ("r_net.weight", "r_w_bias", "r_r_bias"):
            state[f"{own}distance_embedding.{table}"] = ORIGINAL[f"{theirs}dec_attn.{table}"]
        state[ours + "attention.output.dense.weight"] = ORIGINAL[theirs + "dec_attn.o_net.weight"]
        for kind in ("weight", "bias"):
            state[f"{ours}attention.output.LayerNorm.{kind}"] = ORIGINAL[f"{theirs}dec_attn.layer_norm.{kind}"]
            state[f"{ours}intermediate.dense.{kind}"] = ORIGINAL[f"{theirs}pos_ff.CoreNet.0.{kind}"]
            state[f"{ours}output.dense.{kind}"] = ORIGINAL[f"{theirs}pos_ff.CoreNet.3.{kind}"]
            state[f"{ours}output.LayerNorm.{kind}"] = ORIGINAL[f"{theirs}pos_ff.layer_norm.{kind}"]
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("case", CASES)
def test_transformer_xl_over_segments(case, backend):
    """Three layers, five segments, eight tokens of memory; the original's float32 against ours."""
    model = original_model(case, backend)
    run = lambda states, **given: model(inputs_embeds=states, **given)  # noqa: E731
    states, memory = by_segments(run, ORIGINAL["inputs"], SIZES["segments"])
    assert difference(states, ORIGINAL[f"{case}.output"]) <= 1e-5
    assert memory.mask.all() and memory.length == SIZES["memory"]
    for layer, state in enumerate(memory.states):
        assert difference(state, ORIGINAL[f"{case}.mems.{layer}"]) <= 1e-5


# What memory is ----------------------------------------------------------------------------------------------------


@pytest.mark.covering(3)
@encoder_and_decoder
@some_pairs
def test_empty_memory_is_no_memory(name, backend, is_decoder):
    """None, no tokens, tokens of rows that were reset: nothing soaks up attention."""
    model = tiny_model(RelPosBertModel, name, attn_implementation=backend, is_decoder=is_decoder, memory_length=8)
    ids = token_ids(BATCH, 9)
    with torch.no_grad():
        first = model(ids)
        full = first.memory
        none = SegmentMemory(tuple(state[:, :0] for state in full.states), full.mask[:, :0])
        for memory in (none, full.reset(torch.tensor([True, True]))):
            again = model(ids, memory=memory)
            assert difference(again.last_hidden_state, first.last_hidden_state) <= 1e-5
            assert again.memory.mask.sum(-1).tolist() == [8, 8]
            assert difference(again.memory.states[-1], full.states[-1]) <= 1e-5
        half = model(ids, memory=full.reset(torch.tensor([True, False]))).last_hidden_state
        assert difference(half[0], first.last_hidden_state[0]) <= 1e-5
        assert difference(half[1], first.last_hidden_state[1]) > 1e-3


@pytest.mark.covering(3)
@encoder_and_decoder
@pytest.mark.parametrize("side", ["right", "left"])
@some_pairs
def test_padded_rows_equal_rows_alone(name, backend, side, is_decoder):
    """Three segments whose rows have different numbers of tokens, none among them."""
    model = tiny_model(RelPosBertModel, name, attn_implementation=backend, is_decoder=is_decoder, memory_length=7)
    counts = [[5, 2, 0], [0, 3, 4], [4, 5, 1]]
    texts, place = token_ids(3, 20), [0, 0, 0]
    memory, alone = None, [None, None, None]
    for lengths in counts:
        real = padding(lengths, 5) if side == "right" else padding(lengths, 5).flip(1)
        ids = token_ids(3, 5)
        for row, length in enumerate(lengths):
            ids[row, real[row]] = texts[row, place[row] : place[row] + length]
        with torch.no_grad():
            together = model(ids, attention_mask=real.long(), memory=memory)
        memory = together.memory
        for row, length in enumerate(lengths):
            if length:
                text = texts[row : row + 1, place[row] : place[row] + length]
                states, alone[row] = by_segments(model, text, [length], alone[row])
                assert difference(together.last_hidden_state[row, real[row]][None], states) <= 1e-5
                place[row] += length
            expected = alone[row]
            kept = memory.mask[row]
            assert int(kept.sum()) == (0 if expected is None else expected.length)
            if expected is not None:
                assert difference(memory.states[1][row, kept][None], expected.states[1]) <= 1e-5


@encoder_and_decoder
@every_taker
def test_documents_in_a_row(name, is_decoder):
    """position_ids that begin anew: the first document goes on with the memory, the next sees neither it nor that."""
    model = tiny_model(RelPosBertModel, name, is_decoder=is_decoder, memory_length=8)
    ids = token_ids(1, 20)
    _, before = by_segments(model, ids[:, :6], [6])
    positions = torch.tensor([[6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])
    states, together = by_segments(model, ids[:, 6:], [14], before, position_ids=positions)
    assert difference(states[:, :4], by_segments(model, ids[:, 6:10], [4], before)[0]) <= 1e-5
    assert difference(states[:, 4:10], by_segments(model, ids[:, 10:16], [6])[0]) <= 1e-5
    last, memory = by_segments(model, ids[:, 16:], [4])
    assert difference(states[:, 10:], last) <= 1e-5
    assert together.mask.sum() == 4
    assert difference(together.states[1][:, -4:], memory.states[1]) <= 1e-5


@pytest.mark.covering(2)
@some_pairs
def test_positions_with_gaps(name, backend):
    """Distances follow position_ids, from the memory on."""
    model = tiny_model(RelPosBertModel, name, backend, is_decoder=True, memory_length=12, num_hidden_layers=1)
    ids = token_ids(1, 11)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 8, 9, 10, 14, 15]])
    full, _ = by_segments(model, ids, [11], position_ids=positions)
    _, memory = by_segments(model, ids[:, :5], [5])
    found, _ = by_segments(model, ids[:, 5:], [6], memory, position_ids=positions[:, 5:])
    assert difference(found, full[:, 5:]) <= 1e-5


@every_taker
def test_select_rows_of_a_memory(name):
    """In another order, and more than once; the memory itself stays."""
    model = tiny_model(RelPosBertLMHeadModel, name, is_decoder=True, memory_length=8)
    ids, rows = token_ids(3, 9), torch.tensor([2, 0, 0, 1])
    _, memory = by_segments(model, ids[:, :5], [5])
    got, _ = by_segments(model, ids[rows, 5:], [4], memory.select(rows))
    expected, _ = by_segments(model, ids[:, 5:], [4], memory)
    assert difference(got, expected[rows]) <= 1e-5
    none = memory.select(torch.tensor([], dtype=torch.long))
    assert none.mask.shape == (0, 5) and {tuple(state.shape[:2]) for state in none.states} == {(0, 5)}


@pytest.mark.covering(3)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@encoder_and_decoder
@every_taker
def test_gradients_stop_at_the_memory(name, is_decoder, checkpointing):
    """They reach W_k and W_v through it, which a memory that is a leaf shows, and nothing before."""
    model = tiny_model(RelPosBertModel, name, is_decoder=is_decoder, memory_length=8, num_hidden_layers=1).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    first = model(token_ids(BATCH, 6), use_cache=False).memory
    assert not any(state.requires_grad for state in first.states)
    leaf = SegmentMemory(tuple(state.clone().requires_grad_() for state in first.states), first.mask)
    ids, attention, found = token_ids(BATCH, 5), model.encoder.layer[0].attention.self, []
    for memory in (leaf, None):
        model.zero_grad()
        model(ids, memory=memory, use_cache=False).last_hidden_state.square().sum().backward()
        found.append(torch.stack([attention.key.weight.grad, attention.value.weight.grad]))
    assert all(state.grad is None for state in leaf.states)
    assert (found[0] - found[1]).abs().amax((1, 2)).min() > 1e-4


def test_gradient_through_memory_is_that_of_a_constant():
    """Against finite differences in float64: loss as a function of W_k with the memory held fixed."""
    model = tiny_model(RelPosBertModel, "transformer_xl", memory_length=8, num_hidden_layers=1).double()
    memory = by_segments(model, token_ids(1, 6), [6])[1]
    ids, weight = token_ids(1, 4), model.encoder.layer[0].attention.self.key.weight
    direction, step = torch.randn_like(weight), 1e-6
    model(ids, memory=memory).last_hidden_state[..., :3].sum().backward()
    slope = (weight.grad * direction).sum().item()
    values = []
    with torch.no_grad():
        for sign in (1, -1):
            weight.add_(sign * step * direction)
            values.append(model(ids, memory=memory).last_hidden_state[..., :3].sum().item())
            weight.sub_(sign * step * direction)
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6)


# With a cache ------------------------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@some_pairs
def test_memory_before_a_cache(name, backend, kind):
    """The memory stands left of what the cache holds, all along."""
    model = tiny_model(RelPosBertLMHeadModel, name, attn_implementation=backend, is_decoder=True, memory_length=8)
    ids = token_ids(BATCH, 20)
    _, memory = by_segments(model, ids[:, :8], [8])
    expected, _ = by_segments(model, ids[:, 8:], [12], memory)
    cache, parts = CACHES[kind](model.config, 14), []
    with torch.no_grad():
        for part in ids[:, 8:].split([5, 1, 4, 1, 1], dim=1):
            outputs = model(part, memory=memory, past_key_values=cache)
            parts.append(outputs.logits)
            assert "memory" not in outputs
    assert difference(torch.cat(parts, dim=1), expected) <= 1e-5


GENERATION = [(name, {}) for name in TAKERS]
GENERATION += [(name, {"num_beams": 3}) for name in ("transformer_xl", "t5", "rope")]
GENERATION += [(name, {"cache_implementation": "static"}) for name in ("transformer_xl", "shaw", "deberta")]


@pytest.mark.parametrize("name, how", GENERATION, ids=str)
def test_generation_goes_on_from_a_memory(name, how):
    """Rows padded on the left, greedy and with beams: as the rows alone, and as the whole text without any memory."""
    model = tiny_model(RelPosBertLMHeadModel, name, is_decoder=True, memory_length=40)
    settings = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5, "pad_token_id": 0, **how}
    ids, real = token_ids(2, 14), padding([6, 3], 6).flip(1)
    prompts = ids[:, 8:] * real
    _, memory = by_segments(model, ids[:, :8], [8])
    together = model.generate(prompts, attention_mask=real.long(), memory=memory, **settings)
    for row, length in enumerate([6, 3]):
        prompt = torch.cat([ids[row : row + 1, :8], prompts[row : row + 1, 6 - length :]], dim=1)
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        assert together[row, 6 - length :].tolist() == alone[0, 8:].tolist()


# Outputs, and bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("auto", HEADS)
def test_every_head_carries_memory(auto):
    is_decoder = auto == "AutoModelForCausalLM"
    model = tiny_model(HEADS[auto], "transformer_xl", is_decoder=is_decoder, memory_length=7)
    shape = (BATCH, 3, 9) if auto == "AutoModelForMultipleChoice" else (BATCH, 9)
    rows = BATCH * 3 if auto == "AutoModelForMultipleChoice" else BATCH
    ids = token_ids(*shape)
    with torch.no_grad():
        first = model(ids)
        second = model(ids, memory=first.memory)
        as_tuple = model(ids, memory=first.memory, return_dict=False)
    for outputs in (first, second):
        assert [tuple(state.shape) for state in outputs.memory.states] == [(rows, 7, WIDTH)] * 2
        assert outputs.memory.mask.shape == (rows, 7)
    assert difference(first[0], second[0]) > 1e-3
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[-1].mask, second.memory.mask)
    again = pickle.loads(pickle.dumps(second))
    assert type(again) is type(second) and torch.equal(again.memory.states[0], second.memory.states[0])
    leaves, structure = torch.utils._pytree.tree_flatten(second)
    assert type(torch.utils._pytree.tree_unflatten(leaves, structure)) is type(second)
    model.config.memory_length = 0
    assert "memory" not in model(ids)


REFUSED = [
    *((name, {}, ["memory_length = 4", repr(name), "transformer_xl"]) for name in OTHERS),
    ("shaw", {"memory_length": -1}, ["memory_length = -1"]),
    ("shaw", {"absolute_position_embeddings": True}, ["'absolute'"]),
    ("shaw", {"attention_window": 3}, ["global_tokens"]),
    (["shaw", "fire"], {}, ["'fire'"]),
    ("disan", {"position_options": {"direction": "backward"}}, ["only to its right"]),
]


@pytest.mark.parametrize("name, settings, names", REFUSED, ids=str)
def test_configurations_refused(name, settings, names):
    with raises(ValueError, *names):
        tiny_config(name, **{"memory_length": 4, **settings})


def test_memory_refused():
    model = tiny_model(RelPosBertModel, "shaw", memory_length=8)
    ids = token_ids(BATCH, 5)
    memory = model(ids).memory
    with raises(ValueError, "2 rows, but the segment has 3"):
        model(token_ids(3, 5), memory=memory)
    cases = {
        "has 3; pass its own": {"memory_length": 8, "num_hidden_layers": 3},
        "hidden_size = 48": {"memory_length": 8, "hidden_size": 48},
        "has 5 tokens, but config.memory_length = 4": {"memory_length": 4},
        "config.memory_length = 0; set it": {},
    }
    for message, settings in cases.items():
        with raises(ValueError, message):
            tiny_model(RelPosBertModel, "shaw", **settings)(ids, memory=memory)
    with raises(TypeError, "memory"):
        model(ids, memory=memory.states)
    absolute = tiny_model(RelPosBertModel, "sinusoidal")
    absolute.config.memory_length = 8
    with raises(ValueError, "'sinusoidal'"):
        absolute(ids, memory=memory)


@pytest.mark.slow
def test_compiled_whole():
    """No graph break; eager code of the graph, since a compiler may be missing."""
    model = tiny_model(RelPosBertLMHeadModel, "transformer_xl", is_decoder=True, memory_length=8)
    ids = token_ids(BATCH, 20)
    expected, memory = by_segments(model, ids, [8, 12])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    got, kept = by_segments(compiled, ids, [8, 12])
    assert difference(got, expected) <= 1e-5
    assert difference(kept.states[1], memory.states[1]) <= 1e-5


def test_trained_in_bfloat16_by_autocast():
    model = tiny_model(RelPosBertLMHeadModel, "transformer_xl", is_decoder=True, memory_length=8).train()
    memory = None
    for _ in range(3):
        ids = token_ids(BATCH, 6)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(ids, labels=ids, memory=memory)
        memory = outputs.memory
        outputs.loss.backward()
    assert memory.length == 8 and all(state.isfinite().all() for state in memory.states)
