"""Distillation: what the loss measures, which weights move, several processes, and what is refused."""

import json
import math
from pathlib import Path

import pytest
import torch
from distil_train import LIMIT, VOCABULARY, pair, texts
from launching import run_python
from oracles import tiny_sizes
from stock import older_than
from transformers import BertConfig, BertForMaskedLM, BertModel, RobertaConfig, RobertaModel, TrainerCallback

from hf_relpos import RelPosBertModel
from hf_relpos.evaluation import windowed_hidden_states
from hf_relpos.training import distil
from hf_relpos.training.data import Window, WindowBatches, collate
from hf_relpos.training.losses import (
    DEFAULT_LOSSES,
    LOSSES,
    attention_loss,
    compute_outputs,
    hidden_loss,
    logits_loss,
    loss_parts,
    model_targets,
)


def run(student, teacher, windows=None, **arguments):
    """A short distillation, with rates for tiny models."""
    defaults = {"steps": 10, "batch_tokens": 64, "learning_rate": 1e-3, "table_learning_rate": 1e-2, "use_cpu": True}
    return distil(student, teacher, texts() if windows is None else windows, **{**defaults, **arguments})


def windows_of(rows):
    return [Window(row) for row in rows]


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(left, right):
    return all(torch.equal(tensor, right[name]) for name, tensor in left.items())


@pytest.mark.slow
@pytest.mark.parametrize("part", LOSSES)
def test_each_part_falls_and_the_teacher_stays(part):
    teacher, student = pair(heads=True)
    before = weights(teacher)
    teacher.train()
    report = run(student, teacher, steps=60, losses={part: 2.0})
    assert report.losses[part]["end"] < 0.7 * report.losses[part]["start"]
    assert report.losses["total"]["end"] == pytest.approx(2 * report.losses[part]["end"], rel=1e-4)
    assert same(before, weights(teacher)) and teacher.training
    assert not student.training and all(p.requires_grad for p in student.parameters())


def test_attention_is_compared_where_it_is_held():
    assert "attention" in DEFAULT_LOSSES
    assert set(run(*reversed(pair(heads=True)), steps=1).losses) == {*DEFAULT_LOSSES, "total"}
    assert set(run(*reversed(pair()), steps=1).losses) == {"layers", "total"}  # the teacher has sdpa


def test_the_tables_have_a_learning_rate_of_their_own():
    """With Adam the first step moves each number by the learning rate."""
    teacher, student = pair()
    before = weights(student)
    run(student, teacher, steps=1, learning_rate=1e-4, warmup_steps=0, lr_scheduler_type="constant")
    moved = {name: float((tensor - before[name]).abs().max()) for name, tensor in weights(student).items()}
    for name, distance in moved.items():
        if "pooler" not in name:
            assert distance == pytest.approx(1e-2 if "distance_embedding" in name else 1e-4, rel=1e-2), name


def test_a_head_that_is_not_compared_stays():
    teacher, student = pair(heads=True)
    before = weights(student.cls.predictions.transform)
    run(student, teacher)
    assert same(before, weights(student.cls.predictions.transform))


def test_padding_has_no_weight():
    """A short example beside a long one counts as it does alone, whatever stands in the padding."""
    teacher, student = pair(heads=True)
    long, short = texts()[0] * 2, texts()[1][:5]

    def parts(windows, pad=0):
        batch = collate([windows_of(windows)], pad)
        outputs, targets = (compute_outputs(model.eval(), batch, LOSSES) for model in (student, teacher))
        return loss_parts(outputs, targets, batch["attention_mask"], LOSSES)

    with torch.no_grad():
        padded, other = parts([long[:15], short]), parts([long[:15], short], pad=7)
        first, second = parts([long[:15]]), parts([short])
    for name in padded:
        assert float(other[name]) == pytest.approx(float(padded[name]), abs=1e-6)
    for name in ("attention", "logits"):
        assert float(padded[name]) == pytest.approx(float(first[name] + second[name]) / 2, abs=1e-6)
    # the hidden states are measured in the variance of their own batch
    errors, variances = [], []
    for rows in ([long[:15], short], [long[:15]], [short]):
        batch = collate([windows_of(rows)], 0)
        with torch.no_grad():
            own, wanted = (compute_outputs(model, batch, ["layers"]).hidden_states[-1] for model in (student, teacher))
        errors.append(float(hidden_loss(own, wanted, batch["attention_mask"])))
        real = wanted[batch["attention_mask"].bool()]
        variances.append(float((real - real.mean(0)).square().sum(-1).mean()))
    sums = [error * variance for error, variance in zip(errors, variances, strict=True)]
    assert sums[0] == pytest.approx((sums[1] + sums[2]) / 2, abs=1e-5)


