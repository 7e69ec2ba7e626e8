"""Flags of the recipes, named as in Transformers' own examples."""

import importlib
import json
import sys
from argparse import ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from hf_relpos.cli import parse_options


def option(help: str, default: Any = None) -> Any:
    """A field of a dataclass that HfArgumentParser reads."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class ModelArguments:
    """Which model: a checkpoint, or with --tokenizer_name alone a new one."""

    model_name_or_path: str | None = option("checkpoint to start from, a folder or Hub repository; none: a new model")
    model_type: str = option("of a new model: relpos_bert, or a stock one such as bert", "relpos_bert")
    config_overrides: str | None = option("of a new model: hidden_size=256,num_hidden_layers=4,…")
    tokenizer_name: str | None = option("folder or Hub repository of the tokenizer, if not beside the checkpoint")
    position_embedding_type: list[str] = option(
        "position schemes of a new model (`hf-relpos schemes` lists them), or those that the checkpoint must have", []
    )
    position_options: list[str] = option("options of that scheme: NAME=VALUE …", [])
    scheme_file: str | None = option("Python file with a position scheme of yours, which is imported first")
    attention_window: int | None = option("tokens attend at most so far away (relpos_bert)")
    attn_implementation: str | None = option("backend of attention: sdpa, eager, flex_attention, …")
    optimize: bool = option("make the model faster on the CPU: hf_relpos.optimize", False)
    freeze_layers: int = option("layers, counted from the embeddings on, that are not trained; they with them", 0)
    cache_dir: str | None = option("folder for what is downloaded")
    model_revision: str = option("branch, tag or commit of the checkpoint", "main")
    token: str | None = option("of the Hub; default: that of `hf auth login`")

    @property
    def scheme(self) -> str | list[str] | None:
        """Value for the configuration."""
        names = self.position_embedding_type
        return names[0] if len(names) == 1 else names or None

    @property
    def options(self) -> dict[str, Any]:
        """The options of the scheme by name; values are parsed as JSON where possible."""
        return parse_options(self.position_options, "--position_options")

    @property
    def overrides(self) -> dict[str, Any]:
        """Fields of the configuration of a new model."""
        return parse_options(self.config_overrides.split(",") if self.config_overrides else [], "--config_overrides")

    @property
    def hub(self) -> dict[str, Any]:
        """Arguments of `from_pretrained`."""
        given = {"cache_dir": self.cache_dir, "revision": self.model_revision, "token": self.token}
        return {name: value for name, value in given.items() if value is not None}

    def __post_init__(self) -> None:
        if self.scheme_file:
            self.scheme_file = str(Path(self.scheme_file).resolve())  # also for workers, which run elsewhere
            import_file("--scheme_file", self.scheme_file)
        if not (self.model_name_or_path or self.tokenizer_name):
            raise ValueError("--model_name_or_path: give a checkpoint, or --tokenizer_name for a new model")
        if self.model_name_or_path and (self.config_overrides or self.position_options):
            name = "--config_overrides" if self.config_overrides else "--position_options"
            raise ValueError(f"{name}: of a new model; leave it out, or --model_name_or_path")
        _ = self.options, self.overrides
        for name, least in (("attention_window", 1), ("freeze_layers", 0)):
            check_least(name, getattr(self, name), least)


@dataclass
class DataArguments:
    """Which data: files, or a data set of the Hub."""

    dataset_name: str | None = option("data set of the Hub, or folder with one")
    dataset_config_name: str | None = option("its configuration")
    train_file: str | None = option("file for training, of a format named above, compressed (.xz, .gz, .bz2) or not")
    validation_file: str | None = option("file for evaluation")
    validation_split_percentage: int = option("of the training data, held out where there is no validation set", 5)
    max_seq_length: int | None = option("tokens read of a text")
    shuffle_train_dataset: bool = option("shuffle training examples before --max_train_samples are taken", False)
    shuffle_seed: int = option("of that order", 42)
    max_train_samples: int | None = option("examples for training at most, the first ones")
    max_eval_samples: int | None = option("examples for evaluation at most, the first ones")
    overwrite_cache: bool = option("tokenize anew what `datasets` has in its cache", False)
    preprocessing_num_workers: int | None = option("processes that tokenize")

    def __post_init__(self) -> None:
        if self.dataset_name and (self.train_file or self.validation_file):
            raise ValueError("--dataset_name: give a data set or files, not both")
        if not 0 < self.validation_split_percentage < 100:
            raise ValueError(
                f"--validation_split_percentage {self.validation_split_percentage}: give a number from 1 to 99"
            )
        for name in ("max_seq_length", "max_train_samples", "max_eval_samples", "preprocessing_num_workers"):
            check_least(name, getattr(self, name), 1)


@dataclass
class PredictionArguments(DataArguments):
    """Which data, also without labels, which are then predicted."""

    test_file: str | None = option("file for --do_predict; what is predicted is measured where it has labels")
    max_predict_samples: int | None = option("examples for prediction at most, the first ones")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset_name and self.test_file:
            raise ValueError("--dataset_name: give a data set or files, not both")
        check_least("max_predict_samples", self.max_predict_samples, 1)


def import_file(flag: str, name: str) -> None:
    """
    Raises:
        ValueError: for a file that is not there, or is not Python.
    """
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"{flag} {name}: no such Python file; check the path")
    sys.path.append(str(path.parent.resolve()))
    importlib.import_module(path.stem)


def check_least(name: str, value: int | None, least: int) -> None:
    """
    Raises:
        ValueError: for a flag with a smaller value.
    """
    if value is not None and value < least:
        raise ValueError(f"--{name} {value}: give a whole number from {least} on")


class HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """The description as it is, and the default of each flag."""


def parse(
    kinds: Sequence[type], description: str | None, arguments: Sequence[str] | None = None, **defaults: Any
) -> tuple[Any, ...]:
    """The dataclasses of a recipe from its command line, or from a .json file that is its only argument.

    Args:
        description: for --help.
        arguments: in place of the command line.
        defaults: in place of those of the dataclasses.

    Raises:
        ValueError: for values that do not fit.
    """
    parser = HfArgumentParser(kinds, description=description, formatter_class=HelpFormatter)
    parser.set_defaults(**defaults)
    words = sys.argv[1:] if arguments is None else [str(word) for word in arguments]
    if len(words) == 1 and words[0].endswith(".json"):
        try:
            flags = json.loads(Path(words[0]).read_text("utf-8"))
        except OSError as error:
            raise ValueError(f"{words[0]}: cannot be read ({error.strerror}); check the path") from error
        except ValueError as error:
            raise ValueError(f'{words[0]}: not JSON ({error}); write {{"output_dir": …, …}}') from error
        if not isinstance(flags, dict):
            raise ValueError(f'{words[0]}: a {type(flags).__name__}, not an object; write {{"output_dir": …, …}}')
        return tuple(parser.parse_dict({**defaults, **flags}))
    return tuple(parser.parse_args_into_dataclasses(words))


def launch(
    recipe: Callable[..., dict[str, Any]],
    kinds: Sequence[type],
    description: str | None,
    arguments: Sequence[str] | None = None,
    **defaults: Any,
) -> dict[str, Any]:
    """What a recipe returns for its command line, read by `parse`; errors end the program, without a traceback.

    Args:
        recipe: called with one object of each of the kinds.
    """
    try:
        return recipe(*parse(kinds, description, arguments, **defaults))
    except ValueError as error:
        sys.exit(f"Error: {error}")
