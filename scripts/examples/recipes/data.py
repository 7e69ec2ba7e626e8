"""Data of a recipe: records of files or of the Hub, with columns that are checked, and their tokens."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, load_dataset
from transformers import TrainingArguments

from hf_relpos.data.records import iterate_records, text_problem, text_suffix

from .arguments import DataArguments, ModelArguments, PredictionArguments
from .models import load_config


SPLITS = ("train", "validation", "test")
SUFFIXES = (".csv", ".tsv", ".jsonl", ".json")
REMEDY = "name the columns by the flags --…_column_name"
# Seed of the held-out part: the same examples in runs with different seeds.
SPLIT_SEED = 0


def read_file(path: str, columns: Sequence[str], optional: Sequence[str] = ()) -> Dataset:
    """Records of a file; one with tabs or commas has a header.

    Args:
        optional: columns that are read where the file has them.

    Raises:
        ValueError: for a file of another kind, one without records, and what `iterate_records` refuses.
    """
    check_suffix(path, SUFFIXES)
    columns = [*columns, *(column for column in optional if has_column(path, column))]
    records = list(iterate_records(path, columns, REMEDY))
    if not records:
        raise ValueError(f"{path}: holds no records; give a file with the columns {', '.join(columns)}")
    return Dataset.from_list(plain(records, path))


def has_column(path: str, column: str) -> bool:
    """Whether a file has a column, by its header or first record."""
    try:
        return any(True for _ in iterate_records(path, [column]))
    except ValueError:
        return False


def check_suffix(path: str, suffixes: Collection[str]) -> None:
    """
    Raises:
        ValueError: for a file that is not there, or ends in none of the suffixes, but for that of the compression.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file; check the path")
    if text_suffix(path) not in suffixes:
        raise ValueError(f"{path}: ends in {Path(path).suffix!r}; give {', '.join(suffixes)}, compressed or not")


def plain(records: list[dict[str, Any]], path: str) -> list[dict[str, Any]]:
    """The records, if each column has values of one type: that of Arrow's tables.

    Raises:
        ValueError: for a column with several.
    """
    for name, first in records[0].items():
        for number, record in enumerate(records, 1):
            both = {type(first), type(record[name])}
            if len(both) > 1 and both != {int, float}:
                kinds = f"a {type(record[name]).__name__}, and a {type(first).__name__} in the first"
                raise ValueError(f"{path}, record {number}: {name!r} is {kinds}; give all the same type")
    return records


