"""Fine-tune a relative or a stock BERT on a classification of texts or pairs of texts, and measure it.

    python scripts/examples/run_classification.py --model_name_or_path bert-relative --train_file train.tsv \\
        --validation_file dev.tsv --do_train --do_eval --output_dir classifier
    python scripts/examples/run_classification.py --model_name_or_path bert-relative --dataset_name nyu-mll/glue \\
        --dataset_config_name mrpc --text_column_names sentence1 sentence2 --do_train --do_eval --output_dir mrpc
    python scripts/examples/run_classification.py --model_name_or_path classifier --test_file texts.tsv --do_predict \\
        --output_dir predicted

Files are .csv or .tsv with a header, or .jsonl. All flags of `TrainingArguments` apply. Measured: accuracy and
macro-averaged F1, or with --do_regression, where labels are numbers, Pearson's and Spearman's correlation. Predictions
are written to predict_results.txt, a line each, in the order of the texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from recipes.arguments import ModelArguments, PredictionArguments, launch, option
from recipes.data import check_texts, label_names, load_data, numbers, tokenized, with_names
from recipes.models import load_model, load_tokenizer, sequence_length
from recipes.running import OrderedTrainer, check_checkpoint, run, start, trainer_arguments
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    Trainer,
    TrainingArguments,
)

from hf_relpos.files import write_text


@dataclass
class ClassificationArguments(PredictionArguments):
    """Data of a classification."""

    text_column_names: list[str] = option("one or two columns of texts", ["text"])
    label_column_name: str = option("column of labels", "label")
    do_regression: bool = option("labels are numbers", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.text_column_names) not in (1, 2):
            raise ValueError(f"--text_column_names {' '.join(self.text_column_names)}: give one column or two")


def class_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy and macro-averaged F1 of predicted classes."""
    truth, found = prediction.label_ids, prediction.predictions
    return {
        "accuracy": float(accuracy_score(truth, found)),
        "f1_macro": float(f1_score(truth, found, average="macro", zero_division=0)),
    }


def regression_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Correlations of predicted numbers."""
    truth, found = prediction.label_ids, np.ravel(prediction.predictions)
    return {
        "pearson": float(pearsonr(truth, found).statistic),
        "spearman": float(spearmanr(truth, found).statistic),
        "mse": float(np.mean((truth - found) ** 2)),
    }


def predict(trainer: Trainer, rows: Dataset, names: Sequence[str]) -> dict[str, float]:
    """Write the predictions, and measure them where there are labels.

    Args:
        names: of the classes; empty for a regression.
    """
    output = trainer.predict(rows, metric_key_prefix="predict")
    found = np.ravel(output.predictions)
    words = [names[number] for number in found] if names else [f"{number:.3f}" for number in found]
    lines = ["index\tprediction", *(f"{index}\t{word}" for index, word in enumerate(words))]
    if trainer.is_world_process_zero():
        write_text(Path(trainer.args.output_dir, "predict_results.txt"), "\n".join(lines) + "\n")
    return output.metrics


def finetune(model_args: ModelArguments, args: ClassificationArguments, training: TrainingArguments) -> dict[str, Any]:
    """Train, measure, and return the figures.

    Raises:
        ValueError: for flags, data and models that cannot be used, before anything is written.
    """
    checkpoint = start(training, predicts=True)
    tokenizer = load_tokenizer(model_args)
    texts, label = args.text_column_names, args.label_column_name
    sets = load_data(args, model_args, training, texts, [label])
    check_texts(sets, texts)
    names: list[str] = []
    labelled = {split: data for split, data in sets.items() if label in data.column_names}
    if args.do_regression:
        labels = {split: numbers(split, data[label]) for split, data in labelled.items()}
        fields: dict[str, Any] = {"num_labels": 1, "problem_type": "regression"}
    else:
        classes = {split: list(with_names(data, label)[label]) for split, data in labelled.items()}
        names = label_names(model_args, classes, training.do_train)
        index = {name: number for number, name in enumerate(names)}
        labels = {split: [index[name] for name in found] for split, found in classes.items()}
        fields = {"id2label": dict(enumerate(names)), "label2id": index}
    model = load_model(AutoModelForSequenceClassification, model_args, tokenizer, training.do_train, **fields)
    check_checkpoint(checkpoint, model)
    length = sequence_length(args.max_seq_length, model, 128)

    def tokenize(batch: dict[str, list[str]]) -> Any:
        return tokenizer(*(batch[name] for name in texts), truncation=True, max_length=length)

    rows = {
        split: data.add_column("labels", labels[split]) if split in labels else data
        for split, data in tokenized(sets, tokenize, args, training).items()
    }
    trainer = OrderedTrainer(
        **trainer_arguments(model, training, rows, tokenizer, DataCollatorWithPadding(tokenizer)),
        compute_metrics=regression_metrics if args.do_regression else class_metrics,
        preprocess_logits_for_metrics=None if args.do_regression else lambda logits, labels: logits.argmax(-1),
    )
    return run(trainer, checkpoint, lambda: predict(trainer, rows["test"], names))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The recipe with these arguments, or those of the command line."""
    return launch(finetune, (ModelArguments, ClassificationArguments, TrainingArguments), __doc__, arguments)


if __name__ == "__main__":
    main()
