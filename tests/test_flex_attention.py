"""FlexAttention with a score_mod, on the CPU: numbers and gradients by PyTorch's reference, numbers compiled."""

import dataclasses

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from computed import Computed
from oracles import tiny_config, uncompiled
from test_chunked import leaves_of
from test_formula import clipped, random_tensor, turn
from torch.nn.attention.flex_attention import create_block_mask

from hf_relpos import explain_backend
from hf_relpos.attention.backends import flex_attention as backend
from hf_relpos.attention.backends.flex_attention import FlexAttention
from hf_relpos.attention.call import AttentionCall
from hf_relpos.attention.context import Positions
from hf_relpos.attention.dispatch import choose, run_attention
from hf_relpos.attention.sliding_window import SlidingWindowMask
from hf_relpos.schemes import AttentionContext, Table, Terms, attend


BATCH, HEADS, LENGTH, KEYS, SIZE, START = 2, 3, 7, 9, 8, 2
CUDA = torch.device("cuda")
warns = pytest.mark.filterwarnings("ignore:(?s).*flex_attention called without torch.compile")


def clipped_to(rows, reach):
    return Table(rows, clipped(reach))


def table(*tail, reach=2, shared=False):
    return clipped_to(random_tensor(1 if shared else HEADS, 2 * reach + 1, *tail), reach)


def by_pair(*tail):
    relation = torch.randint(4, (BATCH, LENGTH, KEYS))
    return Table(random_tensor(1, 4, *tail), lambda label: label, relation)


def own(*tail):
    """A table with a row for each offset, and more rows than the call has offsets."""
    return table(*tail, reach=KEYS)


TERMS = {
    "query_table": lambda: Terms(query_table=(table(SIZE),)),
    "key_table": lambda: Terms(key_table=(table(SIZE, shared=True),)),
    "more rows than offsets": lambda: Terms(query_table=(own(SIZE),), key_table=(own(SIZE),), bias=(own(),)),
    "sums": lambda: Terms(query_table=(table(SIZE), table(SIZE, reach=1)), bias=(table(), table(reach=3))),
    "bias": lambda: Terms(scaled_bias=(table(),), bias=(table(shared=True),), content_bias=random_tensor(HEADS, SIZE)),
    "dense": lambda: Terms(dense=(random_tensor(1, HEADS, LENGTH, KEYS), random_tensor(BATCH, 1, LENGTH, KEYS))),
    "other relations": lambda: Terms(query_table=(by_pair(SIZE), table(SIZE)), bias=(by_pair(),)),
    "rotated": lambda: Terms(query_table=(table(SIZE),), rotate=turn),
    "all": lambda: Terms(
        scale=0.3,
        query_table=(table(SIZE),),
        key_table=(table(SIZE),),
        content_bias=random_tensor(HEADS, SIZE),
        scaled_bias=(table(),),
        bias=(table(),),
        dense=(random_tensor(1, HEADS, LENGTH, KEYS),),
    ),
    "hidden keys": lambda: Terms(
        query_table=(table(SIZE),),
        allow=(Table(torch.tensor([[True, True, False]] * 2 + [[False, True, True]]), lambda r: r.sign() + 1),),
    ),
}


def a_mask():
    """Different for every head and query; the key at the query's own place is always seen."""
    return (torch.rand(BATCH, HEADS, LENGTH, KEYS) < 0.6) | torch.eye(KEYS).bool()[START : START + LENGTH]


def padding():
    return (torch.arange(KEYS) < torch.tensor([[KEYS], [6]]))[:, None, None, :] | torch.eye(KEYS).bool()[START:]


def window(**changes):
    return SlidingWindowMask(LENGTH, KEYS, 2, torch.device("cpu"), start=START, **changes)