def load_data(
    args: DataArguments,
    model: ModelArguments,
    training: TrainingArguments,
    columns: Sequence[str],
    labels: Sequence[str] = (),
    read: Callable[..., Dataset] = read_file,
    shuffle: bool = True,
    validates: bool = True,
) -> dict[str, Dataset]:
    """The sets that the run needs, "train", "validation" and "test", with these columns alone.

    Without a validation set, a part of the training data is held out, and not trained on.

    Args:
        columns: that every record must have.
        labels: columns that those of the test set may lack.
        read: a file, as `read_file`.
        shuffle: hold out random examples rather than the last ones.
        validates: whether evaluation needs a validation set.

    Raises:
        ValueError: for data that is missing or cannot be read, or lacks a column.
    """
    if args.dataset_name:
        sets = _load_hub(args, model, columns, labels)
    else:
        files = {"train": args.train_file, "validation": args.validation_file}
        sets = {split: read(path, [*columns, *labels]) for split, path in files.items() if path}
        if training.do_predict and isinstance(args, PredictionArguments) and args.test_file:
            sets["test"] = read(args.test_file, columns, labels)
    if training.do_train and "train" not in sets:
        raise ValueError("--do_train: has nothing to train on; give --train_file or --dataset_name")
    evaluates = validates and (training.do_eval or training.eval_strategy != "no")
    if evaluates and "validation" not in sets:
        if "train" not in sets:
            raise ValueError("--do_eval: has nothing to measure; give --validation_file or --dataset_name")
        held_out = max(1, len(sets["train"]) * args.validation_split_percentage // 100)
        if held_out == len(sets["train"]):
            raise ValueError("--train_file: one example, none of which can be held out; give --validation_file")
        seed = SPLIT_SEED if shuffle else None
        parts = sets["train"].train_test_split(test_size=held_out, shuffle=shuffle, seed=seed)
        sets = {**sets, "train": parts["train"], "validation": parts["test"]}
    if training.do_train and args.shuffle_train_dataset:
        sets["train"] = sets["train"].shuffle(seed=args.shuffle_seed)
    needed = {"train": args.max_train_samples} if training.do_train else {}
    if evaluates:
        needed["validation"] = args.max_eval_samples
    if training.do_predict and isinstance(args, PredictionArguments):
        if "test" not in sets:
            raise ValueError("--do_predict: has nothing to predict; give --test_file or --dataset_name")
        needed["test"] = args.max_predict_samples
    return {split: head(sets[split], limit) for split, limit in needed.items()}


def head(data: Dataset, limit: int | None) -> Dataset:
    """The first examples."""
    return data if limit is None else data.select(range(min(limit, len(data))))


def _load_hub(
    args: DataArguments, model: ModelArguments, columns: Sequence[str], labels: Sequence[str]
) -> dict[str, Dataset]:
    try:
        loaded = load_dataset(
            args.dataset_name, args.dataset_config_name, cache_dir=model.cache_dir, token=model.token
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"--dataset_name {args.dataset_name}: cannot be loaded ({error}); check the name") from error
    assert isinstance(loaded, DatasetDict)
    sets = {split: loaded[split] for split in SPLITS if split in loaded}
    for split, data in sets.items():
        known = labels if split != "test" else [name for name in labels if has_labels(data, name)]
        missing = [column for column in (*columns, *known) if column not in data.column_names]
        if missing:
            found = ", ".join(data.column_names)
            raise ValueError(f"{args.dataset_name}, {split}: no column {missing[0]!r} (it has {found}); {REMEDY}")
        sets[split] = data.select_columns([*columns, *known])
    return sets


def has_labels(data: Dataset, column: str) -> bool:
    """Whether there are labels; in the test sets of shared tasks on the Hub all of them are −1."""
    return column in data.column_names and any(value != -1 for value in data[column])


def tokenized(
    sets: Mapping[str, Dataset], tokenize: Callable[[Any], Any], args: DataArguments, training: TrainingArguments
) -> dict[str, Dataset]:
    """The sets with what `tokenize` makes of batches of them in place of their columns."""
    with training.main_process_first(desc="tokenizing"):
        settings = {"batched": True, "num_proc": args.preprocessing_num_workers, "desc": "tokenizing"}
        settings["load_from_cache_file"] = not args.overwrite_cache
        return {
            split: data.map(tokenize, remove_columns=data.column_names, **settings) for split, data in sets.items()
        }


def check_texts(sets: Mapping[str, Dataset], columns: Sequence[str]) -> None:
    """
    Raises:
        ValueError: for a field that is no text.
    """
    for split, data in sets.items():
        for column in columns:
            for number, value in enumerate(data[column], 1):
                if problem := text_problem(value):
                    raise ValueError(f"{split} data, record {number}: {column!r} {problem}")


def with_names(data: Dataset, column: str) -> Dataset:
    """The data with labels, single or in a list, as strings: their names, where the Hub has them as numbers."""
    feature = data.features[column]
    kind = getattr(feature, "feature", feature)
    names = kind.names if isinstance(kind, ClassLabel) else None

    def name(value: Any) -> Any:
        if isinstance(value, list):
            return [name(each) for each in value]
        return names[value] if names and value >= 0 else str(value)

    labels = [name(value) for value in data[column]]
    return data.remove_columns(column).add_column(column, labels)


def numbers(split: str, labels: Sequence[Any]) -> list[float]:
    """Labels or scores as numbers.

    Raises:
        ValueError: for one that is no number.
    """
    found = []
    for number, label in enumerate(labels, 1):
        try:
            found.append(float(label))
        except (TypeError, ValueError):
            raise ValueError(
                f"{split} data, record {number}: {label!r} is no number; name the column of numbers"
            ) from None
    return found


def label_names(model: ModelArguments, labels: Mapping[str, Iterable[str]], trains: bool) -> list[str]:
    """Names of the labels by their number: those of the checkpoint, where it was trained on the same ones.

    Args:
        labels: of each set.
        trains: on the training set; else the checkpoint has been trained.

    Raises:
        ValueError: for a label to be measured that is not trained on.
    """
    stored = []
    if model.model_name_or_path:
        config = load_config(model)
        stored = [config.id2label[index] for index in sorted(config.id2label)]
    names = sorted(set(labels["train"])) if trains else stored
    if set(names) == set(stored):
        names = stored
    for split in ("validation", "test"):
        if unknown := sorted(set(labels.get(split, ())) - set(names)):
            where = "the training data" if trains else model.model_name_or_path
            raise ValueError(f"{split} data: label {unknown[0]!r} is not in {where}, which has {', '.join(names[:8])}")
    return names
