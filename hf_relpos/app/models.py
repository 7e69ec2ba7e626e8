"""The models of the page: those of the package by name, others from a folder or the Hub."""

import atexit
import dataclasses
import shutil
import tempfile
import warnings
from functools import cache, lru_cache
from pathlib import Path

import torch

from ..conversion import convert
from ..demo import CHECKPOINT, read_text
from ..evaluation import Encoder, load_encoder
from ..evaluation.inspection import has_mlm_head
from ..evaluation.loading import load_quietly
from ..models.modeling_relpos_bert import RelPosBertForMaskedLM, RelPosBertModel
from ..schemes.registry import PLAIN_SCHEME


PACKAGED = "demo-bert"
CONVERTED = "demo-bert-relative"
# A conversion in some ten seconds, for whoever waits for a page.
CALIBRATION_TOKENS = 6_000
# Models in memory: the two that are shown, and two to go back to.
MODELS_KEPT = 4


@cache
def converted_folder() -> Path:
    """The packaged BERT made relative, converted on first use; the folder is removed when the interpreter ends."""
    parent = Path(tempfile.mkdtemp(prefix="hf-relpos-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "only .* tokens of text", UserWarning)  # this model needs no more
        convert(
            CHECKPOINT,
            parent / CONVERTED,
            position_embedding_type=PLAIN_SCHEME,
            method="calibrate",
            method_options={"tokens": CALIBRATION_TOKENS},
            texts=read_text("train"),
        )
    return parent / CONVERTED


@lru_cache(maxsize=MODELS_KEPT)
def load(name: str) -> Encoder:
    """Model and tokenizer, on the CPU. A stock BERT is loaded as this package's, whose outputs are the same.

    Args:
        name: `demo-bert`, `demo-bert-relative`, a folder, or a Hub repository. Its code is never run.

    Raises:
        ValueError: for no such model, or one without a tokenizer.
    """
    name = name.strip()
    if not name:
        raise ValueError(f"no model is named; give a folder, a Hub repository, {PACKAGED!r} or {CONVERTED!r}")
    folder: str | Path = name
    if name in (PACKAGED, CONVERTED):
        folder = CHECKPOINT if name == PACKAGED else converted_folder()
    encoder = load_encoder(folder)
    if encoder.model.config.model_type != "bert":
        return encoder
    head = RelPosBertForMaskedLM if has_mlm_head(encoder.model) else RelPosBertModel
    model, _ = load_quietly(head, folder, dtype=torch.float32)
    return dataclasses.replace(encoder, model=model.eval())
