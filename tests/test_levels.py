"""The level of each encoder under `optimize`, and which padding is taken out: architecture × kind of padding."""

import copy
import functools
import math
from abc import ABC
from contextlib import suppress
from types import SimpleNamespace

import encoders
import pytest
import torch
import transformers
from encoders import (
    ARCHITECTURES,
    MASK,
    OTHER,
    SCHEMES,
    SIZES,
    RemoteConfig,
    RemoteModel,
    build,
    difference,
    pad_of,
    tensors_of,
    tokens,
)
from errors import raises
from stock import older_than
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_relpos import optimize
from hf_relpos.live import check, contract
from hf_relpos.live.shadow import first_layers


pytestmark = pytest.mark.usefixtures("any_padding")
LENGTHS = [30, 9, 40, 22, 17, 3]
RIGHT = torch.arange(40) < torch.tensor(LENGTHS)[:, None]
BOTH = torch.where((torch.arange(6) % 2 == 0)[:, None], RIGHT, RIGHT.flip(1))
HOLE, EMPTY = RIGHT.clone(), RIGHT.clone()
HOLE[3, 5] = EMPTY[4] = False
# Kinds of padding: the mask, and which token is hidden; None for the padding token.
PADDING = {
    "right": (RIGHT, None),
    "left": (RIGHT.flip(1), None),
    "both": (BOTH, None),
    "hole": (HOLE, None),
    "one row": (RIGHT[:1], None),
    "one row, left": (RIGHT[:1].flip(1), None),
    "row without tokens": (EMPTY, None),
    "hidden [MASK]": (RIGHT, MASK),
    "another token": (RIGHT, OTHER),
    "none": (torch.ones(3, 40, dtype=torch.bool), None),
}
ON_THE_RIGHT = ("right", "hole", "one row")
ANYWHERE = (*ON_THE_RIGHT, "left", "both", "one row, left")
# To level and what is taken out of. Poolers read the first state; absolute positions count from the left.
LEVELS = {
    **dict.fromkeys(("BERT", "RoBERTa", "Jina v3", "ESM-2"), ("contract", ON_THE_RIGHT)),
    **dict.fromkeys(("DistilBERT", "ELECTRA", "ModernBERT", "NomicBERT", "GTE", "EuroBERT"), ("contract", ANYWHERE)),
    **dict.fromkeys(("Qwen3", "Llama", "Gemma3", "Gemma3, two-sided", "UltraBERT"), ("contract", ANYWHERE)),
    "Qwen3 with a cache": ("contract", ()),
    # a pooler; the share of [MASK] in the tokens of a row; learned positions from the first column on
    **dict.fromkeys(("ALBERT", "ESM-2, token dropout", "BART's encoder"), ("by length", ON_THE_RIGHT)),
    **dict.fromkeys(("LFM2", "remote code"), ("by length", ANYWHERE)),
    **dict.fromkeys(("T5", "mT5", "UMT5"), ("by length" if older_than("5.15") else "contract", ANYWHERE)),
    **dict.fromkeys(("DeBERTa v1", "DeBERTa v2", "RoFormer", "XLNet"), ("own", ANYWHERE)),
    "MPNet": ("own", ON_THE_RIGHT),
    **dict.fromkeys(SCHEMES, ("own", ("right", "one row"))),
}
# Sinusoids, rotations at other positions and RMSNorm are rounded to float32.
ROUNDED = ("RoFormer", "LFM2", "ESM-2, token dropout")
if older_than("5.15"):  # their softmax is
    ROUNDED += ("T5", "mT5", "UMT5")


@functools.cache
def pair(name):
    """A model as it is, one that is optimized, and the report."""
    stock = build(name)
    ours = copy.deepcopy(stock)
    return stock, ours, optimize(ours)


def outcome(model, ids):
    try:
        return model(input_ids=ids, attention_mask=torch.ones_like(ids))[0].shape
    except (IndexError, RuntimeError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_optimize_empty_batches(name, shape):
    """The same outputs, or the same error, as the model's own."""
    stock = build(name).eval()
    model, ids = copy.deepcopy(stock), torch.zeros(shape, dtype=torch.long)
    optimize(model)
    assert outcome(model, ids) == outcome(stock, ids)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *SCHEMES])
