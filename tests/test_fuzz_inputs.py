"""Inputs of every length, shape, dtype and content: finite states, or an error that names the input."""

import pytest
import torch
from fuzzing import attempt, examples, memory_limit
from hypothesis import given, strategies as st
from oracles import tiny_config, tiny_model

from hf_relpos import RelPosBertModel
from hf_relpos.models.recurrence import SegmentMemory
from hf_relpos.schemes import SCHEMES


P = 16  # max_position_embeddings of `tiny_config`
LARGEST = 2**63 - 1
ERRORS = (ValueError, TypeError, IndexError)
DTYPES = (torch.bool, torch.uint8, torch.int32, torch.long, torch.float16, torch.float32, torch.float64)


@pytest.fixture(scope="module", autouse=True)
def limited_memory():
    with memory_limit(12):
        yield


@pytest.fixture(scope="module")
def models():
    """A tiny model for each scheme and way to read its input, made once."""
    made = {}

    def model(scheme, fields):
        key = scheme, tuple(fields.items())
        if key not in made:
            torch.manual_seed(0)
            made[key] = tiny_model(RelPosBertModel, scheme, num_hidden_layers=1, **fields)
        return made[key]

    return model


def mostly(right, *others):
    """The right one, and one time in ten another."""
    return st.integers(0, 9).flatmap(lambda number: st.sampled_from(others) if number == 9 else st.just(right))


