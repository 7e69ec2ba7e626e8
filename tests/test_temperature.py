"""The log-length temperature: how many keys a query sees, what that does to it, and what it must leave alone."""

import contextlib
import itertools
import math

import pytest
import torch
from oracles import padding, tiny_config, tiny_model, uncompiled
from transformers import DynamicCache, StaticCache

from hf_relpos import RelPosBertForMaskedLM, RelPosBertModel
from hf_relpos.models import temperature


LENGTH, TRAINED = 12, 4
LOG = {"attention_temperature": "log", "attention_temperature_length": TRAINED}
BACKENDS = ("eager", "sdpa", "flex_attention")
SCHEME = "tener"  # A, B, u and c
encoder_and_decoder = pytest.mark.parametrize("is_decoder", [False, True], ids=["encoder", "decoder"])
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def words(*shape):
    return torch.randint(1, 50, shape)


def ready(backend):
    return uncompiled() if backend == "flex_attention" else contextlib.nullcontext()


@torch.no_grad()
def run(model, ids, **arguments):
    return model(ids, **arguments).last_hidden_state


@contextlib.contextmanager
def watch(model):
    """The temperatures that the layers get, one entry for each call of a layer; None where there is none."""
    seen = []

    def note(module, positional, named):
        seen.append(named["context"].temperature)

    hooks = [
        layer.attention.self.register_forward_pre_hook(note, with_kwargs=True)
        for layer in model.base_model.encoder.layer
    ]
    yield seen
    for hook in hooks:
        hook.remove()


REAL = padding([LENGTH, 7], LENGTH)
PACK = torch.tensor([[*range(9), *range(3)], [*range(5), *range(7)]])
DOCUMENT = (PACK.diff(dim=-1, prepend=PACK[:, :1]) < 0).cumsum(-1)


def near(i, j, window, everywhere=(0,)):
    return abs(i - j) <= window or i in everywhere or j in everywhere


# settings of the model, inputs, and which key each query sees besides causality
CASES = {
    "plain": ({}, {}, lambda b, i, j: True),
    "padded": ({}, {"attention_mask": REAL.long()}, lambda b, i, j: REAL[b, j]),
    "padded on the left": ({}, {"attention_mask": REAL.flip(1).long()}, lambda b, i, j: REAL[b, LENGTH - 1 - j]),
    "packed": ({}, {"position_ids": PACK}, lambda b, i, j: DOCUMENT[b, i] == DOCUMENT[b, j]),
    "window": ({"attention_window": 3}, {}, lambda b, i, j: near(i, j, 3)),
    "window, padded": (
        {"attention_window": 3, "global_tokens": [0, 2]},
        {"attention_mask": REAL.long()},
        lambda b, i, j: REAL[b, j] and near(i, j, 3, (0, 2)),
    ),
    "window, packed": (
        {"attention_window": 2},
        {"position_ids": PACK},
        lambda b, i, j: DOCUMENT[b, i] == DOCUMENT[b, j] and near(int(PACK[b, i]), int(PACK[b, j]), 2),
    ),
    "prepared": (
        {},
        {"attention_mask": (torch.arange(LENGTH)[:, None] >= torch.arange(LENGTH) - 2).expand(2, 1, -1, -1)},
        lambda b, i, j: j <= i + 2,
    ),
}


def expected_temperature(b, i, sees):
    count = sum(bool(sees(b, i, j)) for j in range(LENGTH))
    return max(1.0, math.log(count) / math.log(TRAINED)) if count else 1.0


@encoder_and_decoder
@every_backend
@pytest.mark.parametrize("settings, inputs, sees", CASES.values(), ids=CASES)
def test_it_counts_the_keys_that_a_query_sees(settings, inputs, sees, backend, is_decoder):
    if inputs.get("attention_mask", REAL).dim() == 4 and (is_decoder or backend == "flex_attention"):
        inputs = {}  # a prepared mask is the caller's whole answer; these take their own

        def sees(b, i, j):
            return True

    model = tiny_model(RelPosBertModel, SCHEME, backend, is_decoder=is_decoder, **LOG, **settings)
    with ready(backend), watch(model) as seen:
        run(model, words(2, LENGTH), **inputs)
    assert len(seen) == 2
    for given in seen:
        given = given.expand(2, 1, LENGTH)
        for b, i in itertools.product(range(2), range(LENGTH)):
            wanted = expected_temperature(b, i, lambda b, i, j: sees(b, i, j) and not (is_decoder and j > i))
            assert given[b, 0, i].item() == pytest.approx(wanted, abs=1e-6)


@encoder_and_decoder
@pytest.mark.parametrize("scheme", ["tener", "fire", "rope", "alibi"])
@pytest.mark.parametrize("settings, inputs, sees", [CASES[key] for key in ("padded", "packed", "window, padded")])
def test_backends_agree(settings, inputs, sees, scheme, is_decoder):
    model = tiny_model(RelPosBertModel, scheme, "eager", is_decoder=is_decoder, **LOG, **settings)
    ids = words(2, LENGTH)
    expected = run(model, ids, **inputs)
    real = REAL if "attention_mask" in inputs else torch.ones_like(REAL)
    for backend in BACKENDS[1:]:
        model.set_attn_implementation(backend)
        with ready(backend):
            assert (run(model, ids, **inputs) - expected)[real].abs().max() <= 1e-5