def test_batches_are_bounded_alike_and_reproducible():
    def take(seed, count=300):
        stream = iter(WindowBatches(windows, 64, VOCABULARY, LIMIT, seed))
        return [next(stream) for _ in range(count)]

    windows = texts(count=100)
    batches = take(0)
    assert batches == take(0) != take(1)
    for batch in batches:
        lengths = sorted(map(len, batch))
        assert lengths[-1] <= 1.2 * lengths[0]
        assert len(batch) == 1 or len(batch) * lengths[-1] <= 64
    # nothing is left out, and nothing comes much more often than the rest
    counts = {tuple(window): 0 for window in windows}
    for batch in batches:
        for window in batch:
            counts[tuple(window.ids)] += 1
    assert min(counts.values()) >= 2 and max(counts.values()) - min(counts.values()) <= 2


def test_segments_reach_both_models():
    """A second segment has token types of 1: targets are the teacher's of these, and the student learns from them."""
    teacher, student = pair(heads=True)
    rows = [{"input_ids": row, "token_type_ids": [0] * 3 + [1] * (len(row) - 3)} for row in texts()]
    stream = WindowBatches([*rows, texts()[0]], 64, VOCABULARY, LIMIT, 0)
    batch = next(batch for batch in stream if any(window.types for window in batch))
    tensors = collate([[*batch, Window(texts()[0])]], pad_token_id=0)
    assert tensors["token_type_ids"].shape == tensors["input_ids"].shape
    assert tensors["token_type_ids"][:, :3].sum() == 0 == tensors["token_type_ids"][-1].sum()
    assert (tensors["token_type_ids"] <= tensors["attention_mask"]).all()
    with torch.no_grad():
        targets = model_targets(teacher.eval(), LIMIT, tensors, ["layers"])
        wanted = teacher.base_model(**tensors).last_hidden_state
    assert torch.allclose(targets.hidden_states[-1], wanted, atol=1e-6)
    zeros = [{**row, "token_type_ids": [0] * len(row["input_ids"])} for row in rows]
    assert "token_type_ids" not in collate([next(iter(WindowBatches(zeros, 64, VOCABULARY, LIMIT, 0)))], 0)

    with torch.no_grad():
        student.base_model.embeddings.token_type_embeddings.weight[1] += 0.5
    before = weights(student)
    run(student, teacher, rows, steps=2)
    name = next(name for name in before if "token_type" in name)
    moved = (weights(student)[name] - before[name]).abs().amax(1)
    assert moved.min() > 1e-4, "each type's row is trained"
    # past the teacher's limit the windows have the types of their tokens
    long = Window(texts()[0] * 4, ([0, 1] * len(texts()[0] * 4))[: 4 * len(texts()[0])])
    assert len(long) > LIMIT
    other = collate([[long]], 0)
    with torch.no_grad():
        targets, plain = (
            model_targets(teacher, LIMIT, {k: v for k, v in other.items() if k in names}, ["layers"])
            for names in (list(other), ["input_ids", "attention_mask"])
        )
    assert (targets.hidden_states[-1] - plain.hidden_states[-1]).abs().max() > 1e-3


