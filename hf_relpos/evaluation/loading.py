"""Load models, tokenizers and poolings from a folder or Hub repository, with errors that name the remedy."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertPreTrainedModel,
    PreTrainedModel,
)
from transformers.utils import logging

from ..checkpoints.errors import abbreviate
from ..checkpoints.files import check_config, check_local, read_json
from ..checkpoints.hub import find_folder
from ..models.checks import without_kernels
from ..models.loading import check_encoder
from ..models.patch import patch_transformers
from .encoder import POOLINGS, Encoder, check_pooling


# Suffixes of class names in `config.architectures` whose head predicts masked tokens.
MASKED_HEADS = ("ForMaskedLM", "ForPreTraining")
POOLING = Path("1_Pooling", "config.json")  # in a repository of sentence-transformers


@contextmanager
def loading_errors(name: str | Path) -> Iterator[None]:
    """Context for `from_pretrained(name, trust_remote_code=False)`, whose errors name the remedy.

    Without that argument Transformers would ask in the terminal.

    Raises:
        ValueError: for an unknown model, broken files, and a checkpoint that cannot be loaded without its code.
    """
    try:
        yield
    except OSError as error:
        reason = shorten(str(error), 160, placeholder=" …")
        missing = f"{name}: no such folder, and no model of this name could be loaded from the Hub ({reason})"
        raise ValueError(f"{missing}. Give a saved folder, or check the spelling and the connection") from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        remedy = "load it with trust_remote_code=True, and call hf_relpos.evaluation.fidelity or training.distil on it"
        raise ValueError(f"{name}: its own code is not run here; if you trust it, {remedy}") from error
    except Exception as error:  # broken files and fields raise errors of any type
        reason = shorten(f"{type(error).__name__}: {error}", 160, placeholder=" …")
        remedy = "install what it lacks, or restore config.json and the weights"
        raise ValueError(f"{name}: cannot be loaded ({reason}); {remedy}") from error


def load_model(name: str | Path) -> PreTrainedModel:
    """Load a checkpoint of Transformers or hf_relpos in eval mode and float32, with the positions of its config.json.

    It has its masked-token head, if config.json names a class with one, and no other head.

    Args:
        name: local folder or Hub repository.

    Raises:
        ValueError: for an unknown model, and weights that are incomplete or not finite.
    """
    check_folder(name)
    with loading_errors(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    given: dict[str, Any] = {"dtype": torch.float32}
    if not without_kernels({"_attn_implementation": config._attn_implementation}, name):
        config._attn_implementation = None
        given["config"] = config
    heads = getattr(config, "architectures", None) or []
    auto: Any = AutoModelForMaskedLM if any(head.endswith(MASKED_HEADS) for head in heads) else AutoModel
    model, missing = load_quietly(auto, name, **given)
    if missing and auto is AutoModelForMaskedLM:  # such as ELECTRA's …ForPreTraining, which has another head
        model, missing = load_quietly(AutoModel, name, **given)
    refuse_missing(name, missing)
    bad = [key for key, tensor in model.named_parameters() if not tensor.isfinite().all()]
    if bad:
        raise ValueError(f"{name}: {bad[0]} holds NaN or infinite values; use an earlier checkpoint")
    return model.eval()


def check_folder(name: str | Path) -> None:
    """Check the files of a local checkpoint; does nothing for a Hub repository.

    Raises:
        ValueError: for a config.json or weights that are broken or missing; names the file.
    """
    if Path(name).is_dir():
        check_config(name)
        check_local(name, {})


def refuse_missing(name: str | Path, missing: Collection[str]) -> None:
    """
    Raises:
        ValueError: if there are missing weights.
    """
    if missing:
        lacking = f"the weights lack {abbreviate(sorted(missing), 3)}"
        raise ValueError(f"{name}: {lacking}, which would be random; restore the file, or config.json")


def load_quietly(
    auto: Any, name: str | Path, new_head: bool = False, **arguments: Any
) -> tuple[PreTrainedModel, set[str]]:
    """Load a model without a load report; also returns the names of missing weights, except the unused pooler's.

    Args:
        auto: class with `from_pretrained`, which gets the other arguments.
        new_head: a head whose shapes differ from the file's is initialised and counts as missing.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # no load report, since heads are omitted on purpose
    try:
        with loading_errors(name), patch_transformers():
            model, info = auto.from_pretrained(
                name, output_loading_info=True, trust_remote_code=False, ignore_mismatched_sizes=True, **arguments
            )
    finally:
        logging.set_verbosity(verbosity)
    resized = {key for key, *_ in info["mismatched_keys"] if new_head and not key.startswith(model.base_model_prefix)}
    for key, found, expected in sorted(each for each in info["mismatched_keys"] if each[0] not in resized):
        raise ValueError(f"{name}: {key} has shape {tuple(found)}, but config.json has {tuple(expected)}; correct it")
    if isinstance(model, BertPreTrainedModel):
        check_encoder(model, info, name, arguments)
    return model, {key for key in info["missing_keys"] if "pooler." not in key} | resized


