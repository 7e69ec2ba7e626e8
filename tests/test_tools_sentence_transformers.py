"""sentence-transformers: load, encode, train, save, with hf_relpos and without it; and cross-encoders."""

import json
import warnings

import pytest
import selection
import torch
from datasets import Dataset
from elsewhere import run_without_package
from folders import edit
from oracles import tiny_model
from safetensors.torch import load_file
from selection import FEATURE_SCHEMES, FEW_FEATURE_SCHEMES
from sentence_transformers import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from test_convert import bert
from transformers import AutoTokenizer
from wording import TEXTS, VOCABULARY, save_with_tokenizer

from hf_relpos import RelPosBertForSequenceClassification, RelPosBertModel, convert


A_FEW_SCHEMES = pytest.mark.parametrize("scheme", FEW_FEATURE_SCHEMES)
TOLERANCE = 1e-5
SETTINGS = {"max_steps": 2, "per_device_train_batch_size": 3, "learning_rate": 0.001, "logging_steps": 1}
SETTINGS |= {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
OTHERS = ["the sky is blue .", "the dog ran on the road .", "a big red bird sat under a tree ."]


def saved_model(head, scheme, folder, **overrides):
    """A model, as it is in a folder with its tokenizer, and that tokenizer."""
    torch.manual_seed(0)
    model = tiny_model(head, scheme, vocab_size=len(VOCABULARY), max_position_embeddings=40, **overrides)
    return model, save_with_tokenizer(model, folder)


@torch.no_grad()
def mean_states(model, words, texts):
    """The mean of each text's token states, each text alone, (texts, D)."""
    return torch.stack([model(**words(text, return_tensors="pt"))[0][0].mean(0) for text in texts])


def encode(sentences, texts=TEXTS):
    return sentences.encode(texts, batch_size=3, convert_to_tensor=True, show_progress_bar=False)


def assert_trained(trainer, expected):
    """The first loss is the expected one, the second smaller, and tables change."""
    before = {name: each.clone() for name, each in trainer.model.state_dict().items() if "distance_embedding." in name}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert abs(losses[0] - expected) < 1e-3 and losses[1] < losses[0]  # the log has four digits
    after = trainer.model.state_dict()
    assert before and all(not torch.equal(after[name], value) for name, value in before.items())


def agree(one, other):
    torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=0)


# Sentence encoders -----------------------------------------------------------------------------------------------


@A_FEW_SCHEMES
def test_sentences_are_means_of_token_states(scheme, tmp_path):
    """A folder of a model alone is loaded; texts are encoded in a padded batch as each alone; what is saved loads."""
    model, words = saved_model(RelPosBertModel, scheme, tmp_path / "model")
    sentences = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    vectors = encode(sentences)
    agree(vectors, mean_states(model, words, TEXTS))
    sentences.save_pretrained(str(tmp_path / "sentences"))
    assert torch.equal(encode(SentenceTransformer(str(tmp_path / "sentences"), device="cpu")), vectors)
    alone = RelPosBertModel.from_pretrained(tmp_path / "sentences")
    agree(vectors, mean_states(alone, words, TEXTS))


@A_FEW_SCHEMES
def test_sentence_encoders_are_trained(scheme, tmp_path):
    """The first loss is the formula's, tables change, and the model that was trained is the one that is saved."""
    model, words = saved_model(RelPosBertModel, scheme, tmp_path / "model")
    sentences = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    one, other = (torch.nn.functional.normalize(mean_states(model, words, texts)) for texts in (TEXTS, OTHERS))
    expected = torch.nn.functional.cross_entropy(20 * one @ other.T, torch.arange(len(TEXTS)))
    trainer = SentenceTransformerTrainer(
        sentences,
        SentenceTransformerTrainingArguments(str(tmp_path / "run"), **SETTINGS),
        train_dataset=Dataset.from_dict({"anchor": TEXTS, "positive": OTHERS}),
        loss=MultipleNegativesRankingLoss(sentences),
    )
    assert_trained(trainer, expected)
    sentences.save_pretrained(str(tmp_path / "trained"))
    assert torch.equal(encode(SentenceTransformer(str(tmp_path / "trained"), device="cpu")), encode(sentences))


def test_a_sentence_encoder_converted_for_long_texts_reads_them(tmp_path, caplog):
    """It reads the ending of a text, and the tokenizer does not warn of its length."""
    source, length = tmp_path / "source", 60
    save_with_tokenizer(bert("BertModel", vocab_size=len(VOCABULARY), max_position_embeddings=40), source)
    edit(source, "tokenizer_config.json", model_max_length=40)
    SentenceTransformer(str(source), device="cpu").save_pretrained(str(tmp_path / "sentences"))
    texts = [" ".join(TEXTS[number % 3] for number in range(start, start + 40)) for start in range(30)]
    options = {"length": length, "steps": 12, "distil_tokens": 4000}
    given = {"method": "distil", "method_options": options, "texts": texts}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the text is short, and the result poor
        convert(tmp_path / "sentences", tmp_path / "long", position_embedding_type="relative_key", **given)
    sentences = SentenceTransformer(str(tmp_path / "long"), device="cpu")
    assert sentences.max_seq_length == length == AutoTokenizer.from_pretrained(tmp_path / "long").model_max_length
    head = " ".join(["bird"] * 45)
    one, other = encode(sentences, [f"{head} the cat ran", f"{head} the sky was blue"])
    assert torch.cosine_similarity(one, other, dim=0) < 0.9999
    caplog.clear()
    sentences.tokenizer([head])
    assert not caplog.records