def test_segments_that_do_not_fit_are_refused():
    teacher, student = pair()
    with pytest.raises(ValueError, match=r"windows\[0\] has 4 input_ids, but 3 token_type_ids"):
        run(student, teacher, [{"input_ids": [2, 5, 6, 3], "token_type_ids": [0, 0, 1]}])
    segments = {"input_ids": [2, 5, 6, 3], "token_type_ids": [0, 0, 1, 1]}
    before = weights(student)
    for types in ([0, 0, 2, 2], [0, 0, -1, 0], [0, 0, 1.5, 0]):
        with pytest.raises(ValueError, match="both have \\(0 to 1\\)"):
            run(student, teacher, [{**segments, "token_type_ids": types}])
    teacher.config.type_vocab_size = 1
    with pytest.raises(ValueError, match="only 0"):
        run(student, teacher, [segments])
    assert same(before, weights(student))
    run(student, teacher, [{"input_ids": texts()[0], "token_type_ids": None}] * 8, steps=1)


class Stop(TrainerCallback):
    """Ctrl-C in the middle of a step."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            raise KeyboardInterrupt


def test_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    teacher, student = pair()
    run(student, teacher, steps=2)
    with pytest.raises(KeyboardInterrupt):
        run(student, teacher, steps=2, callbacks=[Stop()])
    assert not student.training and student.embeddings.dropout.p == 0.1
    assert list(tmp_path.iterdir()) == []


def test_windows_past_the_teachers_limit_have_the_targets_of_overlapping_windows():
    teacher, student = pair(heads=True)
    teacher.eval()
    rows = [texts()[0] + texts()[1] + texts()[2] * 3, [texts()[0][0]] * (LIMIT - 1), [texts()[0][0]] * 2]
    assert len(rows[0]) > 2 * LIMIT
    batch = collate([windows_of(rows)], pad_token_id=0)
    with torch.no_grad():
        targets = model_targets(teacher, LIMIT, batch, ["layers", "attention", "logits"])
    assert targets.attentions is None and targets.without == {"attention"}
    assert len(targets.hidden_states) == 1 + teacher.config.num_hidden_layers
    for number, row in enumerate(rows):
        wanted = windowed_hidden_states(teacher, row)
        assert torch.allclose(targets.hidden_states[-1][number, : len(row)], wanted, atol=1e-6)
        logits = targets.logits[number, 1 : len(row)]  # the first token's are a mean
        assert torch.allclose(logits, teacher.cls(wanted[1:]), atol=1e-5)

    windows = [window + texts()[0] for window in texts() if len(window) == LIMIT]
    report = run(student, teacher, [*windows, *texts()], steps=60)
    for part in ("layers", "attention"):
        assert report.losses[part]["end"] < 0.9 * report.losses[part]["start"], part
    assert set(run(student, teacher, windows, steps=2).losses) == {"layers", "total"}  # no row has its attention


@pytest.mark.slow
@pytest.mark.skipif(older_than("5.14"), reason="the Trainer divides accumulated losses otherwise")
def test_two_processes_are_one_that_accumulates(tmp_path):
    run_python(Path(__file__).with_name("distil_train.py"), tmp_path, processes=2)
    two = json.loads((tmp_path / "report.json").read_text())
    trained = RelPosBertModel.from_pretrained(tmp_path / "student")

    teacher, student = pair()
    one = run(student, teacher, gradient_accumulation_steps=2)
    assert two["processes"] == 2
    assert two["tokens"] == one.tokens
    assert two["losses"]["layers"] == pytest.approx(one.losses["layers"], rel=1e-4)
    assert two["losses"]["total"] == pytest.approx(one.losses["total"], rel=1e-4)
    other = trained.state_dict()
    for name, tensor in student.state_dict().items():
        assert torch.allclose(tensor, other[name], atol=1e-4), name


@pytest.mark.slow
def test_bf16():
    teacher, student = pair()
    report = run(student, teacher, steps=60, bf16=True)
    assert report.losses["layers"]["end"] < 0.8 * report.losses["layers"]["start"]
    assert {parameter.dtype for parameter in student.parameters()} == {torch.float32}


BAD_ARGUMENTS = [
    ({"steps": 0}, "steps = 0"),
    ({"batch_tokens": 1.5}, r"batch_tokens = 1.5"),
    ({"learning_rate": -1.0}, r"learning_rate = -1.0"),
    ({"windows": []}, "windows is empty"),
    ({"windows": [[1, 2], []]}, r"windows\[1\] is empty"),
    ({"windows": [[1, VOCABULARY]]}, r"windows\[0\] has values that are not token ids from 0 to"),
    ({"windows": ["text"]}, r"windows\[0\] has values that are not token ids"),
    ({"losses": {"sentence": 1.0}}, r"losses = {'sentence': 1.0}: give weights of some of layers, attention"),
    ({"losses": {"layers": 0.0}}, r"losses\['layers'\] = 0.0"),
    ({"losses": {}}, "losses = {}: give weights of some of"),
    ({"losses": {"logits": 1.0}}, r"losses\['logits'\] = 1.0"),
    ({"max_steps": 3}, "keyword argument 'max_steps'"),
    ({"bf61": True}, "keyword argument 'bf61'"),
]


@pytest.mark.parametrize("arguments, message", BAD_ARGUMENTS)
def test_bad_arguments_are_refused(arguments, message):
    teacher, student = pair()
    before = weights(student)
    with pytest.raises((ValueError, TypeError), match=message):
        run(student, teacher, **arguments)
    assert same(before, weights(student))


@pytest.mark.parametrize("field, value", [("vocab_size", 21), ("hidden_size", 48), ("num_hidden_layers", 3)])
def test_models_of_other_sizes_are_refused(field, value):
    teacher, student = pair()
    other = BertModel(BertConfig(**{**teacher.config.to_dict(), field: value}))
    with pytest.raises(ValueError, match=rf"{field} = {value} in the teacher, but \d+ in the student"):
        run(student, other)


def test_what_the_models_lack_is_named():
    teacher, student = pair(heads=True)
    with pytest.raises(ValueError, match="the teacher, a BertModel, has no masked language model head"):
        run(student, BertModel(teacher.config), losses={"logits": 1.0})
    sdpa = BertForMaskedLM(teacher.config)
    sdpa.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"attn_implementation = 'sdpa' of the teacher.*set_attn_implementation"):
        run(student, sdpa, losses={"attention": 1.0})
    with pytest.raises(ValueError, match="student and teacher are the same object"):
        run(student, student)
    # RoBERTa counts positions from behind the index of padding
    sizes = tiny_sizes(vocab_size=VOCABULARY, max_position_embeddings=LIMIT + 2)
    roberta = RobertaModel(RobertaConfig(**sizes))
    roberta.set_attn_implementation("eager")
    student.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=f"has {LIMIT + 1} tokens, but the limit of the models is {LIMIT}"):
        run(student, roberta, [[1] * (LIMIT + 1)], losses={"attention": 1.0})
    assert run(student, roberta, [[1] * (LIMIT + 1)], steps=1).steps == 1  # in two windows


def test_divergences_are_pytorchs():
    """KL(teacher ‖ student) of the real tokens: of predictions times temperature², of weights by query."""
    student, target, mask = torch.randn(2, 5, 7), torch.randn(2, 5, 7), torch.tensor([[1] * 5, [1] * 3 + [0] * 2])

    def mean(by_token):
        return sum(by_token[row, : mask[row].sum()].mean() for row in range(2)) / 2

    for temperature in (1.0, 3.0):
        p, q = ((each / temperature).softmax(-1) for each in (target, student))
        expected = temperature**2 * mean((p * (p / q).log()).sum(-1))
        assert torch.allclose(logits_loss(student, target, mask, temperature), expected)
    q, p = (torch.randn(2, 3, 5, 5).softmax(-1) for _ in range(2))
    expected = (p * (p / q.requires_grad_()).log()).sum(-1).mean(1)
    found = attention_loss(q, p, mask)
    assert torch.allclose(found, mean(expected))
    gradients = (torch.autograd.grad(each, q, retain_graph=True)[0] for each in (found, mean(expected)))
    assert torch.allclose(*gradients)


def test_weights_that_a_student_does_not_have_leave_its_gradients_finite():
    """In float16, where keys outside of its window have the weight 0."""
    near = torch.arange(9)[:, None] - torch.arange(9)
    scores = torch.randn(1, 2, 9, 9).half().masked_fill(near.abs() > 2, -math.inf).requires_grad_()
    attention_loss(scores.softmax(-1), torch.rand(1, 2, 9, 9).softmax(-1), torch.ones(1, 9)).backward()
    assert scores.grad.isfinite().all() and scores.grad.any()
