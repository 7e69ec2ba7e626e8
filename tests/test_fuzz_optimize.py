"""`optimize` beside Transformers: any encoder, head, call and padding gives the numbers of before, or the same error.

Models and calls are random. Each model gets several calls in a row, and so does a copy of it that is not optimized.
"""

import contextlib
import copy
import functools
import importlib
from typing import Any

import pytest
import torch
from encoders import (
    ARCHITECTURES,
    HEADS,
    MASK,
    OTHER,
    ROPE_TYPES,
    ROTARY,
    SCHEMES,
    Head,
    build,
    difference,
    pad_of,
    rope_fields,
    tasks_of,
    tensors_of,
    tokens,
)
from fuzzing import COUNTS, RIGHT, attempt, examples
from hypothesis import given, strategies as st
from torch import nn

from hf_relpos import optimize
from hf_relpos.attention import cpu_gemm
from hf_relpos.attention.cpu_gemm import Library


optimize_module = importlib.import_module(optimize.__module__)
MODES = ("inference", "no gradients", "gradients", "training")
PADDINGS = ("right", "right", "left", "both", "holes", "empty row", "none")


@pytest.fixture(scope="module", autouse=True)
def small_batches():
    """Padding of small batches is taken out, too, and products are oneDNN's."""
    with pytest.MonkeyPatch.context() as patch:
        fast = Library(100.0, 200.0, 1e-7, 3e-7)
        patch.setattr(optimize_module, "linear_library", lambda: fast)
        patch.setattr(cpu_gemm, "linear_library", lambda: fast)
        patch.setattr("hf_relpos.live.levels.FEWEST", 1)
        yield


@functools.lru_cache(maxsize=64)
def pair(name: str, head: str, rope_type: str, dtype: torch.dtype, padding: str, eager: bool) -> tuple[Any, Any]:
    """A model as it is, and optimized."""
    fields = rope_fields(name, rope_type) if name in ROTARY else {}
    fields |= {"attn_implementation": "eager"} if eager else {}
    stock = build(name, dtype, head if head in tasks_of(name) else "", **fields)
    stock = Head(stock, head).eval() if head in HEADS else stock
    ours = copy.deepcopy(stock)
    optimize(ours, padding=padding)
    return stock, ours


@st.composite
def models(draw):
    """Arguments of `pair`."""
    name = draw(st.sampled_from([*ARCHITECTURES, *SCHEMES]))
    head = draw(st.sampled_from(["", "", *tasks_of(name), *HEADS]))
    rope_type = draw(st.sampled_from(ROPE_TYPES)) if name in ROTARY else ""
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    # what heads read at hidden tokens is their users' affair under "mask"
    padding = draw(st.sampled_from(["zeros", "zeros", "zeros", "stock", *["mask"] * (head in ("", "mean of tokens"))]))
    return name, head, rope_type, dtype, padding, draw(st.integers(0, 5)) == 0


@st.composite
def masks(draw):
    """(B, L), True for tokens."""
    kind, rows = draw(st.sampled_from(PADDINGS)), draw(st.integers(1, 6))
    length = draw(st.integers(2, 34) | st.just(rows))
    lengths = torch.tensor(draw(st.lists(st.integers(1, length), min_size=rows, max_size=rows)))
    real = torch.arange(length) < lengths[:, None]
    if kind == "none":
        return torch.ones(rows, length, dtype=torch.bool)
    if kind in ("left", "both"):
        flipped = torch.tensor([kind == "left" or draw(st.booleans()) for _ in range(rows)])
        real = torch.where(flipped[:, None], real.flip(1), real)
    if kind == "holes":
        real[draw(st.integers(0, rows - 1)), draw(st.integers(0, length - 1))] ^= True
    if kind == "empty row":
        real[draw(st.integers(0, rows - 1))] = False
    return real


def sometimes(*values, often: Any = None):
    """One of some values, three times in four the common one."""
    return st.integers(0, 3).flatmap(lambda number: st.sampled_from(values) if number == 3 else st.just(often))