@torch.no_grad()
def test_level_and_padding(name, padding):
    (level, taken), (stock, ours, report) = LEVELS[name], pair(name)
    assert [each.level for each in report.encoders] == [level] and not report.skipped
    real, hidden = PADDING[padding]
    inputs = tokens(real, pad_of(stock) if hidden is None else hidden)
    expected, found = dict(tensors_of(stock(**inputs))), dict(tensors_of(ours(**inputs)))
    bound = 1e-6 if name in ROUNDED else 1e-9
    assert found.keys() == expected.keys()
    for key, want in expected.items():
        is_states = want.shape[:2] == real.shape
        assert difference(found[key][real] if is_states else found[key], want[real] if is_states else want) <= bound
        if is_states and want.dim() == 3 and padding in taken:
            assert want[~real].any() and not found[key][~real].any()
        else:
            assert difference(found[key], want) <= bound


@pytest.mark.parametrize("name", [*ARCHITECTURES, *SCHEMES])
def test_level_in_half_precision(name):
    """Decided in float32, where a difference is no rounding; also where it takes out no padding on the left."""
    (exact,) = pair(name)[2].encoders
    for dtype in (torch.bfloat16, torch.float16):
        report = optimize(build(name, dtype), dtype=None)
        (half,) = report.encoders
        assert (half.level, " on the right" in half.effect) == (exact.level, " on the right" in exact.effect)
        assert half.difference <= 1e-5


def test_recurrent_head_in_half_precision():
    report = str(optimize(encoders.Head(build("DistilBERT"), "BiLSTM").bfloat16().eval(), dtype=None))
    assert "padding is kept: outputs of Head depend on hidden states at padding" in report


def block_encoder(layers=3):
    """LongT5's, whose tokens attend to blocks of 24, which are counted from the first token of a row or of a batch."""
    fields = {**encoders.T5, "num_layers": layers, "local_radius": 15, "global_block_size": 24}
    torch.manual_seed(0)
    config = transformers.LongT5Config(**fields, encoder_attention_type="transient-global")
    return transformers.LongT5EncoderModel(config).double().eval()


@torch.no_grad()
def test_level_meets_blocks_longer_than_its_rows(monkeypatch):
    stock = block_encoder()
    ours, real = copy.deepcopy(stock), torch.arange(130) < torch.tensor([130, 65, 64, 9])[:, None]
    assert " on the right" in optimize(ours).encoders[0].effect
    for mask in (real, real.flip(1)):
        expected, found = (model(**tokens(mask)).last_hidden_state for model in (stock, ours))
        assert difference(found[mask], expected[mask]) <= 1e-9
    assert len(first_layers(stock).encoder.block) == 2
    monkeypatch.setattr(check, "MOST_OPERATIONS", 0)
    assert "not from 24 tokens on" in str(optimize(block_encoder()))


def test_first_layers_have_all_kinds():
    kinds = 2 * ["sliding_attention", "sliding_attention", "full_attention"]
    model = build("Gemma3", num_hidden_layers=6, layer_types=kinds)
    assert len(first_layers(model).layers) == 3 and len(model.layers) == 6


def test_level_meets_windows_wider_than_its_rows(monkeypatch):
    """They are narrower in the check, which finds a wrong one of any width; its row of 20 tokens is on the right."""
    for window, sides in ((contract.window_of, ""), (lambda mask, about: about, " on the left")):
        monkeypatch.setattr(contract, "window_of", window)
        model = build("Gemma3, two-sided", sliding_window=900)
        assert f"padding{sides} is removed" in str(optimize(model)) and model.config.sliding_window == 451


class Scaled(RemoteModel):
    """Scales by the length of a padded batch, from a length on that the rows of the check do not have."""

    def forward(self, input_ids, attention_mask):
        states = super().forward(input_ids, attention_mask).last_hidden_state
        return (states * max(1.0, math.log(input_ids.shape[1], 32)),)


class Remembering(RemoteModel):
    """Scales by the longest batch that it has seen, as rotations with dynamic scaling do that keep their tables."""

    longest = 32

    def forward(self, input_ids, attention_mask):
        self.longest = max(self.longest, input_ids.shape[1])
        return (super().forward(input_ids, attention_mask).last_hidden_state * math.log(self.longest, 32),)


class Ending(RemoteModel):
    """Takes up to 45 tokens, fewer than its configuration says."""

    def forward(self, input_ids, attention_mask):
        assert input_ids.shape[1] <= 45
        return (super().forward(input_ids, attention_mask).last_hidden_state,)


class Centred(RemoteModel):
    """Subtracts the mean of a batch, in training."""

    def forward(self, input_ids, attention_mask):
        states = super().forward(input_ids, attention_mask).last_hidden_state
        return (states - states[attention_mask != 0].mean(0) if self.training else states,)