ELSEWHERE = """
import json, sys
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer

torch.set_num_threads(1)
for job in json.loads(sys.argv[1]):
    if job["first"]:
        try:
            SentenceTransformer(job["load"], device="cpu")
        except ValueError as error:
            assert "trust_remote_code" in str(error), error
        else:
            raise SystemExit("loaded without its code")
    sentences = SentenceTransformer(job["load"], device="cpu", trust_remote_code=True)
    assert type(sentences[0].auto_model).__module__.startswith("transformers_modules."), type(sentences[0].auto_model)
    vectors = sentences.encode(job["texts"], convert_to_tensor=True, show_progress_bar=False)
    sentences.save_pretrained(job["save"])
    save_file({"vectors": vectors.contiguous()}, job["output"])
"""


@pytest.fixture(scope="module")
def travelled(tmp_path_factory):
    """The encoder of each scheme that runs, encoded and saved in one process that cannot import hf_relpos."""
    folder = tmp_path_factory.mktemp("elsewhere")
    jobs = []
    for scheme in FEATURE_SCHEMES if selection.full else filter(FEW_FEATURE_SCHEMES.__contains__, FEATURE_SCHEMES):
        saved_model(RelPosBertModel, scheme, folder / f"{scheme}-model")
        sentences = SentenceTransformer(str(folder / f"{scheme}-model"), device="cpu")
        sentences.save_pretrained(str(folder / scheme))
        places = {"load": folder / scheme, "save": folder / f"{scheme}-saved", "output": folder / f"{scheme}-vectors"}
        jobs.append({name: str(path) for name, path in places.items()} | {"texts": TEXTS, "first": not jobs})
    run_without_package(ELSEWHERE, folder, json.dumps(jobs))
    return folder


@pytest.mark.heavy
@A_FEW_SCHEMES
def test_sentence_encoders_run_without_the_package(scheme, travelled):
    """With `trust_remote_code=True` the same vectors; what is saved there loads here."""
    vectors = load_file(travelled / f"{scheme}-vectors")["vectors"]
    agree(vectors, encode(SentenceTransformer(str(travelled / scheme), device="cpu")))
    here = SentenceTransformer(str(travelled / f"{scheme}-saved"), device="cpu")
    assert type(here[0].auto_model) is RelPosBertModel
    agree(vectors, encode(here))


# Cross-encoders --------------------------------------------------------------------------------------------------


@torch.no_grad()
def pair_logits(model, words):
    """Of each pair alone, (pairs, labels)."""
    pairs = zip(TEXTS, OTHERS, strict=True)
    return torch.stack([model(**words(*pair, return_tensors="pt")).logits[0] for pair in pairs])


def predict(ranker):
    pairs = list(zip(TEXTS, OTHERS, strict=True))
    return ranker.predict(pairs, convert_to_tensor=True, show_progress_bar=False)


@A_FEW_SCHEMES
def test_cross_encoders_score_pairs(scheme, tmp_path):
    model, words = saved_model(RelPosBertForSequenceClassification, scheme, tmp_path / "model", num_labels=1)
    ranker = CrossEncoder(str(tmp_path / "model"), device="cpu")
    scores = predict(ranker)
    agree(scores, pair_logits(model, words)[:, 0].sigmoid())
    ranked = ranker.rank(TEXTS[0], OTHERS, show_progress_bar=False)
    assert sorted(each["corpus_id"] for each in ranked) == [0, 1, 2]
    ranker.save_pretrained(str(tmp_path / "ranker"))
    agree(predict(CrossEncoder(str(tmp_path / "ranker"), device="cpu")), scores)  # weights in memory begin elsewhere


@A_FEW_SCHEMES
def test_cross_encoders_are_trained(scheme, tmp_path):
    """The first loss is the formula's, and the model that was trained is the one that is saved."""
    model, words = saved_model(RelPosBertForSequenceClassification, scheme, tmp_path / "model", num_labels=1)
    ranker, labels = CrossEncoder(str(tmp_path / "model"), device="cpu"), [1.0, 0.0, 1.0]
    logits = pair_logits(model, words)[:, 0]
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(labels))
    trainer = CrossEncoderTrainer(
        ranker,
        CrossEncoderTrainingArguments(str(tmp_path / "run"), **SETTINGS),
        train_dataset=Dataset.from_dict({"one": TEXTS, "other": OTHERS, "label": labels}),
        loss=BinaryCrossEntropyLoss(ranker),
    )
    assert_trained(trainer, expected)
    ranker.save_pretrained(str(tmp_path / "trained"))
    agree(predict(CrossEncoder(str(tmp_path / "trained"), device="cpu")), predict(ranker))
