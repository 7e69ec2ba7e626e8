"""The models of the page: packaged ones by name, others from a folder or the Hub."""

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
from ..evaluation.inspection import has_mlm_head, set_attention_window
from ..evaluation.loading import load_quietly
from ..models.modeling_relpos_bert import RelPosBertForMaskedLM, RelPosBertModel
from ..schemes.registry import PLAIN_SCHEME


PACKAGED = "demo-bert"
CONVERTED = "demo-bert-relative"
# Few enough for a conversion in about ten seconds, since the page waits for it.
STEPS = 60
# Models kept in memory: the two shown and the two before them.
MODELS_KEPT = 4


@cache
def converted_folder() -> Path:
    """Folder of the packaged BERT with relative positions.

    The model is converted on first use, and the folder is removed when the interpreter exits.
    """
    parent = Path(tempfile.mkdtemp(prefix="hf-relpos-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "only .* tokens of text", UserWarning)  # enough for this small model
        convert(
            CHECKPOINT,
            parent / CONVERTED,
            position_embedding_type=PLAIN_SCHEME,
            method="distil",
            method_options={"steps": STEPS},
            texts=read_text("train"),
        )
    return parent / CONVERTED


@lru_cache(maxsize=MODELS_KEPT)
def load(name: str, window: int = 0) -> Encoder:
    """Load a model and its tokenizer on the CPU. A stock BERT becomes a model of this package with the same outputs.

    Args:
        name: `demo-bert`, `demo-bert-relative`, a folder, or a Hub repository, whose code is never run.
        window: its `attention_window`; 0 for its own.

    Raises:
        ValueError: for an unknown model, one without a tokenizer, and a window for a model of another package.
    """
    name = name.strip()
    if not name:
        raise ValueError(f"no model is named; give a folder, a Hub repository, {PACKAGED!r} or {CONVERTED!r}")
    folder: str | Path = name
    if name in (PACKAGED, CONVERTED):
        folder = CHECKPOINT if name == PACKAGED else converted_folder()
    encoder = load_encoder(folder)
    if encoder.model.config.model_type == "bert":
        head = RelPosBertForMaskedLM if has_mlm_head(encoder.model) else RelPosBertModel
        model, _ = load_quietly(head, folder, dtype=torch.float32)
        encoder = dataclasses.replace(encoder, model=model.eval())
    if window:
        set_attention_window(encoder.model, window)
    return encoder
