"""A table of absolute positions that fades out in training, and what is left when it is gone."""

import json

import pytest
import torch
from ddp_train import train
from errors import raises
from oracles import stir, tiny_config, tiny_model
from torch.autograd import gradcheck
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM, TrainerCallback, set_seed

from hf_relpos import (
    AnnealAbsolutePositions,
    RelPosBertForMaskedLM,
    RelPosBertForSequenceClassification,
    RelPosBertModel,
    convert,
    drop_absolute_positions,
)
from hf_relpos.schemes.absolute import LearnedPositions


TABLE = {"absolute_position_embeddings": True}
SCHEME = "relative_key"
STEPS = 8


def words(*shape):
    return torch.randint(1, 50, shape)


def trainable(scheme=SCHEME, **overrides):
    """The same model every time; with dropout, whose random state is part of a checkpoint."""
    set_seed(0)
    settings = {**TABLE, "hidden_dropout_prob": 0.1, **overrides}
    return RelPosBertForSequenceClassification(tiny_config(scheme, **settings))


class Fades(TrainerCallback):
    """The fade that each forward pass in training used."""

    def __init__(self, model):
        self.values = []
        model.bert.embeddings.register_forward_pre_hook(
            lambda module, inputs: (
                self.values.append(module.config.absolute_position_fade) if module.training else None
            )
        )


def annealed(model, folder, resume=None, steps=6, schedule="linear", **arguments):
    """Losses, the fade of each forward pass, and the trainer."""
    fades = Fades(model).values
    callback = AnnealAbsolutePositions(steps, schedule)
    losses, trainer = train(
        model, "order", folder, resume=resume, more_callbacks=[callback], **{"max_steps": STEPS, **arguments}
    )
    return losses, fades, trainer


# --- what a fade does to the embeddings


@pytest.mark.parametrize("fade", [0.0, 0.3, 1.0])
def test_rows_are_drawn_towards_their_mean(fade):
    model = tiny_model(RelPosBertModel, SCHEME, absolute_position_fade=fade, **TABLE).double()
    ids, table = words(2, 9), model.embeddings.position_embeddings.weight
    with torch.no_grad():
        mean = table.sum(0) / len(table)
        rows = torch.stack([mean + fade * (row - mean) for row in table[:9]])
        parts = model.embeddings
        expected = parts.LayerNorm(parts.word_embeddings(ids) + parts.token_type_embeddings.weight[0] + rows)
        assert (parts(ids) - expected).abs().max() <= 1e-12
        later = parts(ids[:, :3], position_ids=torch.tensor([[4, 5, 6]]))
        spelled = parts.word_embeddings(ids[:, :3]) + parts.token_type_embeddings.weight[0] + rows[4:7]
        assert (later - parts.LayerNorm(spelled)).abs().max() <= 1e-12


def test_a_full_table_is_read_as_before(monkeypatch):
    """No arithmetic on it, so that every bit is that of a model without the field."""
    monkeypatch.setattr(LearnedPositions, "mean", None)
    model = tiny_model(RelPosBertModel, SCHEME, **TABLE)
    assert model.config.absolute_position_fade == 1.0
    ids, seen = words(2, 9), model.embeddings
    with torch.no_grad():
        plain = seen.word_embeddings(ids) + seen.token_type_embeddings(torch.zeros_like(ids))
        assert torch.equal(seen(ids), seen.LayerNorm(plain + seen.position_embeddings.weight[:9]))


def test_gradients_of_a_faded_table():
    table, ids = LearnedPositions(5, 3, "error").double(), torch.tensor([[0, 2, 2]])

    def run(weight, fade):
        return torch.func.functional_call(Reader(table, fade), {"table.weight": weight}, (ids,))

    for fade in (0.0, 0.4):
        assert gradcheck(lambda weight, fade=fade: run(weight, fade), [table.weight.detach().requires_grad_()])


class Reader(torch.nn.Module):
    def __init__(self, table, fade):
        super().__init__()
        self.table, self.fade = table, fade

    def forward(self, ids):
        return self.table(ids, fade=self.fade)


def test_wholly_faded_keep_is_drop(tmp_path):
    stock = stir(BertForMaskedLM(BertConfig(**{key: getattr(tiny_config(SCHEME), key) for key in SIZES})).eval())
    stock.save_pretrained(tmp_path / "stock")
    models = []
    for method in ("keep", "drop"):
        convert(tmp_path / "stock", tmp_path / method, position_embedding_type=SCHEME, method=method)
        models.append(AutoModelForMaskedLM.from_pretrained(tmp_path / method).eval())
    keep, drop = models
    keep.config.absolute_position_fade = 0.0
    ids = words(2, 9)
    with torch.no_grad():
        expected = drop(ids).logits
        assert (keep(ids).logits - expected).abs().max() <= 1e-6 * expected.abs().max()
    drop_absolute_positions(keep)
    weights = drop.state_dict()
    for name, tensor in keep.state_dict().items():
        assert (tensor - weights.pop(name)).abs().max() <= 1e-6, name
    assert not weights


SIZES = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "intermediate_size",
    "max_position_embeddings",
)


# --- the schedule


