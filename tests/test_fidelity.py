"""What is measured of a conversion: exact where a model meets itself, loops in float64 where two models meet."""

import json
import math

import numpy as np
import pytest
import torch
from folders import edit
from oracles import array, stir, tiny_model, tiny_sizes
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    ElectraConfig,
    ElectraForPreTraining,
    ElectraModel,
    RobertaConfig,
    RobertaModel,
)

from hf_relpos import RelPosBertForMaskedLM, RelPosBertModel
from hf_relpos.data.masking import mask_rows
from hf_relpos.evaluation import (
    Fidelity,
    LengthFidelity,
    default_lengths,
    fidelity,
    hidden_states,
    load_model,
    masked_agreement,
    model_max_length,
    pooling_of,
    verdict,
    windowed_hidden_states,
)
from hf_relpos.evaluation.encoder import pad_batch, pool


CLS, SEP, MASK = 1, 2, 3
SIZES = tiny_sizes(initializer_range=0.2)


def bert(head=BertModel, seed=0, **changes):
    """A tiny stock BERT with random weights, in eval mode."""
    torch.manual_seed(seed)
    return stir(head(BertConfig(**{**SIZES, **changes}))).eval()


def rows(*lengths, seed=0):
    """Random rows `[CLS] … [SEP]` of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [[CLS, *torch.randint(4, 50, (n - 2,), generator=generator).tolist(), SEP] for n in lengths]


def cosine(one, other):
    one, other = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    return float(one @ other / math.sqrt((one @ one) * (other @ other)))


@pytest.mark.parametrize("head", [BertModel, BertForMaskedLM, BertForPreTraining])
def test_a_model_is_faithful_to_itself(head):
    model = bert(head)
    found = fidelity(model, model, {8: rows(8, 8, 5), 16: rows(16)}, mask_token_id=MASK)
    assert [entry.length for entry in found.lengths] == [8, 16]
    for entry in found.lengths:
        assert entry.reference == "teacher"
        assert entry.token_cosine == pytest.approx(1, abs=1e-12) and entry.sentence_cosine == pytest.approx(1)
        assert entry.other_windows is None
        if head is BertModel:
            assert entry.masked is None
        else:
            assert entry.masked.agreement == 1.0 and entry.masked.tokens >= entry.windows
            assert entry.masked.teacher_accuracy == entry.masked.student_accuracy
    assert found.lengths[0].tokens == 21
    assert json.loads(json.dumps(found.to_dict()))["verdict"].startswith("safe up to 16 tokens")


def test_fidelity_by_loop():
    """Every figure against plain loops over single rows, without padding."""
    teacher, student = bert(seed=1), tiny_model(RelPosBertModel, "tables")
    windows = rows(10, 7, 10)
    found = fidelity(teacher, student, {10: windows}).lengths[0]
    tokens, sentences = [], []
    for row in windows:
        one, other = (array(model(torch.tensor([row])).last_hidden_state[0]) for model in (teacher, student))
        tokens += map(cosine, one, other)
        sentences.append(cosine(one.mean(0), other.mean(0)))
    assert found.token_cosine == pytest.approx(np.mean(tokens), abs=1e-5)
    assert found.sentence_cosine == pytest.approx(np.mean(sentences), abs=1e-5)


def test_neither_padding_nor_batch_size_matters(monkeypatch):
    teacher, student = bert(BertForMaskedLM, seed=1), tiny_model(RelPosBertForMaskedLM, "shaw")
    windows = {12: rows(12, 5, 9, 12, 3)}
    whole = fidelity(teacher, student, windows, mask_token_id=MASK)
    monkeypatch.setattr("hf_relpos.data.batching.rows_per_batch", lambda *sizes: 1)
    single = fidelity(teacher, student, windows, mask_token_id=MASK)
    for one, other in zip(whole.lengths, single.lengths, strict=True):
        assert one.token_cosine == pytest.approx(other.token_cosine, abs=1e-6)
        assert one.sentence_cosine == pytest.approx(other.sentence_cosine, abs=1e-6)
        assert one.masked == other.masked


def test_past_the_limit():
    teacher, student = bert(), tiny_model(RelPosBertModel, "alibi")
    long = rows(40, 40)

    def mean_cosine(pairs):
        return np.mean([cosine(one, other) for each in pairs for one, other in zip(*each, strict=True)])

    found = fidelity(teacher, student, {8: rows(8), 40: long})
    inside, past = found.lengths
    assert (inside.reference, past.reference) == ("teacher", "windowed teacher")
    assert past.masked is None
    own = mean_cosine([windowed_hidden_states(teacher, row, stride=n) for n in (8, 6)] for row in long)
    assert past.other_windows == pytest.approx(own, abs=1e-6) and past.other_windows < 0.999
    with torch.no_grad():
        states = [student(torch.tensor([row])).last_hidden_state[0] for row in long]
    expected = mean_cosine((windowed_hidden_states(teacher, row), own) for row, own in zip(long, states, strict=True))
    assert past.token_cosine == pytest.approx(expected, abs=1e-6)
    refused = fidelity(teacher, bert(), {8: rows(8), 40: long})
    assert [entry.length for entry in refused.lengths] == [8]
    assert refused.skipped == {40: "the student reads at most 16 tokens"}
    assert "16 tokens" in refused.to_dict()["skipped"]["40"]


@pytest.mark.parametrize("length", [3, 11, 16])
def test_windowed_hidden_states_is_the_plain_one_inside_the_limit(length):
    model = bert()
    row = rows(length)[0]
    assert torch.equal(windowed_hidden_states(model, row), hidden_states(model, *pad_batch([row], model))[0])


@pytest.mark.parametrize("total, stride", [(17, None), (40, None), (41, 5), (40, 15)])
def test_windowed_hidden_states_takes_the_most_central_window(total, stride):
    model = bert()
    row = rows(total)[0]
    found = windowed_hidden_states(model, row, stride=stride)
    room, step = 15, 8 if stride is None else stride
    starts, at = [], 0
    while at + room < total - 1:
        starts.append(at)
        at += step
    starts.append(total - 1 - room)
    with torch.no_grad():
        read = [model(torch.tensor([[CLS, *row[1 + s : 1 + s + room]]])).last_hidden_state[0] for s in starts]
    assert (found[0] - torch.stack([states[0] for states in read]).mean(0)).abs().max() < 1e-6
    for place in range(total - 1):
        margins = [min(place - s, s + room - 1 - place) for s in starts]
        best = margins.index(max(margins))
        assert margins[best] >= 0
        assert (found[place + 1] - read[best][place - starts[best] + 1]).abs().max() < 1e-5


def test_model_max_length():
    assert model_max_length(bert()) == model_max_length(bert(BertForMaskedLM)) == 16
    roberta = RobertaConfig(**SIZES | {"max_position_embeddings": 18}, pad_token_id=1)
    assert model_max_length(RobertaModel(roberta)) == 16  # of 18 positions, those after the padding id
    distil = DistilBertConfig(dim=24, hidden_dim=32, n_layers=1, n_heads=3, max_position_embeddings=16)
    assert model_max_length(DistilBertModel(distil)) == 16
    assert model_max_length(tiny_model(RelPosBertModel, "alibi")) is None
    assert model_max_length(tiny_model(RelPosBertModel, "absolute")) == 16
    assert model_max_length(tiny_model(RelPosBertModel, "absolute", position_options={"out_of_range": "clip"})) is None
    assert model_max_length(tiny_model(RelPosBertModel, "alibi", absolute_position_embeddings=True)) == 16
    assert default_lengths(512) == default_lengths(None) == [16, 64, 128, 256, 512, 1024, 2048]
    assert default_lengths(100) == [16, 64, 100, 200, 400]


def test_pooling():
    hidden, mask = torch.randn(2, 3, 4), torch.tensor([[True, True, False], [True, True, True]])
    assert torch.allclose(pool(hidden, mask)[0], hidden[0, :2].mean(0))
    assert torch.equal(pool(hidden, mask, "cls"), hidden[:, 0])
    with pytest.raises(ValueError, match="pooling = 'max'"):
        fidelity(bert(), bert(), {8: rows(8)}, "max")
    teacher, student = bert(seed=1), bert(seed=2)
    row = rows(8)
    with torch.no_grad():
        expected = cosine(*(model(torch.tensor(row)).last_hidden_state[0, 0] for model in (teacher, student)))
    assert fidelity(teacher, student, {8: row}, "cls").lengths[0].sentence_cosine == pytest.approx(expected)


def test_fidelity_refuses():
    with pytest.raises(ValueError, match="length = 16, stride = 16"):
        windowed_hidden_states(bert(), rows(40)[0], stride=16)
    with pytest.raises(ValueError, match=r"windows_by_length\[8\] has 1 windows, the longest of 9 tokens"):
        fidelity(bert(), bert(), {8: rows(9)})
    with pytest.raises(ValueError, match=r"windows_by_length\[8\] has 0 windows"):
        fidelity(bert(), bert(), {8: []})
    with pytest.raises(ValueError, match="hidden_size = 24 in the teacher, but 12 in the student"):
        fidelity(bert(), bert(hidden_size=12), {8: rows(8)})
    broken = bert()
    torch.nn.init.constant_(broken.encoder.layer[1].output.dense.bias, math.nan)
    with pytest.raises(ValueError, match="BertModel: the hidden states are NaN or infinite"):
        fidelity(broken, bert(), {8: rows(8)})


def test_masked_agreement_by_hand():
    teacher, student = bert(BertForMaskedLM, seed=1), bert(BertForMaskedLM, seed=2)
    windows = rows(10, 6)
    found = masked_agreement(teacher, student, windows, MASK, seed=5)
    inputs, labels = mask_rows(windows, MASK, np.random.default_rng(5))
    same = right = right_too = count = 0
    for row, label in zip(inputs, labels, strict=True):
        with torch.no_grad():
            one, other = (model(torch.tensor([row])).logits[0].argmax(-1).tolist() for model in (teacher, student))
        for place, wanted in enumerate(label):
            if wanted != -100:
                same += one[place] == other[place]
                right += one[place] == wanted
                right_too += other[place] == wanted
                count += 1
    figures = found.tokens, found.agreement, found.teacher_accuracy, found.student_accuracy
    assert figures == (count, same / count, right / count, right_too / count)


def test_mask_rows():
    windows = rows(3, 20, 200)
    inputs, labels = mask_rows(windows, MASK, np.random.default_rng(0))
    for row, masked, label in zip(windows, inputs, labels, strict=True):
        places = [place for place, wanted in enumerate(label) if wanted != -100]
        assert places and 0 not in places and len(row) - 1 not in places
        for place, token in enumerate(row):
            assert (masked[place], label[place]) == ((MASK, token) if place in places else (token, -100))
    assert 15 <= sum(label != -100 for label in labels[2]) <= 45
    with pytest.raises(ValueError, match="a row of 2 tokens has none to mask"):
        mask_rows([[CLS, SEP]], MASK, np.random.default_rng(0))


def entry(length, token, sentence, other_windows=None):
    reference = "windowed teacher" if length > 512 else "teacher"
    return LengthFidelity(length, 1, length, reference, token, sentence, [token] * 4, other_windows=other_windows)


def test_verdict():
    fits = Fidelity(512, None, "mean", [entry(64, 0.97, 0.98), entry(256, 0.93, 0.96), entry(512, 0.9, 0.93)])
    words = "safe up to 256 tokens; usable after fine-tuning up to 512 tokens; not measured beyond 512"
    assert verdict(fits) == words
    past = Fidelity(512, None, "mean", [entry(512, 0.97, 0.98), entry(2048, 0.92, 0.9, other_windows=0.941)])
    words = "safe up to 512 tokens; beyond 512, token cosine to the source's windows: 0.92 at 2,048 "
    assert verdict(past) == words + "(source's own windows 0.94)"
    far = Fidelity(128, 128, "mean", [entry(16, 0.95, 0.96), entry(64, 0.7, 0.6), entry(128, 0.95, 0.96)])
    words = "safe up to 16 tokens; not close at 64 tokens (sentence cosine 0.60); the result reads at most 128"
    assert verdict(far) == words


def test_load_model(tmp_path):
    bert(BertForMaskedLM).save_pretrained(tmp_path / "masked")
    assert type(load_model(tmp_path / "masked")) is BertForMaskedLM
    tiny_model(RelPosBertModel, "shaw").save_pretrained(tmp_path / "relative")
    assert type(load_model(tmp_path / "relative")) is RelPosBertModel
    discriminator = ElectraForPreTraining(ElectraConfig(**SIZES, embedding_size=24))
    discriminator.save_pretrained(tmp_path / "electra")
    assert type(load_model(tmp_path / "electra")) is ElectraModel
    with pytest.raises(ValueError, match="none: no such folder"):
        load_model(tmp_path / "none")
    edit(tmp_path / "masked", num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"the weights lack 16 of .*layer\.2\..*num_hidden_layers = 3"):
        load_model(tmp_path / "masked")


def test_old_relative_berts_are_read_as_such(tmp_path):
    tiny_model(RelPosBertModel, "relative_key").save_pretrained(tmp_path)
    edit(tmp_path, auto_map=None, model_type="bert")
    assert type(load_model(tmp_path)) is RelPosBertModel


def test_pooling_of(tmp_path):
    assert pooling_of(tmp_path) is None
    (tmp_path / "1_Pooling").mkdir()
    path = tmp_path / "1_Pooling" / "config.json"
    for config, expected in (
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "word_embedding_dimension": 3}, "cls"),
        ({"pooling_mode": "cls"}, "cls"),
    ):
        path.write_text(json.dumps(config))
        assert pooling_of(tmp_path) == expected
    for config in ({"pooling_mode_max_tokens": True}, {"pooling_mode": ["mean", "cls"]}):
        path.write_text(json.dumps(config))
        with pytest.raises(ValueError, match="only mean and cls are supported; choose one with --pooling"):
            pooling_of(tmp_path)
