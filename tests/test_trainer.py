"""The stock Trainer: it learns, resumes, and gives the same curve in one process or two."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from ddp_train import ALIKE, HEADS, make_model, train, train_schemes
from launching import run_python
from oracles import ON_TOKENS
from selection import chosen, with_full
from stock import older_than

from hf_relpos import SCHEMES


def mean(values):
    return sum(values) / len(values)


# the tasks that ask for the order of words are not for those that do not see it, or are random in training
ORDERLESS = {"cape", *(name for name in ON_TOKENS if SCHEMES[name].is_order_blind(SCHEMES[name].defaults()))}
LEARNABLE = [(scheme, task) for scheme in ON_TOKENS for task in HEADS if task == "kind" or scheme not in ORDERLESS]
# by what is trained: a parameter of the scheme's own, a network, a module that layers share, a projection of theirs
BY_TASK = {"relative_key": "order", "fire": "kind", "t5": "echo", "transformer_xl": "next"}
OTHERS = [scheme for scheme in ON_TOKENS if scheme != "t5"]
few_schemes = pytest.mark.parametrize(
    "scheme", [*with_full(["transformer_xl"], OTHERS), pytest.param("t5", marks=pytest.mark.slow)]
)


@pytest.mark.slow
@pytest.mark.parametrize("scheme, task", with_full(BY_TASK.items(), LEARNABLE))
def test_loss_goes_down(scheme, task, tmp_path):
    losses, _ = train(make_model(task, scheme), task, tmp_path, max_steps=60)
    assert len(losses) == 60
    assert mean(losses[-15:]) < 0.8 * mean(losses[:5])  # batches of 8: single steps jump


@few_schemes
def test_resume_gives_the_same_curve(scheme, tmp_path):
    """With dropout, whose random state is part of a checkpoint; the last step lies in a second epoch."""
    steps = {"max_steps": 10, "save_strategy": "steps", "save_steps": 5}
    whole, _ = train(make_model("order", scheme, dropout=0.1), "order", tmp_path, **steps)
    checkpoint = tmp_path / "checkpoint-5"
    code = "modeling_relpos_bert.py"  # of a push, not of every checkpoint
    assert (tmp_path / code).is_file() and not (checkpoint / code).exists()
    rest, trainer = train(
        make_model("order", scheme, dropout=0.1), "order", tmp_path / "again", resume=checkpoint, **steps
    )
    assert rest == whole[5:]

    trainer.save_model(tmp_path / "final")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "final")
    trained = trainer.model.state_dict()
    assert all(torch.equal(tensor, trained[key]) for key, tensor in loaded.state_dict().items())


@pytest.mark.skipif(older_than("5.14"), reason="the Trainer divides accumulated losses otherwise")
@pytest.mark.parametrize("task", with_full(["next", "kind"], HEADS))
def test_accumulated_gradients_give_the_curve_of_the_larger_batch(task, tmp_path):
    """The Trainer leaves the division to heads that take `num_items_in_batch`; the others must not claim to."""
    whole, _ = train(make_model(task, "shaw"), task, tmp_path, max_steps=5)
    parts = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 5}
    accumulated, _ = train(make_model(task, "shaw"), task, tmp_path, **parts)
    assert accumulated == pytest.approx(whole, abs=1e-5)


@few_schemes
def test_gradient_checkpointing_gives_the_same_curve(scheme, tmp_path):
    plain, _ = train(make_model("echo", scheme), "echo", tmp_path, max_steps=5)
    saved, trainer = train(make_model("echo", scheme), "echo", tmp_path, max_steps=5, gradient_checkpointing=True)
    assert trainer.model.bert.encoder.layer[0].gradient_checkpointing
    assert plain == pytest.approx(saved, abs=1e-5)


@few_schemes
def test_bf16(scheme, tmp_path):
    model, seen = make_model("kind", scheme), set()
    for layer in model.bert.encoder.layer:
        layer.attention.self.register_forward_hook(lambda module, inputs, output: seen.add(output[0].dtype))
    losses, _ = train(model, "kind", tmp_path, bf16=True)
    assert mean(losses[-5:]) < 0.8 * mean(losses[:5])
    assert seen == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.heavy
@pytest.mark.full  # by default tests/test_trainer_features.py has two processes in training
def test_two_processes_give_the_curve_of_one(tmp_path):
    """DistributedDataParallel by `accelerate launch`, half the batch on each side, one scheme after the other."""
    out, schemes = tmp_path / "losses.json", chosen(ALIKE)
    script = Path(__file__).with_name("ddp_train.py")
    run_python(script, out, tmp_path / "two", 4, *schemes, processes=2, launcher=True)
    two = json.loads(out.read_text())
    one = train_schemes(schemes, tmp_path / "one", 8)
    assert list(one) == list(two) == schemes
    for scheme in schemes:
        assert (one[scheme]["processes"], two[scheme]["processes"]) == (1, 2)
        assert len(one[scheme]["losses"]) == 6
        assert two[scheme]["losses"] == pytest.approx(one[scheme]["losses"], abs=1e-5), scheme
        assert two[scheme]["squares"] == pytest.approx(one[scheme]["squares"], rel=1e-3, abs=1e-3), scheme