def test_schedules():
    linear, cosine = AnnealAbsolutePositions(4), AnnealAbsolutePositions(4, schedule="cosine")
    assert [linear.fade(step, 100) for step in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert [cosine.fade(step, 100) for step in range(6)] == pytest.approx([1, 0.853553, 0.5, 0.146447, 0, 0], abs=1e-6)
    assert cosine.fade(0, 100) == 1.0 and cosine.fade(4, 100) == 0.0
    half = AnnealAbsolutePositions()
    assert [half.fade(step, 7) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert AnnealAbsolutePositions(1.0).fade(6, 7) > 0 == AnnealAbsolutePositions(1.0).fade(7, 7)


@pytest.mark.parametrize("steps", [0, -3, 0.0, 1.5, True, "half", None], ids=repr)
def test_bad_steps(steps):
    with pytest.raises(ValueError, match="share of the run"):
        AnnealAbsolutePositions(steps)


def test_bad_schedule():
    with raises(ValueError, "linear", "cosine"):
        AnnealAbsolutePositions(schedule="stairs")


@pytest.mark.parametrize("fade", [-0.1, 1.1, float("nan")])
def test_bad_fade(fade):
    with pytest.raises(ValueError, match="from 0 to 1"):
        tiny_config(SCHEME, absolute_position_fade=fade, **TABLE)


def test_a_fade_needs_a_table():
    with pytest.raises(ValueError, match="no table to fade"):
        tiny_config(SCHEME, absolute_position_fade=0.5)


# --- in training


def test_the_trainer_fades_it_out(tmp_path):
    model = trainable()
    losses, fades, _ = annealed(model, tmp_path, gradient_accumulation_steps=2)
    expected = [max(0.0, 1 - step / 6) for step in range(STEPS)]
    assert fades == pytest.approx([fade for fade in expected for _ in range(2)])
    assert model.config.absolute_position_fade == 0.0 and len(losses) == STEPS
    still, _ = train(trainable(), "order", tmp_path, max_steps=STEPS, gradient_accumulation_steps=2)
    assert losses[0] == still[0] and losses[1:] != still[1:]


def test_resuming_goes_on_where_it_was(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 4, "schedule": "cosine"}
    whole, fades, trainer = annealed(trainable(), tmp_path, **saving)
    checkpoint = tmp_path / "checkpoint-4"
    saved = json.loads((checkpoint / "config.json").read_text())["absolute_position_fade"]
    assert saved == fades[4] == AnnealAbsolutePositions(6, "cosine").fade(4, STEPS)
    rest, resumed_fades, resumed = annealed(trainable(), tmp_path / "again", resume=checkpoint, **saving)
    assert rest == whole[4:] and resumed_fades == fades[4:]
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_a_checkpoint_is_loaded_with_its_fade(tmp_path):
    annealed(trainable(), tmp_path, save_strategy="steps", save_steps=3)
    loaded = RelPosBertForSequenceClassification.from_pretrained(tmp_path / "checkpoint-3").eval()
    assert loaded.config.absolute_position_fade == 0.5
    ids = words(2, 9)
    with torch.no_grad():
        half = loaded(ids).logits
        loaded.config.absolute_position_fade = 1.0
        assert (loaded(ids).logits - half).abs().max() > 1e-4


def test_the_best_model_has_the_fade_of_its_step(tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    model = trainable()
    every = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    _, _, trainer = annealed(model, tmp_path, learning_rate=0.02, **best, **every)
    step = trainer.state.best_global_step
    assert step < STEPS
    assert model.config.absolute_position_fade == AnnealAbsolutePositions(6).fade(step, STEPS)


@pytest.mark.parametrize(
    "scheme, settings, words",
    [(SCHEME, {"absolute_position_embeddings": False}, "nothing to fade"), ("absolute", {}, "is absolute itself")],
)
def test_what_cannot_be_annealed(scheme, settings, words, tmp_path):
    model = trainable(scheme, **settings)
    with pytest.raises(ValueError, match=words):
        annealed(model, tmp_path)
    with pytest.raises(ValueError, match=words):
        drop_absolute_positions(model)


# --- when it is gone


@pytest.mark.parametrize("size", [None, 12], ids=["plain", "narrow"])
@pytest.mark.parametrize("scheme", [SCHEME, "shaw", ["relative_key", "alibi"]], ids=str)
def test_dropping_it_changes_no_output_and_lifts_the_limit(scheme, size, tmp_path):
    model = tiny_model(RelPosBertForMaskedLM, scheme, absolute_position_fade=0.0, embedding_size=size, **TABLE)
    ids, types = words(2, 16), torch.randint(0, 2, (2, 16))
    with torch.no_grad():
        expected = model(ids, token_type_ids=types).logits
        with pytest.raises(ValueError, match="absolute positions end"):
            model(words(1, 40))
        assert drop_absolute_positions(model) is model
        found = model(ids, token_type_ids=types).logits
        assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
        assert model(words(1, 40)).logits.isfinite().all()
    assert not model.config.absolute_position_embeddings and model.config.absolute_position_fade == 1.0
    assert not any("position_embeddings" in name for name in model.state_dict())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids, token_type_ids=types).logits, found)


def test_a_table_that_has_not_faded_is_not_dropped():
    model = tiny_model(RelPosBertModel, SCHEME, absolute_position_fade=0.25, **TABLE)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with raises(ValueError, "0.25"):
        drop_absolute_positions(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