LOWEST = torch.finfo(torch.float64).min
PACKED = {"documents": torch.tensor([[0] * 4 + [1] * 5, [0] * 9])}
PACKED |= {"index_in_document": torch.tensor([[*range(4), *range(5)], [*range(9)]])}
MASKS = {
    "none": lambda: {},
    "padding": lambda: {"mask": padding()},
    "boolean": lambda: {"mask": a_mask()},
    "additive": lambda: {"mask": random_tensor(BATCH, 1, LENGTH, KEYS).masked_fill(~padding(), LOWEST)},
    "causal": lambda: {"is_causal": True},
    "window": lambda: {"mask": window(is_token=torch.ones(BATCH, KEYS).bool())},
    "documents": lambda: {"mask": window(**PACKED, is_causal=True)},
}
CONTEXTS = {
    "plain": lambda: AttentionContext(LENGTH, KEYS, START),
    "gaps": lambda: AttentionContext(
        LENGTH, KEYS, START, positions=Positions(torch.rand(BATCH, KEYS).mul(3).long().add(1).cumsum(-1), 40)
    ),
    "start on the device": lambda: AttentionContext(LENGTH, KEYS, torch.tensor([START])),
}
CASES = [
    *((terms, "none", "plain") for terms in TERMS),
    *(("all", mask, "plain") for mask in list(MASKS)[1:]),
    *(("hidden keys", mask, "plain") for mask in ("padding", "causal", "window")),
    *((terms, "boolean", context) for terms in ("all", "other relations") for context in list(CONTEXTS)[1:]),
]


def make(terms, mask="none", context="plain"):
    vectors = (random_tensor(BATCH, HEADS, count, SIZE) for count in (LENGTH, KEYS, KEYS))
    return AttentionCall(*vectors, TERMS[terms](), CONTEXTS[context](), **MASKS[mask]())


@warns
@pytest.mark.covering(1)
@pytest.mark.parametrize("terms, mask, context", CASES, ids=["-".join(case).replace(" ", "_") for case in CASES])
def test_numbers_and_gradients_are_those_of_the_formula(terms, mask, context, monkeypatch):
    """PyTorch computes gradients on the CPU, but refuses to: what it checks is left out."""
    monkeypatch.setattr(flex, "_validate_device", lambda *vectors: None)
    call = make(terms, mask, context)
    leaves, found = [call.query, call.key, call.value, *leaves_of(call.terms)], []
    for leaf in leaves:
        leaf.requires_grad_()
    upstream = random_tensor(BATCH, LENGTH, HEADS, SIZE)
    for name in ("eager", "flex_attention"):
        out, _ = run_attention(name, call)
        found.append((out, *torch.autograd.grad(out, leaves, upstream)))
    assert len(found[0]) == len(leaves) + 1
    for expected, got in zip(*found, strict=True):
        assert (got - expected).abs().max() <= 1e-12
    torch._dynamo.reset()


@warns
@pytest.mark.parametrize("terms", ["all", "hidden keys"])
def test_block_mask(terms):
    """As Transformers makes it, alone and beside the keys that a scheme hides."""
    call, visible = make(terms), a_mask()
    expected, _ = run_attention("eager", dataclasses.replace(call, mask=visible))
    mask = create_block_mask(lambda b, h, i, j: visible[b, h, i, j], BATCH, HEADS, LENGTH, KEYS, device="cpu")
    call = dataclasses.replace(call, mask=mask)
    assert choose(call)[0].name == "flex_attention"
    with uncompiled():
        got, _ = run_attention("relpos", call)
    assert (got - expected).abs().max() <= 1e-12


def test_query_without_keys_gets_zeros():
    call = make("hidden keys")
    nothing = Table(torch.zeros(1, 1).bool(), torch.zeros_like)
    call = dataclasses.replace(call, terms=dataclasses.replace(call.terms, allow=(nothing,)))
    with uncompiled():
        assert not run_attention("flex_attention", call)[0].any()


