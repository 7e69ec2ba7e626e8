"""Fine-tune a relative or a stock BERT on named entities, and measure precision, recall and F1 of entities.

    python scripts/examples/run_ner.py --model_name_or_path bert-relative --train_file train.conll \\
        --validation_file dev.conll --do_train --do_eval --output_dir tagger
    python scripts/examples/run_ner.py --model_name_or_path tagger --test_file words.jsonl --do_predict \\
        --output_dir tagged

Files are CoNLL's, one token per line with its tag, in any tagging scheme, a blank line between sentences (.conll,
.txt, .bio, .tsv), or JSON lines with lists of words and of tags. The tag of a word is the label of its first token. A
sentence longer than --max_seq_length is read in pieces, so that no word goes unmeasured; an entity across a border
counts as two. All flags of `TrainingArguments` apply. Predictions are written to predictions.txt: the tags of a
sentence on a line, one for each word. JSON lines for that may be without tags; CoNLL's have O in their place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from recipes.arguments import ModelArguments, PredictionArguments, launch, option
from recipes.conll import read_conll
from recipes.data import check_suffix, label_names, load_data, read_file, tokenized, with_names
from recipes.models import load_model, load_tokenizer, sequence_length
from recipes.running import OrderedTrainer, check_checkpoint, run, start, trainer_arguments
from recipes.scores import entity_scores
from transformers import (
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    EvalPrediction,
    TrainingArguments,
)

from hf_relpos.data.masking import IGNORE_INDEX
from hf_relpos.data.records import text_suffix
from hf_relpos.files import write_text


CONLL = (".conll", ".txt", ".bio", ".iob", ".iob2", ".tsv")
JSON = (".jsonl", ".json")
# Of each piece of a sentence: the word that a token is the first one of, and whether the sentence begins there.
PIECES = ("word_starts", "begins")


@dataclass
class TaggingArguments(PredictionArguments):
    """Data of a tagger."""

    text_column_name: str = option("column with lists of words, of JSON lines and the Hub", "tokens")
    label_column_name: str = option("column with lists of tags", "ner_tags")


def read_sentences(path: str, columns: Sequence[str], optional: Sequence[str] = ()) -> Dataset:
    """Words and tags of a file; of JSON lines words alone, where tags are `optional` and there are none.

    Raises:
        ValueError: for a file of another kind, and what its reader refuses.
    """
    check_suffix(path, (*CONLL, *JSON))
    if text_suffix(path) in JSON:
        return read_file(path, columns, optional)
    words, tags = (*columns, *optional)
    return Dataset.from_list([{words: each[0], tags: each[1]} for each in read_conll(path)])


def check_sentences(split: str, data: Dataset, words: str, tags: str) -> None:
    """
    Raises:
        ValueError: for a sentence that is not a list of words with as many tags, where there are tags.
    """
    labels = data[tags] if tags in data.column_names else data[words]
    for number, (one, other) in enumerate(zip(data[words], labels, strict=True), 1):
        if not isinstance(one, list) or not isinstance(other, list) or len(one) != len(other):
            lists = f"{split} data, record {number}: {words!r} and {tags!r} are not lists of the same length"
            raise ValueError(f"{lists}; give each word one tag")
        if not all(isinstance(word, str) for word in one):
            raise ValueError(f"{split} data, record {number}: {words!r} holds something else than text; give strings")


def with_insides(tags: set[str]) -> set[str]:
    """The tags, and for every type of entity both B- and I-, of which a small file may have one."""
    return tags | {f"{mark}-{tag[2:]}" for tag in tags if tag[:2] in ("B-", "I-") for mark in "BI"}


def predicted_tags(
    labels: np.ndarray, pieces: Dataset, lengths: Sequence[int], names: Sequence[str]
) -> list[list[str]]:
    """The tags of each sentence, one for each word; O for a word without tokens.

    Args:
        labels: (pieces, L), padded.
        pieces: with the columns `PIECES`.
        lengths: words of each sentence.
        names: of the labels.
    """
    sentences: list[list[str]] = []
    for row, starts, begins in zip(labels, *(pieces[name] for name in PIECES), strict=True):
        if begins:
            sentences.append(["O"] * lengths[len(sentences)])
        for label, word in zip(row, starts, strict=False):
            if word is not None:
                sentences[-1][word] = names[label]
    return sentences


def finetune(model_args: ModelArguments, args: TaggingArguments, training: TrainingArguments) -> dict[str, Any]:
    """Train, measure, and return the figures.

    Raises:
        ValueError: for flags, data and models that cannot be used, before anything is written.
    """
    checkpoint = start(training, predicts=True)
    tokenizer = load_tokenizer(model_args)
    words, tags = args.text_column_name, args.label_column_name
    sets = load_data(args, model_args, training, [words], [tags], read_sentences)
    for split, data in sets.items():
        check_sentences(split, data, words, tags)
    labelled = {split: with_names(data, tags) for split, data in sets.items() if tags in data.column_names}
    sets = {**sets, **labelled}
    found = {split: with_insides({tag for row in data[tags] for tag in row}) for split, data in labelled.items()}
    names = label_names(model_args, found, training.do_train)
    index = {name: number for number, name in enumerate(names)}
    fields = {"id2label": dict(enumerate(names)), "label2id": index}
    model = load_model(AutoModelForTokenClassification, model_args, tokenizer, training.do_train, **fields)
    check_checkpoint(checkpoint, model)
    length = sequence_length(args.max_seq_length, model, 128)

    def tokenize(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        encoded = tokenizer(
            batch[words], is_split_into_words=True, truncation=True, max_length=length, return_overflowing_tokens=True
        )
        sentences = encoded.pop("overflow_to_sample_mapping")
        starts, seen = [], set()
        for row, sentence in enumerate(sentences):
            starts.append([])
            for word in encoded.word_ids(row):
                first = word is not None and (sentence, word) not in seen
                starts[-1].append(word if first else None)
                seen.add((sentence, word))
        begins = [row == 0 or sentence != sentences[row - 1] for row, sentence in enumerate(sentences)]
        found = {**encoded, "word_starts": starts, "begins": begins}
        if tags in batch:
            found["labels"] = [
                [IGNORE_INDEX if word is None else index[batch[tags][sentence][word]] for word in row]
                for row, sentence in zip(starts, sentences, strict=True)
            ]
        return found

    def entity_metrics(prediction: EvalPrediction) -> dict[str, float]:
        """Scores of entities, exact in type and both ends; of rows (N, L) of labels."""
        real = prediction.label_ids != IGNORE_INDEX
        truth, guess = (
            [[names[label] for label in row[kept]] for row, kept in zip(labels, real, strict=True)]
            for labels in (prediction.label_ids, prediction.predictions)
        )
        return {name: value / 100 for name, value in entity_scores(truth, guess).items()}

    rows = tokenized(sets, tokenize, args, training)
    inputs = {split: data.remove_columns(list(PIECES)) for split, data in rows.items()}
    trainer = OrderedTrainer(
        **trainer_arguments(model, training, inputs, tokenizer, DataCollatorForTokenClassification(tokenizer)),
        compute_metrics=entity_metrics,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )

    def predict() -> dict[str, float]:
        output = trainer.predict(inputs["test"], metric_key_prefix="predict")
        lines = predicted_tags(output.predictions, rows["test"], list(map(len, sets["test"][words])), names)
        if trainer.is_world_process_zero():
            text = "".join(f"{' '.join(line)}\n" for line in lines)
            write_text(Path(training.output_dir, "predictions.txt"), text)
        return output.metrics

    return run(trainer, checkpoint, predict)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The recipe with these arguments, or those of the command line."""
    return launch(finetune, (ModelArguments, TaggingArguments, TrainingArguments), __doc__, arguments)


if __name__ == "__main__":
    main()