@encoder_and_decoder
@every_backend
@pytest.mark.parametrize("room", [False, True], ids=["short", "long"])
def test_rows_of_the_trained_length_are_left_exactly_alone(backend, is_decoder, room):
    """Also where they are padded, so that temperatures are computed and all come out as 1."""
    model = tiny_model(RelPosBertModel, SCHEME, backend, is_decoder=is_decoder)
    ids, mask = words(2, LENGTH if room else TRAINED), None
    if room:
        mask = padding([TRAINED, 2], LENGTH).long()
    with ready(backend):
        plain = run(model, ids, attention_mask=mask)
        model.config.attention_temperature, model.config.attention_temperature_length = "log", TRAINED
        with watch(model) as seen:
            warm = run(model, ids, attention_mask=mask)
        assert all((given is not None) == room for given in seen)
        real = padding([TRAINED, 2 if room else TRAINED], len(ids[0]))
        assert torch.equal(plain[real], warm[real])
        longer = words(1, LENGTH)
        with_it = run(model, longer)
        model.config.attention_temperature = "none"
        assert (run(model, longer) - with_it).abs().max() > 1e-3


@encoder_and_decoder
@every_backend
def test_batch_and_padding_change_nothing(backend, is_decoder):
    model = tiny_model(RelPosBertModel, SCHEME, backend, is_decoder=is_decoder, **LOG)
    lengths = [LENGTH, 7, 3]
    ids, real = words(3, LENGTH), padding(lengths, LENGTH)
    with ready(backend):
        right = run(model, ids, attention_mask=real.long())
        left = run(model, ids.flip(1), attention_mask=real.flip(1).long())
        for row, length in enumerate(lengths):
            alone = run(model, ids[row : row + 1, :length])
            assert (right[row, :length] - alone[0]).abs().max() <= 1e-5
            turned = run(model, ids[row : row + 1, :length].flip(1))
            assert (left[row, LENGTH - length :] - turned[0]).abs().max() <= 1e-5


@pytest.mark.parametrize("chunks", [[1] * LENGTH, [5, 3, 1, 1, 2], [LENGTH]], ids=str)
@pytest.mark.parametrize("backend", BACKENDS[:2])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_cached_decoding_equals_the_full_forward(backend, static, chunks):
    model = tiny_model(RelPosBertModel, SCHEME, backend, is_decoder=True, **LOG)
    ids = words(2, LENGTH)
    expected = run(model, ids, use_cache=False)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 3) if static else DynamicCache(config=model.config)
    got = torch.cat([run(model, chunk, past_key_values=cache) for chunk in ids.split(chunks, dim=1)], dim=1)
    assert (got - expected).abs().max() <= 1e-5


def test_a_layer_on_its_own_has_it_too():
    model = tiny_model(RelPosBertModel, SCHEME, "eager", **LOG)
    layer, seen = model.encoder.layer[0].attention.self, []
    layer.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output[0])))
    run(model, words(1, LENGTH))
    hidden, expected = seen[0]
    with torch.no_grad():
        assert torch.equal(layer(hidden)[0], expected)


def test_without_one_nothing_is_counted(monkeypatch):
    def fail(*arguments):
        raise AssertionError("keys were counted")

    monkeypatch.setattr(temperature, "visible_keys", fail)
    model = tiny_model(RelPosBertModel, SCHEME)
    with watch(model) as seen:
        run(model, words(2, LENGTH), attention_mask=REAL.long())
    assert seen == [None, None]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_it_trains(checkpointing):
    """Gradients of eager and sdpa agree, with gradient checkpointing too."""
    model = tiny_model(RelPosBertForMaskedLM, SCHEME, "eager", **LOG).train()
    ids = words(2, LENGTH)
    gradients = []
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        if checkpointing and backend == "sdpa":
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, attention_mask=REAL.long(), labels=ids.masked_fill(~REAL, -100)).loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert (gradient - gradients[1][name]).abs().max() <= 1e-5, name


def test_the_trained_length_is_that_of_the_configuration():
    model = tiny_model(RelPosBertModel, SCHEME, attention_temperature="log", max_position_embeddings=6)
    with watch(model) as seen:
        run(model, words(1, LENGTH))
    assert seen[0].unique().tolist() == pytest.approx([math.log(LENGTH) / math.log(6)])


def test_it_is_saved_and_can_be_chosen_at_loading(tmp_path):
    model, ids = tiny_model(RelPosBertModel, SCHEME, **LOG), words(1, LENGTH)
    model.save_pretrained(tmp_path / "with")
    warm = run(model, ids)
    model.config.attention_temperature, model.config.attention_temperature_length = "none", None
    model.save_pretrained(tmp_path / "without")
    for folder, settings in (("with", {}), ("without", LOG)):
        loaded = RelPosBertModel.from_pretrained(tmp_path / folder, **settings).eval()
        assert torch.equal(run(loaded, ids), warm)
        assert loaded.config.attention_temperature_length == TRAINED


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"attention_temperature": "warm"}, "known: 'none', 'log'"),
        ({"attention_temperature_length": 8}, "set attention_temperature='log'"),
        ({"attention_temperature": "log", "attention_temperature_length": 1}, "at least 2"),
        ({"attention_temperature": "log", "max_position_embeddings": 1}, "max_position_embeddings = 1"),
    ],
)
def test_bad_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        tiny_config("shaw", **settings)