def test_what_it_captures_grows_with_the_length_alone():
    length = 600
    query = torch.randn(1, 2, length, SIZE)
    shapes = {"query_table": (17, SIZE), "key_table": (9, SIZE), "bias": (17,)}
    terms = Terms(**{field: (clipped_to(torch.randn(2, *shape), shape[0] // 2),) for field, shape in shapes.items()})
    call = AttentionCall(query, query, query, terms, AttentionContext(length, length))
    with Computed() as seen:
        backend._modifications(call, query, query)
    assert seen.largest == 2 * length * 17


COMPILED = {
    "query table": (("query_table",), None),
    "query and key table under padding": (("query_table", "key_table"), 30),
    "bias": (("bias",), None),
}


@pytest.mark.slow
@pytest.mark.covering(1)
@torch.no_grad()
@pytest.mark.parametrize("fields, real", COMPILED.values(), ids=COMPILED)
def test_compiled_forward(fields, real, monkeypatch):
    """By the compiler that CUDA gets it from, on the CPU: it has no backward there."""
    torch._dynamo.reset()
    monkeypatch.setattr(backend, "flex_attention", torch.compile(flex.flex_attention))
    query, key, value = torch.randn(3, BATCH, HEADS, 40, 16).unbind()
    tables = {field: torch.randn(HEADS, 9, *([] if field == "bias" else [16])) for field in fields}
    terms = Terms(**{field: (clipped_to(rows, 4),) for field, rows in tables.items()})
    mask = None if real is None else (torch.arange(40) < real).expand(BATCH, 1, 1, 40)
    context = AttentionContext(40, 40)
    expected, _ = attend(query, key, value, terms, context, mask)
    got, _ = run_attention("flex_attention", AttentionCall(query, key, value, terms, context, mask))
    assert (got - expected.transpose(1, 2)).abs().max() <= 1e-5


def described(terms=None, context=None, size=64, dtype=torch.bfloat16, length=4096, **changes):
    vectors = torch.empty(2, 12, length, size, dtype=dtype, device="meta")
    terms = Terms(query_table=(clipped_to(torch.empty(1, 65, size), 32),)) if terms is None else terms
    context = AttentionContext(length, length) if context is None else context
    return AttentionCall(vectors, vectors, vectors, terms, context, runs_on=CUDA, **changes)


def test_cuda_takes_it_by_default_where_it_can(monkeypatch):
    monkeypatch.setattr("hf_relpos.attention.backends.flex_attention.HAS_TRITON", True)
    assert choose(described())[0].name == choose(described(needs_gradients=True))[0].name == "flex_attention"
    value = clipped_to(torch.empty(1, 65, 64), 32)
    for reason, taken, call in [
        ("no dropout", "sdpa", described(dropout=0.1, needs_gradients=True)),
        ("attention weights", "eager", described(Terms(value_table=(value,)))),
        ("of the window", "sdpa", described(mask=SlidingWindowMask(4096, 4096, 8, CUDA))),
        ("sdpa is faster", "sdpa", described(Terms())),
        ("gain", "eager", described(Terms(gain=(clipped_to(torch.empty(1, 65), 32),)))),
        ("float64", "sdpa", described(dtype=torch.float64)),
        ("heads of 16", "sdpa", described(size=8)),
        ("up to 33,554,432 scores", "sdpa", described(length=1024, needs_gradients=True)),
        ("up to 134,217,728 scores", "sdpa", described(length=2048)),
        ("only eager returns", "eager", described(output_weights=True)),
    ]:
        chosen, rejected = choose(call)
        assert chosen.name == taken and reason in "; ".join(rejected["flex_attention"])
    monkeypatch.setattr("hf_relpos.attention.backends.flex_attention.HAS_TRITON", False)
    assert "Triton" in "; ".join(choose(described())[1]["flex_attention"])


def test_cuda_looks_for_no_package_in_a_call(monkeypatch):
    # PyTorch 2.11 leaves a graph at `find_spec`, and then fails inside its compiler
    monkeypatch.setattr("importlib.util.find_spec", None)
    assert FlexAttention().unsupported(described()) is not None


def test_harmonic_stays_plain_attention_and_the_cpu_takes_it_by_name_alone():
    harmonic = tiny_config("harmonic", hidden_size=32, num_attention_heads=2)
    assert "takes sdpa" in explain_backend(harmonic, 2, 600, "cuda")
    said = explain_backend(tiny_config("relative_key"), 2, 600)
    assert "not flex_attention: by default it is for CUDA alone" in said
    assert not FlexAttention().unsupported(dataclasses.replace(make("all"), by_name=True))
