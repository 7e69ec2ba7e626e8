"""What users of the Trainer expect of any model: several processes, sharding, checkpoints, life after a kill."""

import functools
import json
import os
import signal
from pathlib import Path

import pytest
import selection
import torch
from launching import SERVER, import_script, run_python
from parallel_train import STEPS, WAYS, alone
from selection import FEATURE_SCHEMES, with_full
from toy_training import make_model, train
from transformers import AutoModelForSequenceClassification, EarlyStoppingCallback, TrainerCallback

from hf_relpos.models.saved_code import remote_code as saving


last_checkpoint = import_script("recipes.running").last_checkpoint


deberta_first = pytest.mark.parametrize("scheme", with_full(["deberta"], FEATURE_SCHEMES))
tables_first = pytest.mark.parametrize("scheme", with_full(["tables"], FEATURE_SCHEMES))


def same(model, other):
    state = other.state_dict()
    return all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


# Two processes ------------------------------------------------------------------------------------------------------

QUICK = ("ddp", "ddp, reentrant", "ddp, resumed", "fsdp by the Trainer")


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    """A function from a scheme to what two processes report, and their folder; and to what one process does."""

    @functools.cache
    def of(scheme):
        folder = tmp_path_factory.mktemp(scheme)
        out = folder / "report.json"
        script, names = Path(__file__).with_name("parallel_train.py"), WAYS if selection.full else QUICK
        run_python(script, out, folder / "two", scheme, *names, processes=2)
        return json.loads(out.read_text()), folder / "two", *alone(scheme, folder / "one")

    return of


def check_way(way, parallel, scheme):
    """Losses to 1e-5, weights to 1e-5: rounding, over six steps."""
    report, folder, losses, model = parallel(scheme)
    assert len(losses) == STEPS and report[way] == pytest.approx(losses, abs=1e-5)
    loaded = AutoModelForSequenceClassification.from_pretrained(folder / way).state_dict()
    trained = model.state_dict()
    assert loaded.keys() == trained.keys()
    assert max((loaded[name] - trained[name]).abs().max() for name in loaded) <= 1e-5


@pytest.mark.heavy
@deberta_first
@pytest.mark.parametrize("way", with_full(["ddp", "ddp, reentrant"], ["ddp, accumulated"]))
def test_two_processes_train_as_one(way, scheme, parallel):
    """Plainly, over parts of batches, and with reentrant activation checkpointing; `test_processes` has the other."""
    found = parallel(scheme)[0][way]
    if scheme in ("deberta", "t5") and way == "ddp, reentrant":  # as any model with parameters that layers share
        assert "mark a variable ready only once" in found
    else:
        check_way(way, parallel, scheme)


@deberta_first
def test_the_trainer_shards(scheme, parallel):
    """With `fsdp=True` and the layers as units; on CPUs that accelerate takes for GPUs."""
    check_way("fsdp by the Trainer", parallel, scheme)