@st.composite
def calls(draw, required):
    """Arguments of `forward`, most of them right."""
    length = draw(st.integers(0, 12) | st.integers(1, 12) | st.sampled_from([P, P + 1, 4 * P]))
    batch = draw(mostly(2, 0, 1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def numbers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    def shaped(*shape):
        kept = list(shape)
        change = draw(mostly("none", "longer", "shorter", "one", "less", "more"))
        axis = draw(st.integers(0, len(kept) - 1))
        if change in ("longer", "shorter", "one"):
            kept[axis] = {"longer": kept[axis] + 1, "shorter": max(0, kept[axis] - 1), "one": 1}[change]
        elif change == "less":
            kept.pop(axis)
        elif change == "more":
            kept.insert(axis, 1)
        return kept

    inputs = {}
    if draw(st.booleans()):
        shape = shaped(batch, length)
        low, high = draw(mostly((0, 50), (0, 51), (-1, 50), (LARGEST - 1, LARGEST)))
        inputs["input_ids"] = numbers(low, high, *shape).to(draw(mostly(torch.long, *DTYPES)))
    else:
        inputs["inputs_embeds"] = torch.randn(shaped(batch, length, 24), generator=generator)
        inputs["inputs_embeds"] = inputs["inputs_embeds"].to(draw(mostly(torch.float32, torch.long)))
    if draw(st.booleans()):
        low, high = draw(mostly((0, 2), (0, 3), (-1, 1)))
        inputs["token_type_ids"] = numbers(low, high, *shaped(batch, length)).to(draw(mostly(torch.long, *DTYPES)))
    mask = draw(st.sampled_from(["none", "2-D", "2-D", "4-D", "4-D", "3-D"]))
    if mask != "none":
        shapes = {"2-D": (batch, length), "3-D": (batch, length, length), "4-D": (batch, 1, length, length)}
        seen = numbers(0, 2, *shaped(*shapes[mask])) if draw(st.booleans()) else numbers(0, 1, *shaped(*shapes[mask]))
        floating = mask == "4-D" and draw(st.booleans())
        dtype = draw(mostly(torch.float32 if floating else torch.bool, *DTYPES))
        inputs["attention_mask"] = seen.to(dtype)
        if mask == "4-D" and dtype.is_floating_point:
            lowest = draw(st.sampled_from([torch.finfo(dtype).min, -torch.inf, -1.0]))
            inputs["attention_mask"] = inputs["attention_mask"].masked_fill(seen == 0, lowest)
    if draw(st.booleans()) or "grid" in required:
        kind = draw(st.sampled_from(["ascending", "packed", "random", "random", "huge", "limits"]))
        shape = shaped(batch, length, 2) if "grid" in required else shaped(batch, length)
        bounds = {"random": (-5, P), "huge": (0, 10**12), "limits": (-(2**62), 2**62)}
        if kind in bounds:
            ids = numbers(*bounds[kind], *shape)
        else:
            ids = torch.arange(shape[-1]).expand(shape) % (P if kind == "ascending" else 3)
        inputs["position_ids"] = ids.to(draw(mostly(torch.long, *DTYPES)))
    if "relation_ids" in required or draw(st.integers(0, 5)) == 0:
        low, high = draw(mostly((0, 2), (-1, 2), (0, 9)))
        inputs["relation_ids"] = numbers(low, high, *shaped(batch, length, length))
    if draw(st.integers(0, 5)) == 0:
        state = torch.randn(shaped(batch, 3, 24), generator=generator)
        known = numbers(0, 2, *shaped(batch, 3)).bool()
        inputs["memory"] = draw(st.sampled_from([SegmentMemory((state,), known), state, "memory"]))
    return inputs


@examples(few=80)
@given(data=st.data())
def test_states_are_finite_or_the_error_names_the_input(models, data):
    scheme = data.draw(st.sampled_from(sorted(SCHEMES)))
    kinds = [{}, {"attention_window": 3}, {"unpad_inputs": True}, {"is_decoder": True}]
    fields = data.draw(st.sampled_from(kinds))
    required = tiny_config(scheme).required_inputs
    takes_memory = SCHEMES[scheme].memory_unsupported_reason(SCHEMES[scheme].defaults()) is None
    if data.draw(st.integers(0, 3)) == 0 and takes_memory:
        fields = {"memory_length": 4}
    model = models(scheme, fields)
    inputs = data.draw(calls(required))
    implementation = data.draw(st.sampled_from(["relpos", "eager"]))
    model.config._attn_implementation = implementation
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    # an input that is too long for a table of absolute positions is named by its length
    names = [*inputs, "the input has", "grid", *required]
    with attempt("inputs", *ERRORS, names=names):
        with torch.no_grad():
            states = model(**inputs).last_hidden_state
        assert states.shape == (*tokens.shape[:2], 24)
        assert states.isfinite().all()
    model.config._attn_implementation = "relpos"


ids = torch.arange(8).expand(2, -1)


# What is given in place of `ids` or beside them, and words of the error.
WRONG = {
    "list": ({"input_ids": [[1, 2]]}, "input_ids is a list"),
    "row": ({"input_ids": ids[0]}, r"input_ids has shape \(8,\).*input_ids\[None\]"),
    "no tokens": ({"input_ids": ids[:, :0]}, r"input_ids has shape \(2, 0\)"),
    "no rows": ({"input_ids": ids[:0]}, r"input_ids has shape \(0, 8\)"),
    "floats": ({"input_ids": ids.float()}, r"input_ids has dtype torch.float32; give one of torch.int64"),
    "token": ({"input_ids": ids + 43}, "input_ids has numbers from 43 to 50; vocab_size = 50: give numbers from 0"),
    "negative token": ({"input_ids": ids - 1}, "input_ids has numbers from -1 to 6; vocab_size = 50"),
    "type": ({"token_type_ids": ids}, "token_type_ids has numbers from 0 to 7; type_vocab_size = 2"),
    "types": ({"token_type_ids": ids[:, 1:]}, r"token_type_ids has shape \(2, 7\)"),
    "width": ({"inputs_embeds": torch.ones(2, 8, 23)}, r"inputs_embeds has shape \(2, 8, 23\); give .*24"),
    "one wide": ({"inputs_embeds": torch.ones(2, 8, 1)}, r"inputs_embeds has shape \(2, 8, 1\)"),
    "integer vectors": ({"inputs_embeds": torch.ones(2, 8, 24).long()}, "inputs_embeds has dtype"),
    "long mask": ({"attention_mask": torch.ones(2, 9)}, r"attention_mask has shape \(2, 9\)"),
    "short mask": ({"attention_mask": torch.ones(2, 7)}, r"attention_mask has shape \(2, 7\)"),
    "mask of 3": ({"attention_mask": torch.ones(3, 8)}, r"attention_mask has shape \(3, 8\)"),
    "mask 3-D": ({"attention_mask": torch.ones(2, 8, 8)}, r"attention_mask has shape \(2, 8, 8\)"),
    "mask list": ({"attention_mask": [[1] * 8] * 2}, "attention_mask is a list"),
    "mask integers": ({"attention_mask": torch.ones(2, 1, 8, 8).long()}, "torch.int64; a prepared mask is boolean"),
    "float positions": ({"position_ids": ids.float()}, "position_ids has dtype torch.float32"),
    "huge gap": ({"position_ids": ids * 10**12}, "position_ids of a row differ by more than"),
    "far": ({"position_ids": ids.clamp(max=1) * (2**63 - 1) - 2**62}, "position_ids of a row differ by more than"),
    "no row": ({"position_ids": ids + 9, "scheme": "absolute"}, "position_ids.*max_position_embeddings = 16"),
    "negative position": ({"position_ids": ids - 1, "scheme": "tupe"}, "position_ids.*-1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_named(name):
    inputs, message = WRONG[name]
    inputs = dict(inputs) if "inputs_embeds" in inputs else {"input_ids": ids, **inputs}
    model = tiny_model(RelPosBertModel, inputs.pop("scheme", "t5"), num_hidden_layers=1)
    with pytest.raises(IndexError if name == "no row" else ERRORS, match=message):
        model(**inputs)
