"""Attention under a window against the same with the whole mask: outputs, gradients, dropout, memory, work."""

import dataclasses

import pytest
import torch
from errors import raises
from oracles import extra_inputs, padding, tiny_model
from test_chunked import case_id, converted, largest
from test_formula import ALL, LargestTensor as Largest, random_terms
from test_models import CAPABLE, ON_CPU, visible_in_window
from torch.utils.flop_counter import FlopCounterMode

from hf_relpos import SCHEMES, AttentionContext, RelPosBertLMHeadModel, RelPosBertModel, Table, Terms, attend
from hf_relpos.attention import dispatch as backends
from hf_relpos.attention.backends import chunked as backend_chunked, window_blocks as band_blocks
from hf_relpos.attention.backends.chunked import chunked_attention, chunks as skewed
from hf_relpos.attention.call import AttentionCall
from hf_relpos.attention.dispatch import BY_NAME, run_attention
from hf_relpos.attention.formula import content_vectors
from hf_relpos.attention.sliding_window import SlidingWindowMask
from hf_relpos.attention.toeplitz import to_toeplitz
from hf_relpos.schemes.registry import combined


BATCH, HEADS, SIZE = 2, 3, 4
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks so small that these lengths take several, and nothing kept from the forward."""
    monkeypatch.setattr(skewed, "WINDOWED", 16)
    monkeypatch.setattr(skewed, "BLOCK", 8)
    monkeypatch.setattr(backend_chunked, "KEPT", 0)


def lengths_of(*documents):
    """Document numbers and positions in them, each (K,)."""
    numbers = [torch.full((count,), number) for number, count in enumerate(documents)]
    return torch.cat(numbers), torch.cat([torch.arange(count) for count in documents])


def packed(length):
    rows = [lengths_of(length), lengths_of(5, 40, 1, length - 46)]
    documents, indices = (torch.stack(vectors) for vectors in zip(*rows, strict=True))
    return {"documents": documents, "index_in_document": indices}


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


def run(tensors, terms, context, mask, whole, dropout=0.0):
    """Output of real queries, (B, L, H, d), and all gradients; by the formula with the whole mask, or in chunks."""
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    terms, leaves = converted(terms, torch.float64)
    if whole:
        out = attend(*tensors, terms, context, mask.dense)[0].transpose(1, 2)
    else:
        content, query, key = content_vectors(*tensors[:2], terms, context)
        form = to_toeplitz(terms, context, query)
        out = chunked_attention(content, query, key, tensors[2], form, context.start, mask, dropout=dropout)
    out = out * real_queries(mask)[:, :, None, None]
    torch.manual_seed(7)
    gradient = torch.randn(out.shape, dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, [*tensors, *leaves], gradient, allow_unused=True)]


CHOSEN = [frozenset(letter) for letter in ("A", "B", "c", "V")] + [frozenset(), frozenset("Ac"), ALL]
CASES = [(kind, chosen) for kind in ("plain", "padding", "packed") for chosen in CHOSEN]
CASES += [(kind, frozenset(chosen)) for kind in KINDS for chosen in ("A", ALL) if kind not in dict(CASES)]


@pytest.mark.parametrize("kind, chosen", CASES, ids=case_id)
def test_output_and_gradients_are_those_of_the_whole_mask(kind, chosen, monkeypatch):
    """In float64, so that nothing but rounding may differ; windows narrower, wider and much wider than a block.

    With probabilities computed again for the backward, and kept for it.
    """
    for length, window in ((101, 5), (170, 40), (80, 100)):
        terms, _ = random_terms(chosen, shared=window == 40, tables=2)
        mask = mask_of(kind, length, window)
        if len(chosen) != 1 and "packed" not in kind:
            dense = torch.randn(BATCH, HEADS, mask.query_length, length).double()
            object.__setattr__(terms, "dense", (dense,))
        tensors = [torch.randn(BATCH, HEADS, count, SIZE).double() for count in (mask.query_length, length, length)]
        context = AttentionContext(mask.query_length, length, mask.start)
        expected = run(tensors, terms, context, mask, whole=True)
        for most in (0, 1 << 30):
            monkeypatch.setattr(backend_chunked, "KEPT", most)
            got = run(tensors, terms, context, mask, whole=False)
            assert largest(got, expected) <= 1e-12


def test_dropout_is_replayed_and_fair():
    """The gradient is that of what the forward dropped; the mean over many draws is the output without."""
    terms, _ = random_terms(ALL, shared=False)
    mask, context = mask_of("padding", 60, 5), AttentionContext(60, 60)
    tensors = [torch.randn(BATCH, HEADS, 60, SIZE).double() for _ in range(3)]
    content, query, key = content_vectors(*tensors[:2], terms, context)
    form = to_toeplitz(terms, context, query)

    def dropped(value, seed):
        torch.manual_seed(seed)
        return chunked_attention(content, query, key, value, form, 0, mask, dropout=0.25)

    value = tensors[2].requires_grad_()
    direction = torch.randn_like(value)
    out = dropped(value, 3)
    weights = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, value, weights)
    step = (dropped(value + direction, 3) - out).detach()  # linear in the values
    assert abs(float((gradient * direction).sum() - (step * weights).sum())) <= 1e-10
    with torch.no_grad():
        mean = sum(dropped(value, seed) for seed in range(200)) / 200
        plain = chunked_attention(content, query, key, value, form, 0, mask)
    real = real_queries(mask)
    assert (mean - plain)[real].abs().mean() <= 0.1 * plain[real].abs().mean()


@pytest.mark.slow
def test_memory_is_linear_in_the_length(monkeypatch):
    """Neither forward nor backward makes anything near L·K elements, all padding and global tokens included."""
    monkeypatch.setattr(skewed, "BUFFER", 1 << 17)  # half of it is a buffer at any length
    length = 1500
    terms, _ = random_terms(ALL, shared=True)
    mask = mask_of("left padding", length, 8)
    tensors = [torch.randn(BATCH, HEADS, length, SIZE).double() for _ in range(3)]
    with Largest() as seen:
        run(tensors, terms, AttentionContext(length, length), mask, whole=False)
    assert seen.elements <= 3 * BATCH * HEADS * length * SIZE < length * length // 16


def test_the_mask_is_made_once_for_all_layers(monkeypatch):
    """Chunks of it are kept, until it moves to another device."""
    mask = mask_of("padding", 100, 5)
    call = skewed.ChunkedCall(None, mask=mask)
    first = skewed.schedule(call, slice(0, 2), 100, 100)
    monkeypatch.setattr(SlidingWindowMask, "visible", None)
    assert skewed.schedule(call, slice(0, 2), 100, 100) is first
    assert mask.to("cpu") is mask and mask.to("meta").is_token.is_meta
    assert mask.to("meta") is mask.to("meta")


def test_fields_move_together():
    mask = mask_of("packed", 60, 5).to("meta")
    vectors = [getattr(mask, field.name) for field in dataclasses.fields(mask)]
    assert all(vector.is_meta for vector in vectors if isinstance(vector, torch.Tensor))


# Backends that hold matrices of scores -----------------------------------------------------------------------------


def random_call(mask, terms, tensors, dropout=0.0):
    layer = torch.nn.Module()
    layer.is_causal = False
    context = AttentionContext(mask.query_length, mask.key_length, mask.start)
    return AttentionCall(*tensors, terms, context, mask=mask, dropout=dropout, needs_gradients=True, layer=layer)


def every_term(mask):
    """Tables by offset and by another relation, gains, dense biases, rotation, hidden keys."""
    length, keys = mask.query_length, mask.key_length
    terms, _ = random_terms(ALL, shared=False)
    by_pair = torch.randint(6, (BATCH, length, keys))
    offsets = torch.randn(HEADS, 2 * keys, SIZE).double()
    more = Terms(
        query_table=(
            Table(torch.randn(1, 6, SIZE).double(), lambda label: label, by_pair),
            Table(offsets, lambda r: r + keys),
        ),
        dense=(torch.randn(BATCH, HEADS, length, keys).double(),),
        gain=(Table(torch.rand(1, 9).double(), lambda r: r.clamp(-4, 4) + 4),),
        feature_gain=Table(torch.rand(1, 3, SIZE).double(), lambda r: r.sign() + 1),
        allow=(Table(torch.tensor([[True, True, False]]), lambda r: (r.abs() == 3).long() * 2),),
    )
    # no sum of terms has a rotation beside tables of vectors; backends compute it all the same
    return dataclasses.replace(
        combined(terms, more), rotate=lambda vectors, positions: vectors.roll(1, -1) * positions[..., None].cos()
    )


def computed(how, call):
    """Output and weights; by name eager would return the weights, and so have no blocks."""
    return BY_NAME["eager"].run(call) if how == "eager" else run_attention(how, call)


def by_call(how, call):
    """Output of real queries, and the gradients of the vectors and of every table."""
    tensors = [tensor.detach().requires_grad_() for tensor in (call.query, call.key, call.value)]
    leaves = [leaf.detach() for leaf in band_blocks._leaves(call.terms)]
    leaves = [leaf.requires_grad_(leaf.is_floating_point()) for leaf in leaves]
    count = len(band_blocks._tables(call.terms))
    tables = [
        Table(rows, table.row_of, table.relation)
        for rows, table in zip(leaves, band_blocks._tables(call.terms), strict=False)
    ]
    terms = band_blocks._with_leaves(call.terms, tables, leaves[count:])
    query, key, value = tensors
    out, weights = computed(how, dataclasses.replace(call, query=query, key=key, value=value, terms=terms))
    assert weights is None or how == "eager"
    real = real_queries(call.mask) if isinstance(call.mask, SlidingWindowMask) else call.mask.any(-1).any(1)
    out = out * real[..., None, None]
    torch.manual_seed(7)
    needed = [*tensors, *(leaf for leaf in leaves if leaf.requires_grad)]
    return [out.detach(), *torch.autograd.grad(out, needed, torch.randn(out.shape).double(), allow_unused=True)]


@pytest.mark.parametrize("how", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_any_term_are_the_whole_mask(kind, how, monkeypatch):
    """Eager: relations of the pair, gains, dense biases, rotation; SDPA all that is a bias."""
    monkeypatch.setattr(band_blocks, "QUERIES", 16)
    mask = mask_of(kind, 120, 5)
    terms = every_term(mask)
    if how == "sdpa":
        terms = dataclasses.replace(terms, gain=(), feature_gain=None, value_table=())
    tensors = [torch.randn(BATCH, HEADS, count, SIZE).double() for count in (mask.query_length, 120, 120)]
    call = random_call(mask, terms, tensors)
    assert band_blocks.is_for_blocks(call)
    got = by_call(how, call)
    monkeypatch.setattr(band_blocks, "FEWEST", 1000)
    assert not band_blocks.is_for_blocks(call)
    assert largest(got, by_call(how, call)) <= 1e-12


@pytest.mark.parametrize(
    "how, letters",
    [
        pytest.param(how, letters, marks=[] if number == place else pytest.mark.slow)
        for number, how in enumerate(("eager", "sdpa", "relpos"))
        for place, letters in enumerate(("A", "AB", "c"))
    ],
)
def test_gradients_of_queries_without_keys_are_those_of_their_outputs(how, letters, monkeypatch):
    """Padding under a window without global tokens, in calls that are computed whole."""
    monkeypatch.setattr(backend_chunked, "FEWEST_SCORES", 1 << 19)
    is_token = padding([9, 3], 9)
    window = SlidingWindowMask(9, 9, 1, CPU, global_tokens=(), is_token=is_token)
    terms, _ = random_terms(frozenset(letters), shared=True)
    tensors = [torch.randn(BATCH, HEADS, 9, SIZE).double().requires_grad_() for _ in range(3)]
    masks = [window, window.dense, padding([9, 0], 9)[:, None, None]]
    if how != "eager":  # there an additive mask has the gradients of a sum, as in stock
        additive = torch.zeros(window.dense.shape, dtype=torch.double)
        masks.append(additive.masked_fill(~window.dense, torch.finfo(torch.double).min))
    for mask in masks:
        call = dataclasses.replace(random_call(window, terms, tensors), mask=mask)

        def output(query, key, value, call=call):
            return run_attention(how, dataclasses.replace(call, query=query, key=key, value=value))[0]

        assert torch.autograd.gradcheck(output, tensors)


def test_eager_by_name_returns_the_weights_and_has_second_derivatives(monkeypatch):
    monkeypatch.setattr(band_blocks, "QUERIES", 16)
    mask = mask_of("padding", 120, 5)
    terms, _ = random_terms(frozenset("A"), shared=True)
    tensors = [torch.randn(BATCH, HEADS, 120, SIZE).double().requires_grad_() for _ in range(3)]
    call = random_call(mask, terms, tensors)
    assert band_blocks.is_for_blocks(call) and computed("eager", call)[1] is None
    out, weights = run_attention("eager", call)
    assert weights.shape == (BATCH, HEADS, 120, 120)
    (first,) = torch.autograd.grad(out.square().sum(), tensors[0], create_graph=True)
    assert torch.autograd.grad(first.square().sum(), tensors[0])[0].abs().max() > 0
    with raises(NotImplementedError, "create_graph=True"):
        torch.autograd.grad(computed("eager", call)[0].sum(), tensors[0], create_graph=True)


def test_random_numbers_of_blocks_leave_other_generators_alone(monkeypatch):
    monkeypatch.setattr(band_blocks, "QUERIES", 16)
    terms, _ = random_terms(frozenset("A"), shared=True)
    tensors = [torch.randn(BATCH, HEADS, 120, SIZE).double() for _ in range(3)]
    call = random_call(mask_of("padding", 120, 5), terms, tensors, dropout=0.3)
    torch.manual_seed(0)
    torch.randint(1 << 62, ())  # the seed of the call
    expected = torch.rand(3)
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("it seeds every device"))
    computed("eager", call)
    assert torch.equal(torch.rand(3), expected)


def test_positions_reach_the_blocks(monkeypatch):
    monkeypatch.setattr(band_blocks, "QUERIES", 16)
    mask = mask_of("padding", 120, 5)
    terms, _ = random_terms(ALL, shared=True)
    tensors = [torch.randn(BATCH, HEADS, 120, SIZE).double() for _ in range(3)]
    call = random_call(mask, terms, tensors)
    gaps = torch.arange(120).expand(BATCH, -1) + (torch.arange(120) > 50) * 3
    context = dataclasses.replace(call.context, positions=gaps, max_distance=122)
    call = dataclasses.replace(call, context=context)
    got = by_call("eager", call)
    monkeypatch.setattr(band_blocks, "FEWEST", 1000)
    assert largest(got, by_call("eager", call)) <= 1e-12


@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_dropout_of_blocks_is_replayed(how, monkeypatch):
    """The gradient of the values is that of what the forward dropped."""
    monkeypatch.setattr(band_blocks, "QUERIES", 16)
    mask = mask_of("padding", 120, 5)
    terms, _ = random_terms(frozenset("AB"), shared=True)
    query, key, value = (torch.randn(BATCH, HEADS, 120, SIZE).double() for _ in range(3))

    def dropped(value):
        torch.manual_seed(3)
        return computed(how, random_call(mask, terms, [query, key, value], dropout=0.3))[0]

    value.requires_grad_()
    out, direction = dropped(value), torch.randn_like(value)
    weights = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, value, weights)
    torch.manual_seed(4)
    step = (dropped(value + direction) - out).detach()
    assert abs(float((gradient * direction).sum() - (step * weights).sum())) <= 1e-9
    with torch.no_grad():
        assert (computed(how, random_call(mask, terms, [query, key, value]))[0] - out).abs().max() > 1e-2


@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_memory_of_blocks_is_linear_in_the_length(how):
    """No tensor of L·K elements, mask included."""
    length = 4000
    mask = SlidingWindowMask(length, length, 8, CPU)
    terms, _ = random_terms(frozenset("ABc"), shared=True)
    call = random_call(mask, terms, [torch.randn(1, HEADS, length, SIZE).double() for _ in range(3)])
    with Largest() as seen:
        by_call(how, call)
    assert seen.elements <= 2 * HEADS * length * 16 < length * length // 16


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
@pytest.mark.parametrize("is_decoder, unpads", [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("everywhere", [[0], [], [0, 9]], ids=["cls", "none", "two"])
@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("name", SCHEMES)
def test_models_with_a_window(name, backend, everywhere, is_decoder, unpads, monkeypatch):
    """In float64, states and gradients of every parameter are those with the whole mask prepared."""
    if backend not in CAPABLE[name]:
        backend = "relpos"
    if backend == "eager":  # by name it would have the whole mask
        monkeypatch.setattr(backends, "BACKENDS", [BY_NAME["eager"]])
        backend = "relpos"
    small_everything(monkeypatch)
    settings = {"attn_implementation": backend, "is_decoder": is_decoder, "unpad_inputs": unpads}
    model = tiny_model(RelPosBertModel, name, attention_window=1, global_tokens=everywhere, **settings).double()
    full = tiny_model(RelPosBertModel, name, **settings).double()
    full.load_state_dict(model.state_dict())
    ids, real, inputs = torch.randint(1, 50, (2, 16)), padding([16, 13], 16), extra_inputs(name, 2, 16)
    seen = visible_in_window(16, 1, everywhere, causal=is_decoder)[None] & real[:, None, :]
    expected = states_and_gradients(full, ids, real, attention_mask=seen[:, None], **inputs)
    blocks = []
    made = SlidingWindowMask.blocks
    monkeypatch.setattr(SlidingWindowMask, "blocks", lambda *given: blocks.append(made(*given)) or blocks[-1])
    got = states_and_gradients(model, ids, real, attention_mask=real.long(), **inputs)
    assert max(map(len, blocks)) >= 4
    assert largest(got[:1], expected[:1]) <= 1e-12
    assert largest(got[1:], expected[1:]) <= 1e-9 * max(
        float(each.abs().max()) for each in expected[1:] if each is not None
    )


@pytest.mark.parametrize("backend", ["relpos", "eager"])
def test_a_configuration_that_asks_for_weights_gets_them(backend, monkeypatch):
    small_everything(monkeypatch)
    settings = {"attention_window": 1, "attn_implementation": backend, "output_attentions": True}
    model = tiny_model(RelPosBertModel, "shaw", **settings).eval()
    weights = model(torch.randint(1, 50, (2, 16))).attentions
    assert len(weights) == model.config.num_hidden_layers
    assert all(each.shape[-2:] == (16, 16) and not each[:, :, 5, 8].any() for each in weights)


def test_generation_with_a_cache_in_a_window(monkeypatch):
    """As without a cache, and of the cache only the window and the global token are read."""
    small_everything(monkeypatch)
    model = tiny_model(RelPosBertLMHeadModel, "shaw", is_decoder=True, attention_window=2, max_position_embeddings=64)
    settings = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
    ids = torch.randint(1, 50, (2, 30))
    with_cache = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    ranges = []
    made = skewed._chunk_of_window

    def counted(*given):
        chunk = made(*given)
        ranges.append(sum(count for _, count in chunk.key_ranges))
        return chunk

    monkeypatch.setattr(skewed, "_chunk_of_window", counted)
    again = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert torch.equal(with_cache, again)
    assert torch.equal(
        with_cache, model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **settings)
    )
    assert ranges.count(4) >= 11  # three in the window, and the first


def test_segments_with_a_memory_in_a_window(monkeypatch):
    """A text in segments, each with the memory of those before, is the text at once."""
    small_everything(monkeypatch)
    model = tiny_model(
        RelPosBertLMHeadModel,
        "transformer_xl",
        is_decoder=True,
        attention_window=3,
        global_tokens=[],
        memory_length=40,
        max_position_embeddings=64,
    ).double()
    ids = torch.randint(1, 50, (2, 60))
    with torch.no_grad():
        whole, memory, parts = model(ids, use_cache=False).logits, None, []
        for segment in ids.split(20, dim=1):
            outputs = model(segment, memory=memory, use_cache=False)
            memory = outputs.memory
            parts.append(outputs.logits)
    assert (torch.cat(parts, dim=1) - whole).abs().max() <= 1e-12


def products_of(length, window):
    """Floating-point operations of the attention's products in a forward pass."""
    model = tiny_model(
        RelPosBertModel, "shaw", attention_window=window, num_hidden_layers=1, max_position_embeddings=length
    )
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, length, dtype=torch.long))
    linear = (torch.ops.aten.mm, torch.ops.aten.addmm)
    return sum(count for each, count in counter.get_flop_counts()["Global"].items() if each not in linear)


@pytest.mark.slow
def test_products_under_a_window_grow_with_the_length():
    """Twice the tokens are twice the products under a window, and four times without one."""
    short, long = (products_of(length, 16) for length in (1024, 2048))
    assert 1.8 * short < long < 2.2 * short
    assert products_of(2048, None) > 4 * long