@st.composite
def calls(draw, stock, name, choices):
    """Arguments of a call, by position and by name, and its mask."""
    real = draw(masks())
    rows, length = real.shape
    encoder = stock.encoder if isinstance(stock, Head) else stock
    hidden = draw(sometimes(OTHER, MASK, often=pad_of(stock)))
    inputs = tokens(real, hidden, draw(st.integers(0, 9)))
    if draw(st.integers(0, 5)) == 0:  # some of what is hidden is no padding
        inputs["input_ids"] = torch.where(~real & (torch.arange(length) % 3 == 0), MASK, inputs["input_ids"])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    mask = draw(
        sometimes(
            torch.bool if name != "XLNet" else torch.long,
            torch.uint8,
            torch.int32,
            torch.float32,
            torch.float64,
            often=torch.long,
        )
    )
    inputs["attention_mask"] = real.to(mask)
    inputs["input_ids"] = inputs["input_ids"].to(draw(sometimes(torch.int32, often=torch.long)))
    positions = draw(sometimes("shared", "rows", "gaps", "numbers"))
    if positions:
        starts = torch.randint(0, 9, (rows, 1), generator=generator)
        found = torch.arange(length) + starts * (positions != "shared")
        found += (torch.arange(length) > length // 2) * 12 * (positions == "gaps")
        found = {"shared": found[:1], "numbers": torch.arange(length).flip(0)}.get(positions, found)
        inputs["position_ids"] = found
    if draw(st.integers(0, 3)) == 0:
        inputs["token_type_ids"] = torch.randint(0, 2, real.shape, generator=generator)
    if choices:
        inputs = {key: value[None] if value.shape[:1] == (rows,) else value for key, value in inputs.items()}
    if draw(st.integers(0, 5)) == 0 and not choices:
        ids, generator = inputs.pop("input_ids"), torch.Generator().manual_seed(0)
        embeddings = encoder.get_input_embeddings()(ids).detach()
        inputs["inputs_embeds"] = embeddings + torch.randn(embeddings.shape, generator=generator) / 9
    keywords = {
        "special_tokens_mask": (~real).long(),
        "use_cache": False,
        "head_mask": None,
        "return_loss": False,
        "return_dict": draw(st.sampled_from([False, True, None])),
        "output_hidden_states": True,
        "output_attentions": draw(st.booleans()),
        "position_ids": None,
        "token_type_ids": None,
    }
    given = draw(st.lists(st.sampled_from(sorted(keywords)), max_size=3, unique=True)) if draw(st.booleans()) else ()
    inputs |= {key: keywords[key] for key in given if key not in inputs}
    if draw(st.integers(0, 9)) == 0:
        inputs["attention_mask"] = None
    by_position = () if draw(st.booleans()) or "input_ids" not in inputs else ("input_ids", "attention_mask")
    return [inputs.pop(key) for key in by_position], inputs, real


def outcome(model: nn.Module, mode: str, args: list[Any], inputs: dict[str, Any], weights_of) -> Any:
    """What a call ends in: an error, or tensors by name, and gradients."""
    args, inputs = copy.deepcopy((args, inputs))
    context = {"inference": torch.inference_mode, "no gradients": torch.no_grad}.get(mode, contextlib.nullcontext)
    model.train(mode == "training").zero_grad()
    try:
        with context():
            found = dict(tensors_of(model(*args, **inputs)))
    except Exception as error:  # whatever the model's code raises
        return error, {}
    if mode not in ("gradients", "training"):
        return found, {}
    read = [(each * weights_of(each)).sum() for each in found.values() if each.requires_grad]
    sum(read).backward() if read else None
    return found, {key: each.grad.clone() for key, each in model.named_parameters() if each.grad is not None}


def assert_same(found, expected, real, may_be_zero, tolerance) -> bool:
    """Equal numbers at tokens, and at padding those of Transformers or zeros; whether there are zeros.

    Args:
        may_be_zero: (B, L), where a state may be zero.
    """
    assert found.keys() == expected.keys()
    is_unpadded = False
    for key, want in expected.items():
        got = found[key]
        assert got.shape == want.shape and got.dtype == want.dtype
        if want.shape[:2] != real.shape or want.dim() < 3:
            assert difference(got, want) <= tolerance, key
            continue
        assert difference(got[real], want[real]) <= tolerance, key
        if may_be_zero is not None:
            zeros = (got == 0).flatten(2).all(2) & ~(want == 0).flatten(2).all(2)
            is_unpadded |= bool(zeros.any())
            assert not (zeros & ~may_be_zero).any(), key
            assert difference(got[~zeros], want[~zeros]) <= tolerance, key
    return is_unpadded


@examples(few=220)
@given(data=st.data())
def test_optimize_calls_are_as_in_transformers(data):
    name, head, rope_type, dtype, padding, eager = data.draw(models())
    stock, ours = pair(name, head, rope_type, dtype, padding, eager)
    # sinusoids, rotations and some norms are rounded to float32, so that tokens at other positions differ
    tolerance = 1e-6 if dtype == torch.float64 else 1e-3
    for _ in range(data.draw(st.integers(1, 4))):
        args, inputs, real = data.draw(calls(stock, name, head == "MultipleChoice"))
        mode = data.draw(st.sampled_from(MODES))
        ids = args[0] if args else inputs.get("input_ids")
        is_hidden = real.logical_not()
        if padding == "stock" or (padding == "zeros" and ids is None):
            may_be_zero = torch.zeros_like(real)
        elif padding == "zeros":
            may_be_zero = is_hidden & bool((ids.reshape(real.shape)[is_hidden] == pad_of(stock)).all())
        else:
            may_be_zero = is_hidden

        def weights_of(states, real=real):
            weights = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states)
            return (
                weights * real.view(*real.shape, *[1] * (states.dim() - 2))
                if states.shape[:2] == real.shape
                else weights
            )

        expected, their_gradients = outcome(stock, mode, args, inputs, weights_of)
        found, gradients = outcome(ours, mode, args, inputs, weights_of)
        with attempt(f"optimize: {name}"):
            if isinstance(expected, Exception) or isinstance(found, Exception):
                assert type(found) is type(expected), f"{found!r} for {expected!r}"
                COUNTS["optimize, calls", f"both raise {type(found).__name__}"] += 1
                continue
            states = may_be_zero if not head else None
            is_unpadded = assert_same(found, expected, real, states, tolerance)
            assert gradients.keys() == their_gradients.keys()
            finite = {key: each for key, each in their_gradients.items() if each.isfinite().all()}
            largest = max((float(each.abs().max()) for each in finite.values()), default=0.0)
            for key, want in finite.items():
                apart = (gradients[key] - want).abs().nan_to_num(float("inf")).max()
                assert apart <= tolerance * max(largest, 1e-30), key
            COUNTS["optimize, calls", "unpadded" if is_unpadded else RIGHT] += 1