def load_tokenizer(name: str | Path, vocab_size: int | None = None, **arguments: Any) -> Any:
    """Load the tokenizer of a checkpoint.

    Args:
        vocab_size: vocabulary size of its model; None for any.
        arguments: passed on to `AutoTokenizer.from_pretrained`.

    Raises:
        ValueError: if there is none, or if it has more tokens.
    """
    try:
        with loading_errors(name):
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **arguments)
        # for a folder without tokenizer files, Transformers v5 returns an empty tokenizer without an error
        if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
            raise ValueError("it knows no tokens but special ones")
    except ValueError as error:
        reason = shorten(str(error), 400, placeholder=" …")
        raise ValueError(f"{name}: no tokenizer could be loaded ({reason}); save one there") from error
    if vocab_size is not None and len(tokenizer) > vocab_size:
        sizes = f"the tokenizer has {len(tokenizer)} tokens, but the model has vocab_size = {vocab_size}"
        raise ValueError(f"{name}: {sizes}; give the tokenizer that the model was trained with")
    return tokenizer


def pooling_of(name: str | Path) -> str | None:
    """The pooling of a sentence-transformers repository; None for a repository without one.

    Raises:
        ValueError: for a pooling that is neither `mean` nor `cls`.
    """
    try:
        path = find_folder(name, [POOLING.name], POOLING.parent.name) / POOLING.name
    except (OSError, ValueError):  # missing, or no connection: loading the model reports that
        return None
    if not path.is_file():
        return None
    config = read_json(path)
    flags = [key.removeprefix("pooling_mode_") for key, on in config.items() if on is True and "_mode_" in key]
    given = config.get("pooling_mode", flags)  # flags before sentence-transformers 5.4
    modes = given if isinstance(given, list) else [given]
    modes = [str(mode).removesuffix("_tokens").removesuffix("_token") for mode in modes]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        found = " and ".join(modes) or "missing"
        raise ValueError(f"{path}: pooling = {found}; only mean and cls are supported; choose one with --pooling")
    return modes[0]


def load_encoder(name: str | Path, tokenizer: str | Path | None = None, pooling: str | None = None) -> Encoder:
    """Load model, tokenizer and pooling.

    Args:
        name: local folder or Hub repository.
        tokenizer: folder or Hub repository of the tokenizer; None for the model's.
        pooling: `mean` or `cls`; None for that of the repository, or `mean` if it has none.

    Raises:
        ValueError: for an unknown pooling, as `load_model` and `load_tokenizer`, and for a tokenizer with more tokens
            than the model's vocabulary.
    """
    name, tokenizer = os.path.expanduser(name), tokenizer and os.path.expanduser(tokenizer)
    pooling = pooling or pooling_of(name) or "mean"
    check_pooling(pooling)
    model = load_model(name)
    return Encoder(model, load_tokenizer(tokenizer or name, model.config.vocab_size), pooling)
