"""Attention under a window against the same with the whole mask: outputs, gradients, dropout, memory, work."""

import dataclasses

import pytest
import torch
from computed import Computed
from errors import raises
from oracles import extra_inputs, padding, tiny_model
from test_chunked import case_id, largest
from test_formula import ALL, random_terms
from test_models import CAPABLE, ON_CPU, visible_in_window
from torch.utils.flop_counter import FlopCounterMode

from hf_relpos import RelPosBertModel
from hf_relpos.attention import dispatch as backends
from hf_relpos.attention.backends import chunked as backend_chunked, window_blocks as band_blocks
from hf_relpos.attention.backends.chunked import Chunked, chunks as skewed
from hf_relpos.attention.call import AttentionCall
from hf_relpos.attention.context import Positions
from hf_relpos.attention.dispatch import BY_NAME, run_attention
from hf_relpos.attention.sliding_window import SlidingWindowMask
from hf_relpos.schemes import SCHEMES, AttentionContext, Table, Terms
from hf_relpos.schemes.registry import combined


BATCH, HEADS, SIZE = 2, 3, 4
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks so small that these lengths take several, and nothing kept from the forward."""
    monkeypatch.setattr(skewed, "WINDOWED", 16)
    monkeypatch.setattr(skewed, "BLOCK", 8)
    monkeypatch.setattr(backend_chunked, "KEPT", 0)
    monkeypatch.setattr(band_blocks, "QUERIES", 16)


def packed(length):
    counts = [[length], [5, 40, 1, length - 46]]
    documents = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in counts]
    indices = [torch.cat([torch.arange(count) for count in row]) for row in counts]
    return {"documents": torch.stack(documents), "index_in_document": torch.stack(indices)}


def left_padded(length):
    real = padding([length, length - 37], length).flip(1)
    return {"is_token": real, "index_in_document": torch.arange(length) - real.long().argmax(-1, keepdim=True)}


def beside_memory(length):
    """30 remembered tokens, of which the second row has 12, then its segment after 8 tokens of padding."""
    real = torch.ones(2, length).bool()
    real[1, :18] = real[1, 30:38] = False
    positions = torch.where(real, real.long().cumsum(-1), 13)
    return {"is_token": real, "positions": positions, "start": 30, "global_tokens": ()}


# name: what a mask of K keys has beside its window; "start" of them are no queries
KINDS = {
    "plain": lambda n: {},
    "two global tokens": lambda n: {"global_tokens": (3, n // 2)},
    "no global token": lambda n: {"global_tokens": ()},
    "padding": lambda n: {"is_token": padding([n, n // 3], n)},
    "left padding": left_padded,
    "both rows padded": lambda n: {"is_token": padding([n // 3, n // 3], n), "global_tokens": ()},
    "both rows padded on the left, causal": lambda n: {
        "is_token": padding([n // 3, n // 3], n).flip(1),
        "index_in_document": (torch.arange(n) - (n - n // 3)).expand(2, -1),
        "is_causal": True,
    },
    "packed": packed,
    "causal": lambda n: {"is_causal": True},
    "causal, left padding": lambda n: {"is_causal": True, **left_padded(n)},
    "cache": lambda n: {"is_causal": True, "start": n - 7},
    "memory": beside_memory,
}


def mask_of(kind, length, window):
    fields = KINDS[kind](length)
    return SlidingWindowMask(length - fields.get("start", 0), length, window, CPU, **fields)


def one_by_one(mask, batch):
    """Who sees whom, (B, L, K), as the docstring of SlidingWindowMask says, one pair at a time."""
    seen = torch.zeros(batch, mask.query_length, mask.key_length, dtype=torch.bool)

    def of(vector, row, index):
        return index if vector is None else int(vector.expand(batch, -1)[row, index])

    for row in range(batch):
        for query in range(mask.query_length):
            for key in range(mask.key_length):
                i = query + mask.start
                distance = of(mask.positions, row, i) - of(mask.positions, row, key)
                everywhere = {of(mask.index_in_document, row, each) for each in (i, key)} & set(mask.global_tokens)
                near = abs(distance) <= mask.window or len(everywhere) > 0
                same = mask.documents is None or of(mask.documents, row, i) == of(mask.documents, row, key)
                past = not mask.is_causal or key <= i
                real = mask.is_token is None or bool(mask.is_token[row, key])
                seen[row, query, key] = near and same and past and real
    return seen


def real_queries(mask):
    """(B, L), which queries are no padding."""
    if mask.is_token is None:
        return torch.ones(BATCH, mask.query_length).bool()
    return mask.is_token[:, mask.start :]


@pytest.mark.parametrize("window", [1, 9, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_pairs_and_blocks(kind, window):
    """The mask is what it says of every pair; a block has all keys of its queries, and every query is in one."""
    mask = mask_of(kind, 70, window)
    expected = one_by_one(mask, BATCH)
    assert torch.equal(mask.dense.expand(BATCH, 1, -1, -1)[:, 0], expected)
    real = real_queries(mask)
    for rows in (slice(0, 2), slice(1, 2)):
        blocks = mask.blocks(rows, 16)
        assert [query for b in blocks for query in range(b.first, b.first + b.queries)] == [*range(mask.query_length)]
        for block in blocks:
            hidden = torch.ones(mask.key_length).bool()
            hidden[mask.keys_of(block)] = False
            queries = slice(block.first, block.first + block.queries)
            seen = expected[rows, queries] & real[rows, queries, None]
            assert not seen[..., hidden].any()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_read_a_band(kind):
    """16 queries read 2w + 16 keys and the global ones; a global query all, alone."""
    mask = mask_of(kind, 2000, 20)
    far = [block for block in mask.blocks(slice(0, 2), 16) if sum(count for _, count in block.key_ranges) > 100]
    assert len(far) <= 3 and all(block.queries == 1 for block in far)


def test_a_mask_moves_with_its_vectors():
    mask = mask_of("packed", 60, 5)
    moved = mask.to("meta")
    assert mask.to("cpu") is mask and mask.to("meta") is moved
    assert moved.device.type == "meta" and moved.documents.is_meta and moved.index_in_document.is_meta


def random_call(mask, terms, dropout=0.0):
    layer = torch.nn.Module()
    layer.is_causal = False
    counts = (mask.query_length, mask.key_length, mask.key_length)
    tensors = [torch.randn(BATCH, HEADS, count, SIZE).double().requires_grad_() for count in counts]
    context = AttentionContext(mask.query_length, mask.key_length, mask.start)
    return AttentionCall(*tensors, terms, context, mask=mask, dropout=dropout, needs_gradients=True, layer=layer)


def padded_call(letters, dropout=0.0):
    """A call of 120 tokens, padding in the second row, in a window of 5."""
    return random_call(mask_of("padding", 120, 5), random_terms(frozenset(letters), shared=True)[0], dropout)


def computed(how, call):
    """Output and weights; `run_attention` asks eager for the weights, and so for no blocks."""
    return (Chunked() if how == "chunked" else BY_NAME[how]).run(call)


def outputs_and_gradients(how, call, whole=False):
    """Output of real queries, and the gradients of the vectors and of every table."""
    needed = band_blocks._tensors(call)
    needed = [tensor.requires_grad_() for tensor in needed if tensor.is_floating_point()]
    out, weights = computed(how, dataclasses.replace(call, mask=call.mask.dense) if whole else call)
    assert whole or weights is None
    out = out * real_queries(call.mask)[..., None, None]
    torch.manual_seed(7)
    return [out.detach(), *torch.autograd.grad(out, needed, torch.randn_like(out), allow_unused=True)]


def difference(how, call):
    """In float64, so that nothing but rounding may differ."""
    return largest(outputs_and_gradients(how, call), outputs_and_gradients("eager", call, whole=True))


CHOSEN = [frozenset(letter) for letter in ("A", "B", "c", "V")] + [frozenset(), frozenset("Ac"), ALL]
CASES = [(kind, chosen) for kind in ("plain", "padding", "packed") for chosen in CHOSEN]
CASES += [(kind, frozenset(chosen)) for kind in KINDS for chosen in ("A", ALL) if kind not in dict(CASES)]


@pytest.mark.parametrize("kind, chosen", CASES, ids=case_id)
def test_chunks_are_the_whole_mask(kind, chosen, monkeypatch):
    """Windows narrower, wider and much wider than a block; probabilities computed again for the backward, or kept."""
    for length, window in ((101, 5), (170, 40), (80, 100)):
        terms, _ = random_terms(chosen, shared=window == 40, tables=2)
        mask = mask_of(kind, length, window)
        if len(chosen) != 1 and "packed" not in kind:
            dense = torch.randn(BATCH, HEADS, mask.query_length, length).double()
            terms = dataclasses.replace(terms, dense=(dense,))
        call = random_call(mask, terms)
        for most in (0, 1 << 30):
            monkeypatch.setattr(backend_chunked, "KEPT", most)
            assert difference("chunked", call) <= 1e-12


def every_term(mask):
    """Tables by offset and by another relation, gains, dense biases, rotation, hidden keys."""
    length, keys = mask.query_length, mask.key_length
    terms, _ = random_terms(ALL, shared=False)
    by_pair = torch.randint(6, (BATCH, length, keys))
    labels, offsets = torch.randn(1, 6, SIZE).double(), torch.randn(HEADS, 2 * keys, SIZE).double()
    more = Terms(
        query_table=(Table(labels, lambda label: label, by_pair), Table(offsets, lambda r: r + keys)),
        dense=(torch.randn(BATCH, HEADS, length, keys).double(),),
        gain=(Table(torch.rand(1, 9).double(), lambda r: r.clamp(-4, 4) + 4),),
        feature_gain=Table(torch.rand(1, 3, SIZE).double(), lambda r: r.sign() + 1),
        allow=(Table(torch.tensor([[True, True, False]]), lambda r: (r.abs() == 3).long() * 2),),
    )

    def rotate(vectors, positions):
        return vectors.roll(1, -1) * positions[..., None].cos()

    # no sum of terms has a rotation beside tables of vectors; backends compute it all the same
    return dataclasses.replace(combined(terms, more), rotate=rotate)


@pytest.mark.parametrize("how", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_any_term_are_the_whole_mask(kind, how):
    """Eager: relations of the pair, gains, dense biases, rotation; SDPA all that is a bias."""
    mask = mask_of(kind, 120, 5)
    terms = every_term(mask)
    if how == "sdpa":
        terms = dataclasses.replace(terms, gain=(), feature_gain=None, value_table=())
    call = random_call(mask, terms)
    assert band_blocks.is_for_blocks(call) and difference(how, call) <= 1e-12


def test_positions_reach_the_blocks():
    call = padded_call(ALL)
    gaps = torch.arange(120).expand(BATCH, -1) + (torch.arange(120) > 50) * 3
    context = dataclasses.replace(call.context, positions=Positions(gaps, 122))
    assert difference("eager", dataclasses.replace(call, context=context)) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("how, letters", [("chunked", ALL), ("eager", "ABc"), ("sdpa", "ABc")])
def test_memory_is_linear_in_the_length(how, letters, monkeypatch):
    """Neither forward nor backward makes anything near L·K elements, all padding and global tokens included."""
    monkeypatch.setattr(skewed, "BUFFER", 1 << 17)  # half of it is a buffer at any length
    length = 1500
    mask = mask_of("left padding", length, 8)
    call = random_call(mask, random_terms(frozenset(letters), shared=True)[0])
    with Computed() as seen:
        outputs_and_gradients(how, call)
    assert seen.largest <= 3 * BATCH * HEADS * length * SIZE < length * length // 16


QUICK = {"eager": "A", "sdpa": "AB", "relpos": "c"}
SLOW = [(how, letters) for how in QUICK for letters in QUICK.values() if letters != QUICK[how]]


@pytest.mark.parametrize("how, letters", [*QUICK.items(), *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW)])
def test_gradients_of_queries_without_keys_are_those_of_their_outputs(how, letters):
    """Padding under a window without global tokens, in calls that are computed whole."""
    is_token = padding([9, 3], 9)
    window = SlidingWindowMask(9, 9, 1, CPU, global_tokens=(), is_token=is_token)
    terms, _ = random_terms(frozenset(letters), shared=True)
    whole = random_call(window, terms)
    masks = [window, window.dense, padding([9, 0], 9)[:, None, None]]
    if how != "eager":  # there an additive mask has the gradients of a sum, as in stock
        additive = torch.zeros(window.dense.shape, dtype=torch.double)
        masks.append(additive.masked_fill(~window.dense, torch.finfo(torch.double).min))
    for mask in masks:
        call = dataclasses.replace(whole, mask=mask)

        def output(query, key, value, call=call):
            return run_attention(how, dataclasses.replace(call, query=query, key=key, value=value))[0]

        assert torch.autograd.gradcheck(output, [call.query, call.key, call.value])


def test_eager_by_name_returns_the_weights_and_has_second_derivatives():
    call = padded_call("A")
    assert band_blocks.is_for_blocks(call) and computed("eager", call)[1] is None
    out, weights = run_attention("eager", call)
    assert weights.shape == (BATCH, HEADS, 120, 120)
    (first,) = torch.autograd.grad(out.square().sum(), call.query, create_graph=True)
    assert torch.autograd.grad(first.square().sum(), call.query)[0].abs().max() > 0
    with raises(NotImplementedError, "create_graph=True"):
        torch.autograd.grad(computed("eager", call)[0].sum(), call.query, create_graph=True)


@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_dropout_of_blocks_is_replayed(how):
    """The gradient of the values is that of what the forward dropped; one number of the caller's generator is used."""
    call = padded_call("AB", dropout=0.3)

    def dropped(value, dropout=0.3):
        torch.manual_seed(3)
        return computed(how, dataclasses.replace(call, value=value, dropout=dropout))[0]

    out, direction = dropped(call.value), torch.randn_like(call.value)
    weights = torch.randn_like(out)
    dropped(call.value)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    torch.randint(1 << 62, ())
    assert torch.equal(state, torch.get_rng_state())
    (gradient,) = torch.autograd.grad(out, call.value, weights)
    step = (dropped(call.value + direction) - out).detach()
    assert abs(float((gradient * direction).sum() - (step * weights).sum())) <= 1e-9
    assert (dropped(call.value, 0.0) - out).abs().max() > 1e-2


