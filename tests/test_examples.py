"""The training recipes, scripts/examples/run_*.py, end to end on the demo's BERT and novels, and what they refuse."""

import json
import math
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGKILL

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from datasets import ClassLabel, Dataset
from launching import SCRIPTS, import_script, run_code, run_python
from scipy.stats import spearmanr
from selection import with_full
from seqeval.metrics import f1_score
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerState,
)

import hf_relpos
from hf_relpos.data.records import iterate_records
from hf_relpos.demo import CHECKPOINT, read_text


NAMES = {"Leo", "Job", "Ayesha", "Billali", "Ustane", "Vincey", "Holly", "Silver", "Livesey", "Trelawney", "Smollett"}
QUIET = ("--report_to", "none", "--disable_tqdm", "True", "--use_cpu", "--dataloader_pin_memory", "False")
SHORT = ("--max_seq_length", 48, "--per_device_train_batch_size", 8, "--learning_rate", "1e-3", "--logging_steps", 1)


def paragraphs(part):
    return [line for line in read_text(part) if 120 < len(line) < 400]


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two novels as data of every recipe: whose paragraph, which words are names, which name a context has, …"""
    folder = tmp_path_factory.mktemp("data")
    she, island = paragraphs("train"), paragraphs("eval")
    authors = ("Haggard", "Stevenson")
    rows = [pair for both in zip(she, island, strict=False) for pair in zip(authors, both, strict=True)]
    for name, part in (("train", rows[:160]), ("dev", rows[160:200])):
        lines = [f"{label}\t{text}\n" for label, text in part]
        (folder / f"{name}.tsv").write_text("label\ttext\n" + "".join(lines), "utf-8")
        (folder / f"{name}.txt").write_text("\n".join(text for _, text in part), "utf-8")
    words = [re.findall(r"\w+|[^\w\s]", text) for text in she + island]
    words = [each for each in words if NAMES & set(each)]
    for name, part in (("train", words[:80]), ("dev", words[80:110])):
        lines = ["".join(f"{word}\t{'B-PER' if word in NAMES else 'O'}\n" for word in each) for each in part]
        (folder / f"{name}.conll").write_text("\n".join(lines), "utf-8")
    questions = []
    for text in she + island:
        found = [match for match in re.finditer(r"\w+", text) if match[0] in NAMES]
        if found:
            answers = {"text": [found[0][0]], "answer_start": [found[0].start()]}
            questions.append({"id": str(len(questions)), "question": "who?", "context": text, "answers": answers})
    write_lines(folder / "train.jsonl", questions[:64])
    write_lines(folder / "dev.jsonl", questions[64:80])
    halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in she[:72]]
    write_lines(folder / "pairs.jsonl", [{"query": one, "positive": other} for one, other in halves[:40]])
    write_lines(folder / "queries.jsonl", [{"query": one, "doc": str(n)} for n, (one, _) in enumerate(halves[:32])])
    write_lines(folder / "docs.jsonl", [{"id": str(n), "text": other} for n, (_, other) in enumerate(halves[:32])])
    scored = [(5, one, other) for one, other in halves[:20]]
    scored += [(0, halves[n][0], halves[n + 20][1]) for n in range(20)]
    lines = [f"{score}\t{one}\t{other}\n" for score, one, other in scored]
    (folder / "sts.tsv").write_text("score\tsentence1\tsentence2\n" + "".join(lines), "utf-8")
    return folder


@pytest.fixture(scope="module")
def relative(tmp_path_factory):
    """The demo's BERT with relative positions in place of its absolute ones."""
    out = tmp_path_factory.mktemp("models") / "relative"
    hf_relpos.convert(CHECKPOINT, out, position_embedding_type="shaw", method="drop")
    return out


def recipe(name, *arguments):
    return import_script(name).main([*map(str, arguments), *QUIET])


def train(name, data, out, kind, *more, model=CHECKPOINT):
    """A recipe with its files of this kind."""
    files = ("--train_file", data / f"train.{kind}", "--validation_file", data / f"dev.{kind}")
    return recipe(name, "--model_name_or_path", model, *files, "--output_dir", out, *SHORT, *more)


def stored(folder, split):
    return json.loads((folder / f"{split}_results.json").read_text())


# Classification ---------------------------------------------------------------------------------------------------


def classify(data, out, *more, model=CHECKPOINT):
    return train("run_classification", data, out, "tsv", *more, model=model)