class Running(RemoteModel):
    """Has the mean of the last batch of training, a part that is compiled, and a configuration of its own kind."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("mean", torch.zeros(config.hidden_size))
        self.config, self.places = SimpleNamespace(dropout=0.5), torch.compile(self.places, backend="eager")

    def forward(self, input_ids, attention_mask):
        states = super().forward(input_ids, attention_mask).last_hidden_state
        if self.training:
            self.mean = states[attention_mask != 0].mean(0).detach()
        return {"states": states, "mean": None}


class Cut(RemoteModel):
    """Its states end where the longest row does."""

    def forward(self, input_ids, attention_mask):
        states = super().forward(input_ids, attention_mask).last_hidden_state
        return (states[:, : int(attention_mask.sum(1).max())],)


class Final(RemoteModel):
    """Has no subclasses."""

    def __init_subclass__(cls):
        raise TypeError(f"{cls} is no class")


class Calls(list):
    """Counts calls in its only tensor."""

    def add(self):
        self[0] += 1


class Named(ABC, RemoteModel):
    """Has a dict of states, vectors and numbers of rows, arguments by name alone, a script, and a number of calls.

    Its first base gives objects another layout, and it is copied by what it is made of.
    """

    def __init__(self, config):
        super().__init__(config)
        self.calls, self.dropout = Calls([torch.zeros(1)]), nn.Dropout(0.5)
        self.script = torch.jit.script(nn.Identity())

    def __reduce__(self):
        return Named, (self.config,), {**vars(self)}

    def forward(self, *, input_ids, attention_mask):
        self.calls.add()
        states = self.script(self.dropout(super().forward(input_ids, attention_mask).last_hidden_state))
        return {"states": states, "first": states[:, 0], "tokens": attention_mask.sum(1)}


BY_LENGTH = [(Scaled, (False, False)), (Remembering, (False, False)), (Ending, (True, True)), (Centred, (True, False))]
BY_LENGTH += [(Running, (True, False)), (Named, (True, True))]


@pytest.mark.parametrize("kind, by_length", BY_LENGTH)
def test_optimize_remote_code(kind, by_length):
    """What a few short rows in evaluation do not show; whether padding is taken out in evaluation, and in training."""
    torch.manual_seed(0)
    stock = kind(RemoteConfig(**SIZES, hidden_dropout_prob=0.0)).double().eval()
    ours = copy.deepcopy(stock)
    (encoder,) = optimize(ours).encoders
    assert encoder.level == "by length" and ("not in training" in encoder.effect) == (kind in (Centred, Running))
    assert not any(getattr(ours, "calls", ())) and getattr(ours.config, "dropout", 0.5) == 0.5
    ours = copy.deepcopy(ours)
    for training, is_taken_out in zip((False, True), by_length, strict=True):
        for model in (stock, ours):
            model.train(training)
            for part in model.modules():
                if isinstance(part, nn.Dropout):
                    part.p = 0.0
        for real in (RIGHT, RIGHT[:1]):
            inputs = tokens(real)
            expected, found = stock(**inputs), ours(**inputs)
            assert len(found) == len(expected)
            expected, found = dict(tensors_of(expected)), dict(tensors_of(found))
            for key, want in expected.items():
                is_states = want.shape[:2] == real.shape
                got = found[key]
                assert difference(got[real] if is_states else got, want[real] if is_states else want) <= 1e-9
                assert not is_states or bool(got[~real].any()) != is_taken_out


@pytest.mark.parametrize("kind", [Cut, Final])
def test_optimize_remote_code_that_is_left(kind):
    (left,) = optimize(kind(RemoteConfig(**SIZES)).eval()).skipped
    assert "no level computes what it does" in left.reason


class Counter:
    """A plain object with calls that it has seen, and no more."""

    calls = 0


class Writing(RemoteModel):
    """Writes to its weights in a call, in the way that it was built for, and counts calls in other objects."""

    def __init__(self, config, way=None, when=lambda model, ids: True):
        super().__init__(config)
        self.way, self.when, self.counter, self.calls, self.note = way, when, Counter(), 0, self.count
        self.__dict__["beside"] = nn.BatchNorm1d(1)  # no submodule

    def count(self):
        self.calls += 1
        self.counter.calls += 1

    def forward(self, input_ids, attention_mask):
        self.note()
        self.beside.train()(torch.ones(2, 1))
        weight = self.layers[0].linear1.weight
        if self.when(self, input_ids):
            with suppress(ValueError):  # of code that goes on whatever happens
                self.way(weight)
        return (super().forward(input_ids, attention_mask).last_hidden_state,)


def give_memory(weight):
    """Other memory for a weight."""
    weight.data = weight.data / 2


WRITES = {
    "in place": lambda weight: weight.detach().div_(2),
    "of data": lambda weight: weight.data.mul_(0.5),
    "of a row": lambda weight: torch.mul(weight.data[0], 2, out=weight.data[0]),
    "several": lambda weight: torch._foreach_mul_([weight.detach()], 2),
    "other memory": give_memory,
}


@pytest.mark.parametrize("way", WRITES.values(), ids=WRITES)
def test_optimize_never_writes_to_the_model(way):
    model = Writing(RemoteConfig(**SIZES), way).eval()
    before, versions = copy.deepcopy(model.state_dict()), [each._version for each in model.parameters()]
    (left,) = optimize(model, dtype=None).skipped
    assert left.reason == "its forward writes to its weights (layers.0.linear1.weight)"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert versions == [each._version for each in model.parameters()]
    assert (model.calls, model.counter.calls, int(model.beside.num_batches_tracked)) == (0, 0, 0)
    with raises(ValueError, "writes to its weights", "layers.0.linear1.weight"):
        optimize(model, sample=tokens(RIGHT))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("training", [True, False])
def test_optimize_of_a_model_that_writes_at_times(training):
    """In training, or of rows that are longer than those of the check."""
    when = (lambda model, ids: model.training) if training else (lambda model, ids: ids.shape[1] > 32)
    model = Writing(RemoteConfig(**SIZES), WRITES["in place"], when).eval()
    (encoder,) = optimize(model, dtype=None).encoders
    assert ("not in training" in encoder.effect) == training
    written = model.layers[0].linear1.weight
    before = written.detach().clone()
    model.train(training)(**tokens(RIGHT))
    assert torch.equal(written, before / 2)  # once, as without `optimize`


@pytest.mark.parametrize("layers", [2, 7])
def test_optimize_rwkv_that_rescales_its_weights(layers):
    """From the seventh layer on; the others are divided by 1."""
    sizes = {"vocab_size": 60, "hidden_size": 16, "attention_hidden_size": 16}
    model = transformers.RwkvModel(transformers.RwkvConfig(**sizes, num_hidden_layers=layers)).eval()
    before, report = copy.deepcopy(model.state_dict()), str(optimize(model, dtype=None))
    assert ("writes to its weights (blocks.6.attention.output.weight)" in report) == (layers == 7)
    assert not model.layers_are_rescaled
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Asked(RemoteModel):
    """Takes arguments that the check does not know, and returns a cache by a default, whatever the others say."""

    def forward(self, input_ids, attention_mask, use_cache=True, return_dict=True, mean=False, context=None):
        states = super().forward(input_ids, attention_mask).last_hidden_state
        states = states if context is None else states + self.words(context).mean(1, keepdim=True)
        cache = DynamicCache() if use_cache else states.mean() if mean else None
        return BaseModelOutputWithPast(last_hidden_state=states, past_key_values=cache)


@torch.no_grad()
def test_optimize_remote_code_with_arguments_of_its_own():
    stock = Asked(RemoteConfig(**SIZES)).double().eval()
    ours, context = copy.deepcopy(stock), tokens(torch.ones(RIGHT.shape, dtype=torch.bool))["input_ids"]
    assert "pass use_cache=False" in str(optimize(ours))
    asked = {"use_cache": False, "return_dict": False}
    for arguments in ({}, asked, asked | {"context": context}, asked | {"mean": True}):
        expected, found = (model(**tokens(RIGHT), **arguments) for model in (stock, ours))
        assert type(found) is type(expected) and difference(found[0][RIGHT], expected[0][RIGHT]) <= 1e-9
        assert bool(found[0][~RIGHT].any()) != (arguments is asked)


@torch.no_grad()
def test_padding_by_the_mask_of_an_encoder_that_reads_hidden_tokens():
    """The scale of ESM-2's token dropout counts [MASK] tokens, also those that the mask hides."""
    stock = build("ESM-2, token dropout")
    ours, inputs = copy.deepcopy(stock), tokens(RIGHT, MASK)
    report = optimize(ours, unpad="attention_mask")
    assert "no level computes what it does" in report.skipped[0].reason
    assert torch.equal(ours(**inputs)[0], stock(**inputs)[0])
