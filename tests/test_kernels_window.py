"""An attention window in the Triton kernels, in Triton's interpreter: results, gradients, and how the work grows."""

from dataclasses import replace

import pytest
import torch
from oracles import padding, stir, tiny_config
from test_kernels import (
    ALL,
    check_errors,
    close,
    interpreted,  # noqa: F401
    interpreter,  # noqa: F401
    make,
    of_dtype,
    terms_of,
    with_gradients,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_relpos import AttentionContext, RelPosBertForMaskedLM, Table, Terms, attend, explain_backend
from hf_relpos.attention import dispatch as backends
from hf_relpos.attention.backends.kernels import backend as kernels
from hf_relpos.attention.backends.kernels import ops, self_check, window
from hf_relpos.attention.backends.kernels.backend import Triton
from hf_relpos.attention.backends.kernels.self_check import kept
from hf_relpos.attention.formula import content_vectors, position_values
from hf_relpos.attention.sliding_window import SlidingWindowMask
from hf_relpos.attention.toeplitz import to_toeplitz


CPU = torch.device("cpu")


@pytest.fixture
def small_tiles(interpreted, monkeypatch):  # noqa: F811
    """Tiles so small that rows of pair matrices overlap at lengths that suit the interpreter."""
    monkeypatch.setattr(ops, "TILES", {key: ops.Tile(32, 32) for key in ops.TILES})
    monkeypatch.setattr(ops, "TILE", 32)


def band(length, keys, window=7, padded=None, batch=2, **settings):
    """The window of a call whose rows, but the last one, are padded to the "right" or "left"."""
    if padded is not None:
        key = torch.arange(keys)
        counts = torch.tensor([keys // 2, *[keys] * (batch - 1)])[:, None]
        begins = keys - counts if padded == "left" else torch.zeros_like(counts)
        settings |= {"is_token": (key >= begins) & (key < begins + counts), "index_in_document": key - begins}
    return SlidingWindowMask(length, keys, window, CPU, start=keys - length, **settings)


def by_window(leaves, mask, by_row=False, dropout=0.0, seed=None):
    context, terms = AttentionContext(mask.query_length, mask.key_length, mask.start), terms_of(leaves)
    content, query, key = content_vectors(leaves["query"], leaves["key"], terms, context)
    form = to_toeplitz(terms, context, query, by_row=by_row)
    return kernels.attention(content, query, key, leaves["value"], form, mask.start, mask, False, dropout, seed)


def by_formula(leaves, mask, factors=None):
    """With the mask of all pairs, and zeros for queries that see nothing; `factors` are those of the weights."""
    context, terms, seen = (
        AttentionContext(mask.query_length, mask.key_length, mask.start),
        terms_of(leaves),
        mask.dense,
    )
    out, weights = attend(leaves["query"], leaves["key"], leaves["value"], terms, context, seen)
    if factors is not None:
        weights = weights * factors
        out = weights @ leaves["value"]
        if (positional := position_values(weights, terms, context)) is not None:
            out = out + positional
    return (out * seen.any(-1, keepdim=True)).transpose(1, 2)


# letters, B, H, L, K, settings of the mask
CASES = {
    "A": ("A", 1, 1, 200, 200, {}),
    "c, no global tokens": ("c", 1, 2, 190, 190, {"global_tokens": ()}),
    "all": (ALL, 1, 2, 200, 200, {}),
    "all, several global tokens": (ALL, 1, 1, 200, 200, {"global_tokens": (0, 77, 500)}),
    "whole tiles": ("AV", 1, 1, 192, 192, {}),
    "padding": ("ABV", 2, 1, 200, 200, {"padded": "right", "global_tokens": (0, 130)}),
    "left padding": (ALL, 2, 1, 180, 180, {"padded": "left", "global_tokens": (0, 5)}),
    "left padding, causal": ("AB", 2, 1, 180, 180, {"padded": "left", "is_causal": True}),
    "causal, cache": ("ABcV", 1, 1, 100, 230, {"is_causal": True, "global_tokens": (0, 150)}),
    "cache": ("AB", 1, 1, 1, 200, {}),
    "reach": ("AV", 1, 1, 100, 200, {"is_causal": True, "reach": 60, "global_tokens": (0, 90)}),
    "narrow reach": ("BV", 1, 1, 180, 180, {"reach": 4, "global_tokens": (20,)}),
}


QUICK = {("left padding", True)}  # every term, two rows of the batch, tables by row


@pytest.mark.parametrize(
    "case, by_row",
    [
        pytest.param(case, by_row, marks=() if (case, by_row) in QUICK else pytest.mark.full)
        for case in CASES
        for by_row in (False, True)
    ],
)
def test_window_is_the_mask_of_all_pairs(case, by_row, small_tiles):
    """Output and all gradients in float32, to 2e-5 of the largest entry of each, beside eager in float64."""
    letters, batch, heads, length, keys, settings = CASES[case]
    exact, mask = make(letters, batch, heads, length, keys), band(length, keys, batch=batch, **settings)
    assert ops.numbers_per_row(keys, mask.offsets[1] - mask.offsets[0] + 1) < keys  # so that rows overlap
    expected = with_gradients(by_formula, exact, mask)
    got = with_gradients(by_window, of_dtype(exact, torch.float32), mask, by_row)
    assert close(got, expected, 2e-5)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.full
def test_random_windows(seed, small_tiles):
    """Terms, lengths, windows, global tokens, padding, causality and reach as they come."""
    torch.manual_seed(seed)

    def draw(*choices):
        return choices[int(torch.randint(len(choices), ()))]

    keys = 150 + int(torch.randint(90, ()))
    length = draw(keys, keys - 40, 33)
    mask = band(
        length,
        keys,
        window=draw(1, 3, 12),
        padded=draw(None, "left", "right"),
        global_tokens=draw((), (0,), (0, 1, 2), (33, 140)),
        is_causal=draw(False, True),
        max_lookback=draw(None, None, 5, 100),
    )
    exact = make("".join(letter for letter in ALL if draw(False, True)), 2, 1, length, keys)
    expected = with_gradients(by_formula, exact, mask)
    got = with_gradients(by_window, of_dtype(exact, torch.float32), mask, draw(False, True))
    assert close(got, expected, 2e-5)


@pytest.mark.full
def test_chunks_of_queries_have_the_keys_they_see(small_tiles, monkeypatch):
    """A workspace for some of the queries: the same, forward and backward."""
    exact, mask = make("ABV", 1, 1, 200, 200), band(200, 200, global_tokens=(3,))
    expected = with_gradients(by_formula, exact, mask)
    monkeypatch.setattr(ops, "WORKSPACE", 96 * ops.numbers_per_row(200, 15) * 4 * 6)
    got = with_gradients(by_window, of_dtype(exact, torch.float32), mask)
    assert close(got, expected, 2e-5)


@pytest.mark.full
def test_hidden_offsets_and_fully_hidden_queries(small_tiles):
    """A scheme may hide the query's own place: then some see a global token alone, and the first nothing."""
    leaves, mask = make("A", 1, 1, 200, 200, torch.float32), band(200, 200, window=1)
    context = AttentionContext(200, 200)
    terms = Terms(
        query_table=terms_of(leaves).query_table,
        allow=(Table(torch.tensor([[True, False]]), lambda r: (r > -2).long()),),
    )
    query, key, value = (leaves[name] for name in ("query", "key", "value"))
    out = kernels.attention(query, query, key, value, to_toeplitz(terms, context, query), 0, mask)
    expected = attend(query, key, value, terms, context, mask.dense)[0].transpose(1, 2)
    assert (out - expected).abs().max() <= 1e-5 and (out[:, 0] == 0).all() and (out[:, 2:] != 0).any(-1).all()
    gradients = torch.autograd.grad(out.sum(), leaves.values())
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_dropout_under_a_window_is_replayed(small_tiles):
    """Of the band, of global tokens from afar and of what they see: the weights that the mask of all pairs drops."""
    leaves, mask = make("AV", 2, 1, 170, 170, torch.float32), band(170, 170, padded="left", global_tokens=(0, 9))
    seed, threshold = 20, round(0.3 * 65536)
    factors = kept(seed, (2, 1, 170, 170), threshold) / (1 - threshold / 65536)
    expected = with_gradients(by_formula, of_dtype(leaves, torch.float64), mask, factors)
    got = with_gradients(by_window, leaves, mask, dropout=0.3, seed=torch.tensor([seed]))
    assert close(got, expected, 2e-5)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_error_under_a_window_is_at_most_twice_eagers(dtype, small_tiles):
    check_errors(by_window, by_formula, make(ALL, 1, 1, 180, 180, dtype, size=16), band(180, 180))


# Work and memory ----------------------------------------------------------------------------------------------------


def test_tiles_grow_with_the_length(small_tiles, interpreter, monkeypatch):  # noqa: F811
    """Scores are computed for tiles that meet the window, forward and backward, and for no other."""
    right, tiles = interpreter.scores, []

    def scores(q, k, bias, key_bias, mask, i, j, *rest):
        tiles.append((int(i.handle.data[0]), int(j.handle.data[0])))
        return right(q, k, bias, key_bias, mask, i, j, *rest)

    monkeypatch.setattr(interpreter, "scores", scores)
    for length in (96, 192):
        mask = band(length, length)
        with_gradients(by_window, make("A", 1, 1, length, length, torch.float32), mask)
        blocks = length // 32
        # each block meets itself and its neighbours, once in either pass
        assert len(tiles) == 2 * (3 * blocks - 2) and all(abs(i - j) <= 32 for i, j in tiles)
        tiles.clear()


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor has that is made in it."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("padded", [None, "left"])
def test_no_tensor_is_of_all_pairs(padded, monkeypatch):
    """The largest one, forward and backward with every term and dropout, doubles with the length."""
    monkeypatch.setattr(ops, "_launch", lambda *arguments, **named: None)
    monkeypatch.setattr(ops, "WORKSPACE", 1 << 40)  # or else chunks of queries would bound it
    largest = []
    for length in (4096, 8192):
        leaves, mask = make(ALL, 1, 1, length, length, torch.float32), band(length, length, 64, padded, 1)
        with Largest() as seen:
            by_window(leaves, mask, dropout=0.1).sum().backward()
        largest.append(seen.numbers)
    assert largest[1] <= 2.1 * largest[0] and largest[0] <= 0.1 * 4096**2


# Operators, the check on first use, and models ---------------------------------------------------------------------


@pytest.mark.full
def test_operators_with_a_window_keep_their_word(small_tiles):
    leaves = make("AcV", 1, 1, 40, 40, torch.float32)
    form = to_toeplitz(terms_of(leaves), AttentionContext(40, 40), leaves["query"])
    tables = [x.detach().requires_grad_() for x in (form.query_table.rows, form.bias, form.value_table.rows)]
    vectors = [leaves[name] for name in ("query", "key", "value")]
    rest, rest_lse = torch.randn(1, 40, 1, 16, requires_grad=True), torch.randn(1, 1, 40, requires_grad=True)
    given = (vectors[0], None, *vectors[1:], tables[0], None, *tables[1:], None, None, None, None, None)
    torch.library.opcheck(ops.attention, (*given, 0, 0.25, False, 0, [-3, 3], rest, rest_lse))


@pytest.mark.full
@pytest.mark.parametrize("padded, dropout", [("window", True), ("window and keys", False)])
def test_check_of_a_window(padded, dropout, small_tiles, interpreter, monkeypatch):  # noqa: F811
    """Passes, and finds a window that ends one place early."""
    monkeypatch.setattr(self_check, "WINDOW_LENGTHS", ((100, 120),))
    kind = self_check.Kind(CPU, torch.float32, 16, ("A", "c1"), padded, not dropout, dropout, "ieee")
    assert self_check.check(kind, kernels.attention).passed
    self_check.OUTCOMES.clear()

    def narrow(*arguments):
        given = list(arguments)
        given[6] = replace(given[6], window=given[6].window - 1)
        return kernels.attention(*given)

    assert not self_check.check(kind, narrow).passed


@pytest.mark.parametrize(
    "scheme, rows",
    [
        ("relative_key", "padded"),
        ("alibi", "many global tokens"),
        *(pytest.param("tables", rows, marks=pytest.mark.full) for rows in ("padded", "packed", "one token twice")),
    ],
)
def test_model_with_a_window(scheme, rows, small_tiles, monkeypatch):
    """Chosen by the model, checked at the first call, and eager's: by the window, or by the mask of pairs."""
    monkeypatch.setattr(backends, "BACKENDS", [Triton("cpu"), *backends.BACKENDS])
    monkeypatch.setattr(window, "TILE", 32)
    settings = {"attention_window": 4, "max_position_embeddings": 160, "num_hidden_layers": 1}
    settings["global_tokens"] = {"many global tokens": [*range(17)], "one token twice": [0, 0]}.get(rows)
    config = tiny_config(scheme, hidden_size=32, num_attention_heads=2, **settings)
    model = stir(RelPosBertForMaskedLM(config)).train()
    if rows != "many global tokens":
        assert "triton reads the keys in it" in explain_backend(model, 2, 160)
        assert "with more than 144 tokens it would" in explain_backend(model, 2, 140)
    ids, real = torch.randint(1, 50, (2, 160)), padding([160, 90], 160).long()
    labels = ids.masked_fill(real == 0, -100)
    inputs, kind = {"attention_mask": real}, "window and keys"
    if rows == "packed":
        ends = torch.cat([torch.arange(100), torch.arange(60)])
        inputs = {"position_ids": ends[None].expand(2, -1)}
    if rows in ("packed", "many global tokens"):
        kind = "pairs"
    results = []
    for backend in ("relpos", "eager"):
        model.set_attn_implementation(backend)
        model.zero_grad()
        loss = model(input_ids=ids, labels=labels, **inputs).loss
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all((x - y).abs().max() <= 2e-5 for x, y in zip(*results, strict=True) if x is not None)
    assert [(each.mask, found.passed) for each, found in self_check.OUTCOMES.items()] == [(kind, True)]