def test_a_classifier_learns_and_is_measured_again(data, relative, tmp_path):
    """What is saved has the labels' names, and the accuracy that it was measured with."""
    out = tmp_path / "out"
    run = ("--do_train", "--do_eval", "--max_steps", 40, "--max_train_samples", 40)
    found = classify(data, out, *run, model=relative)
    assert stored(out, "train")["train_loss"] < 0.6 and 0 < found["eval_accuracy"] < 1
    assert (stored(out, "train")["train_samples"], stored(out, "eval")["eval_samples"]) == (40, 40)
    assert (out / "all_results.json").is_file()
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert model.config.model_type == "relpos_bert" and model.config.label2id == {"Haggard": 0, "Stevenson": 1}
    tokenizer, right = AutoTokenizer.from_pretrained(out), []
    for line in (data / "dev.tsv").read_text().splitlines()[1:]:
        label, text = line.split("\t")
        ids = tokenizer(text, truncation=True, max_length=48, return_tensors="pt")
        right.append(model.config.id2label[model(**ids).logits.argmax().item()] == label)
    assert np.mean(right) == pytest.approx(found["eval_accuracy"])
    again = classify(data, tmp_path / "again", "--do_eval", model=out)
    assert again["eval_accuracy"] == found["eval_accuracy"]
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == ["all_results.json", "eval_results.json"]


def test_a_new_model_of_each_kind_by_one_flag(data, tmp_path):
    """Schemes, options, a window, stock BERT; frozen layers stay as they were."""
    script = import_script("recipes.models")
    arguments = import_script("recipes.arguments").ModelArguments
    sizes = {"tokenizer_name": str(CHECKPOINT), "config_overrides": "hidden_size=24,num_hidden_layers=2"}
    sizes["config_overrides"] += ",num_attention_heads=2,intermediate_size=32"
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    flags = {"position_embedding_type": ["shaw"], "position_options": ["clip=4"], "attention_window": 8}
    model = script.load_model(AutoModelForMaskedLM, arguments(**sizes, **flags, freeze_layers=1), tokenizer)
    assert (model.config.position_options["clip"], model.config.attention_window) == (4, 8)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not any(".embeddings." in name or ".layer.0." in name for name in trained)
    assert any(".layer.1." in name for name in trained)
    two = arguments(**sizes, position_embedding_type=["disan", "kerple"])
    assert script.load_model(AutoModel, two, tokenizer).config.position_embedding_type == ["disan", "kerple"]
    stock = script.load_model(AutoModel, arguments(**sizes, model_type="bert"), tokenizer)
    assert type(stock).__name__ == "BertModel" and stock.config.vocab_size == len(tokenizer)


def test_recipe_own_scheme(data, tmp_path):
    """Trained by its name from a file, and measured again."""
    code = "from hf_relpos.schemes.alibi import ALiBi\n\n\nclass Mine(ALiBi, name='alibi_of_mine'):\n    pass\n"
    (tmp_path / "scheme_of_mine.py").write_text(code)
    mine, out = ("--scheme_file", tmp_path / "scheme_of_mine.py"), tmp_path / "out"
    new = (*NEW, "--position_embedding_type", "alibi_of_mine")
    trained = recipe("run_mlm", *mine, *mlm(data, out, *new, "--max_steps", 1))
    assert AutoConfig.from_pretrained(out).position_embedding_type == "alibi_of_mine"
    again = train("run_mlm", data, tmp_path, "txt", *mine, "--do_eval", model=out)
    hf_relpos.schemes.SCHEMES.pop("alibi_of_mine")
    assert again["eval_loss"] == pytest.approx(trained["eval_loss"])
    with pytest.raises(SystemExit, match=r"--scheme_file .*no\.py: no such Python file"):
        recipe("run_mlm", "--scheme_file", "no.py", *mlm(data, out, *new))


def test_classes_are_predicted_with_and_without_labels(data, relative, tmp_path):
    """In the order of the file, also where batches have rows of about one length; measured where there are labels."""
    lines = (data / "dev.tsv").read_text().splitlines()
    (tmp_path / "bare.tsv").write_text("text\n" + "\n".join(line.split("\t")[1] for line in lines[1:]) + "\n")
    flags = ("--do_predict", "--train_sampling_strategy", "group_by_length", "--max_predict_samples", 30)
    train = ("--do_train", "--do_eval", "--max_steps", 12, "--max_eval_samples", 30, *flags)
    found = classify(data, tmp_path / "out", *train, "--test_file", data / "dev.tsv", model=relative)
    written = stored(tmp_path / "out", "predict")
    assert found["predict_accuracy"] == found["eval_accuracy"] == written["predict_accuracy"]
    test = ("--test_file", tmp_path / "bare.tsv", "--model_name_or_path", tmp_path / "out", "--max_seq_length", 48)
    again = recipe("run_classification", *test, *flags, "--output_dir", tmp_path / "again")
    assert "predict_accuracy" not in again and "predict_runtime" in again
    one, other = ((tmp_path / name / "predict_results.txt").read_text() for name in ("out", "again"))
    predicted = [line.split("\t") for line in one.splitlines()]
    assert one == other and predicted[0] == ["index", "prediction"]
    assert [line[0] for line in predicted[1:]] == [str(number) for number in range(30)]
    right = [line.split("\t")[0] == name for line, (_, name) in zip(lines[1:31], predicted[1:], strict=True)]
    assert np.mean(right) == pytest.approx(found["predict_accuracy"]) and len({name for _, name in predicted[1:]}) == 2