@deberta_first
@pytest.mark.parametrize("way", with_full(["ddp, resumed"], ["fsdp by the Trainer, resumed"]))
def test_several_processes_resume_exactly(way, scheme, parallel):
    """With dropout: bit by bit the losses of the run that was not interrupted."""
    found = parallel(scheme)[0][way]
    assert len(found["whole"]) == STEPS and found["resumed"] == found["whole"][STEPS // 2 :]


# One process --------------------------------------------------------------------------------------------------------


@tables_first
def test_bf16_keeps_weights_in_float32(scheme, tmp_path):
    """Attention computes in bfloat16, the losses are near those of float32."""
    exact, _ = train(make_model("kind", scheme), "kind", tmp_path, max_steps=10)
    model, seen = make_model("kind", scheme), set()
    model.bert.encoder.layer[0].attention.self.register_forward_hook(lambda *args: seen.add(args[-1][0].dtype))
    losses, _ = train(model, "kind", tmp_path, max_steps=10, bf16=True)
    assert losses == pytest.approx(exact, abs=0.05) and losses != exact
    assert seen == {torch.bfloat16} and {parameter.dtype for parameter in model.parameters()} == {torch.float32}


class Worse(TrainerCallback):
    """Spoils the model after a step, so that evaluations get worse from there on."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step >= self.step:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)


@tables_first
def test_early_stopping_ends_with_the_best_model(scheme, tmp_path):
    each = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 1}
    stops = [Worse(9), EarlyStoppingCallback(early_stopping_patience=2)]
    model = make_model("kind", scheme)
    _, trainer = train(model, "kind", tmp_path, more_callbacks=stops, max_steps=30, **each, **best)
    assert trainer.state.best_global_step == 8 and trainer.state.global_step == 12
    loaded = type(model).from_pretrained(tmp_path / "checkpoint-8")
    assert same(loaded, trainer.model)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, abs=1e-6)


# Killed while it saves ----------------------------------------------------------------------------------------------

RUN = {"max_steps": 9, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2}
SECOND = 6  # the step of the checkpoint in whose midst the process dies


class DieWhileSaving(TrainerCallback):
    """From some step on, the process kills itself half-way through a file of the checkpoint.

    Args:
        part: "code" (that in the folder above, which is replaced), "weights", "optimizer" or "state".
    """

    def __init__(self, part):
        self.part = part

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step != SECOND:
            return
        import transformers.modeling_utils
        from safetensors.torch import save
        from transformers.trainer_callback import TrainerState

        if self.part == "code":
            replace = os.replace

            def replace_half(source, target):
                if str(target).endswith(saving.MODELING):
                    half(source, Path(source).read_bytes())
                replace(source, target)

            os.replace = replace_half
        elif self.part == "weights":
            transformers.modeling_utils.safe_save_file = lambda tensors, path, **kwargs: half(path, save(tensors))
        elif self.part == "optimizer":
            torch.save = lambda content, path, *rest: half(path, b"PK\x03\x04" + bytes(1000))
        else:
            write = TrainerState.save_to_json

            def save_to_json(self, path):
                write(self, path)
                half(path, Path(path).read_bytes())

            TrainerState.save_to_json = save_to_json


def half(path, content):
    """Write half of a file, and die as by `kill -9`."""
    Path(path).write_bytes(content[: len(content) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def train_to_death(scheme, folder, part):
    torch.set_num_threads(1)
    train(make_model("order", scheme, dropout=0.1), "order", folder, more_callbacks=[DieWhileSaving(part)], **RUN)


def killed(function, *arguments):
    """Run it in a process of its own, which must kill itself."""
    process = SERVER.Process(target=function, args=arguments)
    process.start()
    process.join(timeout=300)
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A function from a scheme to the losses of a run that was not killed, and its model."""

    @functools.cache
    def of(scheme):
        folder = tmp_path_factory.mktemp(scheme)
        losses, trainer = train(make_model("order", scheme, dropout=0.1), "order", folder, **RUN)
        return losses, trainer.model

    return of


@pytest.mark.parametrize("part", ["code", "weights", "optimizer", "state"])
@tables_first
def test_killed_while_saving(part, scheme, tmp_path, uninterrupted):
    """The last whole checkpoint is gone on from, to losses and weights of a run that was not killed, bit by bit."""
    killed(train_to_death, scheme, tmp_path, part)
    whole, model = uninterrupted(scheme)
    assert (tmp_path / f"checkpoint-{SECOND}").is_dir()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")
    code = saving.code_files(model.config)  # which a Trainer that pushes has on the Hub
    assert {name: (tmp_path / name).read_text() for name in code} == code
    resumed = make_model("order", scheme, dropout=0.1)
    losses, trainer = train(resumed, "order", tmp_path, resume=last_checkpoint(tmp_path), **RUN)
    assert len(losses) == 6 and losses == whole[3:] and same(trainer.model, model)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-9")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-9")
    assert same(loaded, trainer.model)
    assert not saving.files_in_the_way(tmp_path)


def test_last_checkpoint(tmp_path):
    """None without any; names and contents that are no checkpoints are passed over, and steps are numbers."""
    assert last_checkpoint(tmp_path / "nowhere") is None and last_checkpoint(tmp_path) is None
    for name, state in {"9": "{}", "10": "{}", "11": "{", "x": "{}", "12": None}.items():
        (tmp_path / f"checkpoint-{name}").mkdir()
        if state:
            (tmp_path / f"checkpoint-{name}" / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-13").write_text("a file")
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