# Models ------------------------------------------------------------------------------------------------------------


def small_everything(monkeypatch):
    """16 tokens, the most that tiny models with absolute tables take, are several blocks for each backend."""
    monkeypatch.setattr(skewed, "WINDOWED", 4)
    monkeypatch.setattr(backend_chunked, "FEWEST_SCORES", 0)
    monkeypatch.setattr(band_blocks, "QUERIES", 4)
    monkeypatch.setattr(band_blocks, "FEWEST", 1)


def states_and_gradients(model, ids, real, **inputs):
    """The states of real tokens, and the gradients of all parameters."""
    model.zero_grad()
    states = model(ids, **inputs).last_hidden_state[real]
    states.square().sum().backward()
    return [states.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.covering(2)
@pytest.mark.parametrize("is_decoder, can_unpad", [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("everywhere", [[0], [], [0, 9]], ids=["cls", "none", "two"])
@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.usefixtures("any_padding")
def test_models_with_a_window(name, backend, everywhere, is_decoder, can_unpad, monkeypatch):
    """In float64, states and gradients of every parameter are those with the whole mask prepared."""
    if backend not in CAPABLE[name]:
        backend = "relpos"
    if backend == "eager":  # by name it would have the whole mask
        monkeypatch.setattr(backends, "BACKENDS", [BY_NAME["eager"]])
        backend = "relpos"
    small_everything(monkeypatch)
    settings = {"attn_implementation": backend, "is_decoder": is_decoder, "unpad_inputs": can_unpad}
    model = tiny_model(RelPosBertModel, name, attention_window=1, global_tokens=everywhere, **settings).double()
    full = tiny_model(RelPosBertModel, name, **settings).double()
    full.load_state_dict(model.state_dict())
    real, inputs = padding([16, 13], 16), extra_inputs(name, 2, 16)
    ids = torch.randint(1, 50, real.shape) * real
    seen = visible_in_window(16, 1, everywhere, causal=is_decoder)[None] & real[:, None, :]
    expected = states_and_gradients(full, ids, real, attention_mask=seen[:, None], **inputs)
    blocks = []
    made = SlidingWindowMask.blocks
    monkeypatch.setattr(SlidingWindowMask, "blocks", lambda *given: blocks.append(made(*given)) or blocks[-1])
    got = states_and_gradients(model, ids, real, attention_mask=real.long(), **inputs)
    assert max(map(len, blocks)) >= 4
    assert largest(got[:1], expected[:1]) <= 1e-12
    size = max(float(each.abs().max()) for each in expected[1:] if each is not None)
    assert largest(got[1:], expected[1:]) <= 1e-9 * size


@pytest.mark.parametrize("backend", ["relpos", "eager"])
def test_a_configuration_that_asks_for_weights_gets_them(backend, monkeypatch):
    small_everything(monkeypatch)
    settings = {"attention_window": 1, "attn_implementation": backend, "output_attentions": True}
    model = tiny_model(RelPosBertModel, "shaw", **settings).eval()
    weights = model(torch.randint(1, 50, (2, 16))).attentions
    assert len(weights) == model.config.num_hidden_layers
    assert all(each.shape[-2:] == (16, 16) and not each[:, :, 5, 8].any() for each in weights)


def products_of(length, window):
    """Floating-point operations of the attention's products in a forward pass."""
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": length}
    model = tiny_model(RelPosBertModel, "shaw", attention_window=window, **sizes)
    ids = torch.zeros(2, length, dtype=torch.long)
    with torch.no_grad():
        model(ids)  # the first call measures which products are faster
        with FlopCounterMode(display=False) as counter:
            model(ids)
    linear = (torch.ops.aten.mm, torch.ops.aten.addmm)
    return sum(count for each, count in counter.get_flop_counts()["Global"].items() if each not in linear)


def test_attention_window_products_grow_with_the_length():
    """Twice the tokens are twice the products under a window, and four times without one."""
    short, long = (products_of(length, 16) for length in (1024, 2048))
    assert 1.8 * short < long < 2.2 * short
    assert products_of(2048, None) > 4 * long