def test_a_head_for_other_labels_starts_anew_in_training_alone(data, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(CHECKPOINT, num_labels=3)
    model.save_pretrained(tmp_path / "three")
    AutoTokenizer.from_pretrained(CHECKPOINT).save_pretrained(tmp_path / "three")
    classify(data, tmp_path / "out", "--do_train", "--max_steps", 1, model=tmp_path / "three")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config.num_labels == 2
    test = ("--test_file", data / "dev.tsv", "--label_column_name", "none", "--do_predict")
    out = ("--output_dir", tmp_path / "predicted")
    with pytest.raises(SystemExit, match=r"has no classifier\.bias, classifier\.weight that fit; train it first"):
        recipe("run_classification", "--model_name_or_path", CHECKPOINT, *test, *out)


@pytest.mark.full
def test_numbers_are_a_regression(data, tmp_path):
    columns = ("--text_column_names", "sentence1", "sentence2", "--label_column_name", "score", "--do_regression")
    scored = data / "sts.tsv"
    files = ("--train_file", scored, "--validation_file", scored, "--model_name_or_path", CHECKPOINT)
    run = ("--do_train", "--do_eval", "--max_steps", 3, "--output_dir", tmp_path / "out")
    test = ("--do_predict", "--test_file", data / "sts.tsv")
    found = recipe("run_classification", *files, *columns, *run, *test, *SHORT)
    assert {"eval_pearson", "eval_spearman", "eval_mse"} <= set(found) and -1 <= found["eval_spearman"] <= 1
    lines = (tmp_path / "out" / "predict_results.txt").read_text().splitlines()[1:]
    assert np.ptp([float(line.split("\t")[1]) for line in lines]) > 0 and len(lines) == 40
    assert found["predict_mse"] == found["eval_mse"]


def test_a_data_set_of_the_hub(data, tmp_path):
    """A folder stands in for a repository; labels are numbers with names there, and a part is held out."""
    lines = [line.split("\t") for line in (data / "train.tsv").read_text().splitlines()[1:41]]
    names = ClassLabel(names=["Stevenson", "Haggard"])
    rows = Dataset.from_dict({"sentence": [text for _, text in lines], "label": [names.str2int(n) for n, _ in lines]})
    (tmp_path / "hub").mkdir()
    rows.cast_column("label", names).to_parquet(str(tmp_path / "hub" / "train.parquet"))
    rows_of = ("--dataset_name", tmp_path / "hub", "--cache_dir", tmp_path / "cache")
    run = ("--do_train", "--do_eval", "--max_steps", 1, "--output_dir", tmp_path / "out", *SHORT)
    model, columns = ("--model_name_or_path", CHECKPOINT), ("--text_column_names", "sentence")
    recipe("run_classification", *model, *rows_of, *columns, *run, "--validation_split_percentage", 25)
    assert stored(tmp_path / "out", "train")["train_samples"] == 30
    assert stored(tmp_path / "out", "eval")["eval_samples"] == 10
    assert set(AutoConfig.from_pretrained(tmp_path / "out").label2id) == {"Haggard", "Stevenson"}


# Named entities ---------------------------------------------------------------------------------------------------


def test_a_tagger_learns(data, relative, tmp_path):
    run = ("--do_train", "--do_eval", "--max_steps", 40)
    assert train("run_ner", data, tmp_path, "conll", *run, model=relative)["eval_f1"] > 0.7
    assert set(AutoConfig.from_pretrained(tmp_path).label2id) == {"O", "B-PER", "I-PER"}


def test_tags_are_predicted_one_for_each_word(data, relative, tmp_path):
    """Also of sentences in several pieces and words without tokens, with tags in the file and without."""
    parts = (data / "dev.conll").read_text().split("\n\n")
    sentences = [[line.split("\t") for line in part.splitlines()] for part in parts]
    words = [[word for word, _ in sentence] for sentence in sentences]
    words[0].insert(2, "\u200b")
    write_lines(tmp_path / "words.jsonl", [{"tokens": each} for each in words])
    size = (*SHORT, "--max_seq_length", 16, "--train_sampling_strategy", "group_by_length")
    run = ("--test_file", data / "dev.conll", "--do_train", "--do_predict", "--max_steps", 40)
    found = train("run_ner", data, tmp_path / "out", "conll", *run, *size, model=relative)
    tags = [line.split() for line in (tmp_path / "out" / "predictions.txt").read_text().splitlines()]
    assert list(map(len, tags)) == list(map(len, sentences))
    truth = [[tag for _, tag in sentence] for sentence in sentences]
    assert found["predict_f1"] == pytest.approx(f1_score(truth, tags)) and found["predict_f1"] > 0.1
    test = ("--model_name_or_path", tmp_path / "out", "--test_file", tmp_path / "words.jsonl", "--do_predict")
    again = recipe("run_ner", *test, "--output_dir", tmp_path / "again", *size)
    others = [line.split() for line in (tmp_path / "again" / "predictions.txt").read_text().splitlines()]
    assert others[0][2] == "O" and "predict_f1" not in again and "predict_loss" not in again
    others[0].pop(2)
    assert others == tags


# Masked language models -------------------------------------------------------------------------------------------


def mlm(data, out, *more):
    files = ("--train_file", data / "train.txt", "--validation_file", data / "dev.txt")
    return ("--output_dir", out, *files, "--do_train", "--do_eval", *SHORT, *more)


NEW = ("--tokenizer_name", CHECKPOINT, "--position_embedding_type", "t5", "--config_overrides")
NEW = (*NEW, "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=32")


def test_masked_tokens_are_learnt_and_resumed(data, tmp_path):
    """A run that was stopped in its second epoch goes on as if it had not been, with dropout and its random masks."""
    flags = (*NEW, "--max_steps", 6, "--save_steps", 4, "--max_train_samples", 16)
    whole = recipe("run_mlm", *mlm(data, tmp_path / "whole", *flags))
    assert whole["eval_perplexity"] == pytest.approx(math.exp(whole["eval_loss"]))
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / "stopped" / "checkpoint-4")
    resumed = recipe("run_mlm", *mlm(data, tmp_path / "stopped", *flags))
    losses, epochs = [], []
    for name in ("whole", "stopped"):
        history = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        losses.append([entry["loss"] for entry in history if "loss" in entry])
        epochs.append(next(entry["epoch"] for entry in history if entry["step"] == 4))
    assert len(losses[0]) == 6 and losses[1] == losses[0] and 1 < epochs[0] < 2
    assert resumed["eval_loss"] == whole["eval_loss"]
    one, other = (AutoModelForMaskedLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "stopped"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_batch_is_masked_anew_in_every_epoch_and_with_every_seed(tmp_path):
    """Also one of a single row, which is the same batch in every epoch."""
    script, tokenizer = import_script("run_mlm"), AutoTokenizer.from_pretrained(CHECKPOINT)
    row = {"input_ids": tokenizer("the door of the house was open , and no one was in it " * 3)["input_ids"]}

    def masked(seed, epoch):
        collator = script.MaskingCollator(tokenizer, 0.15, seed)
        collator.on_epoch_begin(None, TrainerState(epoch=epoch), None)
        return tuple((collator([row])["labels"][0] >= 0).tolist())

    assert masked(0, 1.0) == masked(0, 1.5) and len({masked(0, 0.0), masked(0, 1.0), masked(1, 0.0)}) == 3


def test_another_model_is_not_trained_on_a_checkpoint(data, tmp_path):
    recipe("run_mlm", *mlm(data, tmp_path / "stopped", *NEW, "--max_steps", 1, "--save_steps", 1))
    other = [word if word != "t5" else "shaw" for word in mlm(data, tmp_path / "stopped", *NEW)]
    with pytest.raises(SystemExit, match=r"checkpoint-1: its model has position_embedding_type = 't5'.*another"):
        recipe("run_mlm", *other)


def test_evaluation_masks_the_same_tokens_for_every_model(data, relative, tmp_path):
    """And counts them as a loop of our own does."""
    script = import_script("run_mlm")
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    texts = (data / "dev.txt").read_text().splitlines()[:6]
    rows = Dataset.from_dict(script.cut_rows(tokenizer, texts, 32, line_by_line=False))
    joined = [token for text in texts for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert [token for row in rows["input_ids"] for token in row[1:-1]] == joined
    masked = script.masked_once(rows, tokenizer, 0.15)
    for model in (CHECKPOINT, relative):
        run = ("--do_eval", "--max_eval_samples", 6, "--max_seq_length", 32, "--seed", len(model.name))
        found = train("run_mlm", data, tmp_path / model.name, "txt", *run, model=model)
        loaded, right = AutoModelForMaskedLM.from_pretrained(model).eval(), []
        for row in masked:
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
            predicted = loaded(ids).logits[0].argmax(-1)
            right += (predicted == labels)[labels >= 0].tolist()
        assert found["eval_accuracy"] == pytest.approx(np.mean(right))


@pytest.mark.full
def test_two_processes_train_together(data, tmp_path):
    """Each takes half of the batch; the first one writes."""
    arguments = mlm(data, tmp_path / "out", *NEW, "--max_steps", 2, "--ddp_backend", "gloo")
    run_python(SCRIPTS / "examples" / "run_mlm.py", *arguments, *QUIET, processes=2)
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 2 and state["train_batch_size"] == 8
    assert torch.isfinite(AutoModelForMaskedLM.from_pretrained(tmp_path / "out").get_input_embeddings().weight).all()


# Question answering -----------------------------------------------------------------------------------------------


def test_answers_are_learnt_and_written(data, relative, tmp_path):
    """To questions with known answers, and to the same ones without, of JSON lines and of SQuAD's JSON."""
    rows = [json.loads(line) for line in (data / "dev.jsonl").read_text().splitlines()]
    write_lines(tmp_path / "bare.jsonl", [{key: row[key] for key in ("id", "question", "context")} for row in rows])
    for name in ("known.json", "bare.json"):
        paragraphs = []
        for row in rows:
            asked = {"id": row["id"], "question": row["question"]}
            if name == "known.json":
                asked["answers"] = [{key: values[0] for key, values in row["answers"].items()}]
            paragraphs.append({"context": row["context"], "qas": [asked]})
        (tmp_path / name).write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    size = ("--max_seq_length", 64, "--doc_stride", 16, "--per_device_train_batch_size", 8, "--do_predict")
    run = ("--do_train", "--do_eval", "--max_steps", 40, "--learning_rate", "2e-3")
    run = (*run, "--test_file", tmp_path / "known.json")
    found = train("run_qa", data, tmp_path / "out", "jsonl", *run, *size, model=relative)
    assert found["eval_f1"] > 30 and found["eval_exact_match"] <= found["eval_f1"]
    paths = (tmp_path / "out" / f"{split}_predictions.json" for split in ("predict", "eval"))
    answers, evaluated = (json.loads(path.read_text()) for path in paths)
    assert evaluated == answers  # of the same questions
    exact = [answers[row["id"]].lower() == row["answers"]["text"][0].lower() for row in rows]
    assert found["predict_exact_match"] == pytest.approx(100 * np.mean(exact), abs=1e-3)
    assert all(answers[row["id"]] in row["context"] for row in rows) and len(answers) == len(rows)
    for name in ("bare.jsonl", "bare.json"):
        test = ("--test_file", tmp_path / name, "--model_name_or_path", tmp_path / "out")
        again = recipe("run_qa", *test, *size, "--output_dir", tmp_path / name[4:])
        assert not {"predict_f1", "predict_exact_match", "predict_loss"} & set(again)
        assert json.loads((tmp_path / name[4:] / "predict_predictions.json").read_text()) == answers


def test_questions_without_an_answer(tmp_path):
    script = import_script("run_qa")
    asked = {"a": [{"text": "one", "answer_start": 0}], "b": []}
    questions = [{"id": name, "question": "?", "answers": answers} for name, answers in asked.items()]
    paragraph = {"context": "one two", "qas": questions}
    (tmp_path / "a.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    examples = script.read_questions(str(tmp_path / "a.json"), script.COLUMNS)
    script.check_answers("train", examples, negatives=True)
    with pytest.raises(ValueError, match="record 2: has no answer; give --version_2_with_negative"):
        script.check_answers("train", examples, negatives=False)
    assert script.squad_scores({"a": "one", "b": ""}, examples) == {"exact_match": 100, "f1": 100}
    assert script.squad_scores({"a": "", "b": "one"}, examples) == {"exact_match": 0, "f1": 0}
    pieces = Dataset.from_dict({"example_id": ["a", "b"], "offset_mapping": [[[-1, -1], [0, 3], [4, 7]]] * 2})
    logits = np.array([[0.0, 2, 0], [5, 2, 0]]), np.array([[0.0, 2, 1], [5, 2, 1]])
    settings = script.AnsweringArguments(version_2_with_negative=True)
    assert script.answers_of(logits, pieces, examples, settings) == {"a": "one", "b": ""}


# Sentence encoders ------------------------------------------------------------------------------------------------


def encoder(data, out, *more):
    files = ("--train_file", data / "pairs.jsonl", "--sts_file", data / "sts.tsv")
    files += ("--documents_file", data / "docs.jsonl", "--queries_file", data / "queries.jsonl")
    return recipe("run_embedding", *files, "--output_dir", out, "--per_device_train_batch_size", 8, *more)


def test_an_encoder_of_long_documents_is_trained(data, relative, tmp_path):
    """Above frozen layers, under a window, by heart; what is saved is a SentenceTransformer, as good as measured."""
    from sentence_transformers import SentenceTransformer

    flags = ("--max_seq_length", 300, "--attention_window", 16, "--freeze_layers", 3, "--learning_rate", "5e-4")
    model = ("--model_name_or_path", relative, "--mini_batch_size", 4)
    before = encoder(data, tmp_path / "before", *model, *flags, "--do_eval")
    found = encoder(data, tmp_path / "out", *model, *flags, "--do_train", "--do_eval", "--max_steps", 20)
    key = "eval_retrieval_cosine_ndcg@10"
    assert found[key] > before[key] and stored(tmp_path / "out", "eval")[key] == found[key]
    loaded = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    config = loaded.transformers_model.config
    assert (loaded.max_seq_length, config.attention_window) == (300, 16)
    old, new = AutoModel.from_pretrained(relative).state_dict(), loaded.transformers_model.state_dict()
    changed = {name.split(".")[2] for name in new if "layer" in name and not torch.equal(old[name], new[name])}
    words = "embeddings.word_embeddings.weight"
    assert changed == {"3"} and torch.equal(old[words], new[words])
    pairs = list(iterate_records(data / "sts.tsv", ("score", "sentence1", "sentence2")))
    one, other = (loaded.encode([pair[name] for pair in pairs]) for name in ("sentence1", "sentence2"))
    cosines = [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in zip(one, other, strict=True)]
    correlation = spearmanr(cosines, [float(pair["score"]) for pair in pairs]).statistic
    assert found["eval_sts_spearman_cosine"] == pytest.approx(correlation, abs=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("loss", ["cosent", "cosine_similarity"])
def test_scored_pairs_are_trained(data, tmp_path, loss):
    scores = ("--text_column_names", "sentence1", "sentence2", "--score_column_name", "score", "--score_scale", 5)
    run = ("--do_train", "--max_steps", 8, "--logging_steps", 1, "--learning_rate", "5e-4", "--loss", loss)
    files = ("--train_file", data / "sts.tsv", "--max_seq_length", 32, "--per_device_train_batch_size", 40)
    out = tmp_path / "out"
    recipe("run_embedding", "--model_name_or_path", CHECKPOINT, *files, *scores, *run, "--output_dir", out)
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert losses[-1] < losses[0]


# Encoding a data set -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encode():
    """The recipe with two workers, which Ray starts once for all tests."""
    import ray

    script = import_script("run_encode")
    yield lambda *arguments: script.main([str(word) for word in (*arguments, "--workers", 2)])
    ray.shutdown()


def rows_in(folder):
    """Rows of all files by id."""
    rows = [row for file in folder.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {str(row["id"]): row for row in rows}


def kill_a_worker(folder):
    """As by `kill -9`, when there is a first file."""
    end = time.monotonic() + 120  # an encoding that fails writes none
    while not list(folder.glob("*.parquet")) and time.monotonic() < end:
        time.sleep(0.05)
    found = psutil.process_iter(["cmdline"])  # None where a process has ended
    workers = [each for each in found if "MapBatches(TextEncoder)" in " ".join(each.info["cmdline"] or ())]
    workers[0].kill()


@pytest.mark.parametrize("suffix", with_full(["parquet"], ["jsonl", "csv"]))
def test_a_data_set_is_encoded_by_workers_that_may_die(encode, data, tmp_path, suffix):
    """The vectors are those of plain sentence-transformers; rows that come later are encoded alone."""
    from sentence_transformers import SentenceTransformer

    rows = [json.loads(line) for line in (data / "docs.jsonl").read_text("utf-8").splitlines()][:21]
    file, out = tmp_path / f"docs.{suffix}", tmp_path / "out"
    write = {"jsonl": "to_json"}.get(suffix, f"to_{suffix}")
    flags = ("--model_name_or_path", CHECKPOINT, "--data_files", file, "--output_dir", out, "--shard_size", 2)
    getattr(Dataset.from_list(rows[:20]), write)(file)
    with ThreadPoolExecutor() as pool:
        killing = pool.submit(kill_a_worker, out)
        assert encode(*flags) == {"before": 0, "after": 20}
        killing.result()
    getattr(Dataset.from_list(rows), write)(file)
    first = {path: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    assert encode(*flags) == {"before": 20, "after": 21}
    assert all(path.stat().st_mtime_ns == written for path, written in first.items())
    found = rows_in(out)
    vectors = np.array([found[row["id"]]["vector"] for row in rows], np.float32)
    expected = SentenceTransformer(str(CHECKPOINT), device="cpu").encode([row["text"] for row in rows])
    assert np.abs(vectors - expected).max() < 1e-5 * np.abs(expected).max()
    with pytest.raises(SystemExit, match="was begun with precision = 'float32', and this run has 'float16'"):
        encode(*flags, "--precision", "float16")


KILLED_INSIDE_A_WRITE = """
import os, signal, sys
from pathlib import Path
import pyarrow.dataset, pyarrow.parquet, ray
module, name, scripts, out = sys.argv[1:5]
driver = os.getpid()

def cut_files_short():
    of = {"dataset": pyarrow.dataset, "parquet": pyarrow.parquet}[module]
    write = getattr(of, name)

    def write_half(*arguments, **options):
        before = set(Path(out).rglob("*.parquet"))
        write(*arguments, **options)
        if any(path.parent == Path(out) for path in before):
            for path in set(Path(out).rglob("*.parquet")) - before:
                os.truncate(path, path.stat().st_size // 2)
            os.kill(driver, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(of, name, write_half)

sys.path.insert(0, scripts)
here = {"working_dir": scripts, "worker_process_setup_hook": cut_files_short}
ray.init(num_cpus=3, include_dashboard=False, runtime_env=here)
import run_encode
run_encode.main(sys.argv[5:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("written", with_full(["dataset write_dataset"], ["parquet write_table"]))
def test_encode_killed_inside_a_write(encode, data, tmp_path, written):
    """The next run starts, encodes what is missing, and every id is read once, also from the folder as a whole."""
    from sentence_transformers import SentenceTransformer

    out = tmp_path / "out"
    flags = ("--model_name_or_path", CHECKPOINT, "--data_files", data / "docs.jsonl", "--output_dir", out)
    flags = (*map(str, flags), "--shard_size", "4")
    killed = (*written.split(), SCRIPTS / "examples", out, *flags, "--workers", "1")
    run_code(KILLED_INSIDE_A_WRITE, *killed, status=-SIGKILL)
    counts = encode(*flags)
    assert 0 < counts["before"] < counts["after"] == 32
    rows = pq.read_table(out).to_pylist()
    assert sorted(row["id"] for row in rows) == sorted(map(str, range(32)))
    texts = {row["id"]: row["text"] for row in iterate_records(data / "docs.jsonl", ("id", "text"))}
    expected = SentenceTransformer(str(CHECKPOINT), device="cpu").encode([texts[row["id"]] for row in rows])
    assert np.abs(np.array([row["vector"] for row in rows]) - expected).max() < 1e-5 * np.abs(expected).max()


def test_encode_reads_each_id_once(encode, data, tmp_path):
    """Files that overlap or were copied; other weights under the same name raise an error."""
    out, model = tmp_path / "out", tmp_path / "model"
    shutil.copytree(CHECKPOINT, model)
    flags = ("--model_name_or_path", model, "--data_files", data / "docs.jsonl", "--output_dir", out)
    assert encode(*flags)["after"] == 32
    first, *_, last = sorted(out.glob("*.parquet"))
    shutil.copy(first, out / "zz.parquet")
    pq.write_table(pq.read_table(first).slice(0, 2), first)
    shutil.copy(last, out / "zzz.parquet")
    assert encode(*flags) == {"before": 32, "after": 32}
    assert sorted(pq.read_table(out)["id"].to_pylist()) == sorted(map(str, range(32)))
    weights = AutoModelForMaskedLM.from_pretrained(model)
    torch.nn.init.zeros_(weights.bert.encoder.layer[0].output.dense.weight)
    weights.save_pretrained(model)
    with pytest.raises(SystemExit, match="was begun with weights = "):
        encode(*flags)


UNENCODABLE = [
    ("--shard_size 0", "--shard_size 0"),
    ("--precision int8", "--precision int8: give float32 or float16"),
    ("--text_column_name body", "--text_column_name body: the data has id, text"),
    ("", "id b: 'text' is a NoneType"),
]


@pytest.mark.parametrize(("flags", "words"), UNENCODABLE)
def test_what_cannot_be_encoded(encode, tmp_path, flags, words):
    write_lines(tmp_path / "texts.jsonl", [{"id": "a", "text": "the cat"}, {"id": "b", "text": None}])
    files = ("--data_files", tmp_path / "texts.jsonl", "--output_dir", tmp_path / "out")
    with pytest.raises(SystemExit, match=f"Error: .*{words}"):
        encode("--model_name_or_path", CHECKPOINT, *files, *flags.split())
    assert not list((tmp_path / "out").glob("*.parquet"))


# A server ------------------------------------------------------------------------------------------------------------


def test_a_server_answers_requests_of_several_clients_in_batches():
    """With threads that share one model; a request that fails does not stop the others."""
    from fastapi.testclient import TestClient
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(CHECKPOINT), device="cpu")
    texts = [["a cat"], ["the dog sat on the mat", "it"], ["b " * 40]] * 4
    expected = [encoder.encode(each) for each in texts]
    hf_relpos.optimize(encoder)
    sizes = []

    def encode(batch):
        sizes.append(len(batch))
        if "fail" in batch:
            raise ValueError("fail")
        return encoder.encode(batch)

    app = import_script("run_server").build(encode, most=4, workers=2)
    with TestClient(app, raise_server_exceptions=False) as client, ThreadPoolExecutor(12) as clients:
        found = list(clients.map(lambda each: client.post("/embed", json=each).json(), texts))
        assert client.post("/embed", json=["fail"]).status_code == 500
        assert client.post("/embed", json="no list").status_code == 422
        assert np.abs(client.post("/embed", json=["a cat"]).json() - expected[0]).max() < 1e-5
    assert max(sizes) <= 5 and len(sizes) < len(texts) + 2
    for one, other in zip(found, expected, strict=True):
        assert np.abs(np.array(one) - other).max() < 1e-5 * np.abs(other).max()


# What is refused --------------------------------------------------------------------------------------------------

RUN = ("--model_name_or_path", CHECKPOINT, "--do_train", "--output_dir", "out")


# What is added to RUN, by recipe, and words of the error.
REFUSED = {
    "run_classification": {
        "": "--do_train: has nothing to train on; give --train_file",
        "--train_file gone.tsv": "gone.tsv: no such file",
        "--train_file a.docx": "a.docx: ends in '.docx'; give .csv, .tsv",
        "--train_file a.jsonl": "a.jsonl, record 1: no field 'text' .it has label, query.; name the columns by",
        "--train_file a.tsv --text_column_names sentence": "a.tsv, record 1: no field 'sentence' .it has label, text.",
        "--train_file a.tsv --validation_file b.tsv --do_eval": "label 'no' is not in the training data",
        "--train_file a.tsv --do_regression": "'yes' is no number",
        "--train_file a.tsv --max_seq_length 900": "the model reads 128",
        "--train_file a.tsv --max_seq_length 0": "whole number from 1 on",
        "--train_file a.tsv --freeze_layers 9": "the model has 4 layers",
        "--train_file a.tsv --position_embedding_type shaw": "has 'absolute'. Convert it first: .*--position-emb",
        "--train_file a.tsv --attention_window 8": "a bert model has none",
        "--train_file a.tsv --do_predict": "--do_predict: has nothing to predict",
        "--train_file a.tsv --do_train False": "nothing to do: give --do_train",
        "--model_name_or_path nowhere/at-all": "nowhere/at-all: no tokenizer",
    },
    "run_ner": {"--train_file a.conll": "a.conll, line 2: 'sat' has 1 columns, the first line 2"},
    "run_mlm": {
        "--train_file a.txt --do_predict": "--do_predict: this recipe trains and evaluates",
        "--train_file empty.txt": "holds no text",
    },
    "run_qa": {
        "--train_file a.json": "not SQuAD's JSON .KeyError: 'data'",
        "--train_file wrong.jsonl": "record 1: the context has no 'cat' at character 1; correct",
    },
    "run_embedding": {
        "--train_file a.jsonl --loss cosent": "--loss cosent: without --score_col",
        "--train_file a.jsonl --do_eval": "--do_eval: has nothing to measure",
        "--documents_file a.jsonl": "belong together",
    },
}
CASES = [(script, (*RUN, *flags.split()), words) for script, each in REFUSED.items() for flags, words in each.items()]
TEXT = (*RUN[2:], "--train_file", "a.txt")
CASES += [
    ("run_classification", (*RUN[2:], "--train_file", "a.tsv"), "--model_name_or_path: give a checkpoint"),
    ("run_mlm", (*NEW[:-1], "dropout=1", *TEXT), "--config_overrides dropout: "),
    ("run_mlm", (*NEW, *TEXT, "--position_options", "clip"), "--position_options 'clip' is not of the form"),
]


@pytest.mark.parametrize("script, arguments, words", CASES)
def test_errors_before_anything_is_written(tmp_path, monkeypatch, script, arguments, words):
    monkeypatch.chdir(tmp_path)
    Path("a.tsv").write_text("label\ttext\nyes\tcat\nyes\tsun\n")
    Path("b.tsv").write_text("label\ttext\nno\tcat\n")
    Path("a.txt").write_text("The cat sat.\nThe sun is red.\n")
    Path("empty.txt").write_text("\n")
    Path("a.conll").write_text("cat\tO\nsat\n")
    Path("a.docx").write_text("")
    Path("a.json").write_text('{"version": 1}')
    write_lines(Path("a.jsonl"), [{"label": "yes", "query": "cat"}])
    answers = {"text": ["cat"], "answer_start": [1]}
    write_lines(Path("wrong.jsonl"), [{"id": "1", "question": "who?", "context": "a cat", "answers": answers}])
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(SystemExit, match=f"Error: .*{words}"):
        recipe(script, *arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_folder_with_something_else_is_refused(data, tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(SystemExit, match=r"is not empty, and has no checkpoint to go on from; give another folder"):
        classify(data, tmp_path, "--do_train")
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_flags_from_a_file(data, tmp_path):
    """One argument, a .json file, stands for all flags."""
    flags = {"model_name_or_path": str(CHECKPOINT), "validation_file": str(data / "dev.txt"), "do_eval": True}
    flags |= {"output_dir": str(tmp_path / "out"), "report_to": "none", "use_cpu": True, "max_eval_samples": 4}
    (tmp_path / "flags.json").write_text(json.dumps({**flags, "disable_tqdm": True, "max_seq_length": 32}))
    found = import_script("run_mlm").main([tmp_path / "flags.json"])
    assert stored(tmp_path / "out", "eval")["eval_loss"] == found["eval_loss"]
    for content, words in (("{", 'not JSON .*; write ."output_dir'), ("[]", "a list, not an object")):
        (tmp_path / "flags.json").write_text(content)
        with pytest.raises(SystemExit, match=f"flags.json: {words}"):
            import_script("run_mlm").main([tmp_path / "flags.json"])


def test_entity_scores():
    """One entity is right, one of the wrong type, one missed; I- of another type begins an entity."""
    scores = import_script("recipes.scores").entity_scores
    truth, guess = [["B-a", "I-a", "O", "B-b"], ["O", "B-a"]], [["B-a", "I-a", "O", "B-a"], ["O", "O"]]
    assert scores(truth, guess) == pytest.approx({"precision": 50, "recall": 100 / 3, "f1": 40})
    assert set(scores([["B-a", "B-b"]], [["B-a", "I-b"]]).values()) == {100.0}
    assert set(scores([["O"]], [["O"]]).values()) == {0.0}
