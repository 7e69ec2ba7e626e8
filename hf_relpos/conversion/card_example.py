"""An example for the model card: code that uses the result, with what it prints."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from ..evaluation.loading import find_tokenizer, load_encoder
from ..models.checkpoint_files import read_json
from ..models.modeling_relpos_bert import RelPosBertForMaskedLM, RelPosBertPreTrainedModel
from .folder_layout import MODULES


MASKED = """\
from transformers import pipeline

fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
for guess in fill("{text}")[:3]:
    print(f"{{guess['score']:.2f}} {{guess['token_str']}}")"""
TEXT = "She opened the door and looked out of the {mask}."
SENTENCES = """\
vectors = model.encode(["A man is eating food.", "Someone is having a meal.", "The sky is blue."])
for other in vectors[1:]:
    print(f"{float(model.similarity(vectors[0], other)):.2f}")"""
STATES = """\
outputs = model(**tokenizer("She opened the door.", return_tensors="pt"))
print(tuple(outputs[0].shape))"""


# Modules whose vectors are those of `Encoder`, but for their length.
PLAIN = {"Transformer", "Pooling", "Normalize"}
# With another similarity or a prompt in it, what the class prints is not what is computed here.
SETTINGS = "config_sentence_transformers.json"


class _SentenceEncoder:
    """What `SENTENCES` calls of a SentenceTransformer, without the import, which takes seconds."""

    def __init__(self, folder: Path) -> None:
        self.encode = load_encoder(folder).encode

    @staticmethod
    def similarity(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.cosine_similarity(left, right, dim=-1)


@torch.no_grad()
def example(model: RelPosBertPreTrainedModel, folder: Path, encoder: Path, sentence_transformers: bool) -> str:
    """Code with its output as comments; empty where the result has no tokenizer, or cannot read the example.

    Args:
        model: the result, which is left on the CPU.
        folder: its folder.
        encoder: folder of the model in it.
        sentence_transformers: whether it loads as a SentenceTransformer.
    """
    if sentence_transformers:
        modules = json.loads((folder / MODULES).read_text("utf-8"))
        if not {module["type"].rpartition(".")[-1] for module in modules} <= PLAIN:
            return ""
        settings = read_json(path) if (path := folder / SETTINGS).is_file() else {}
        if settings.get("similarity_fn_name") not in (None, "cosine") or settings.get("default_prompt_name"):
            return ""
    tokenizer, reason = find_tokenizer(encoder, local_files_only=True)
    if reason or len(tokenizer) > model.config.vocab_size:
        return ""
    mask, code = tokenizer.mask_token, STATES
    if sentence_transformers:
        code = SENTENCES
    elif isinstance(model, RelPosBertForMaskedLM) and mask and not _unknown(tokenizer, TEXT.format(mask=mask)):
        code = MASKED.format(text=TEXT.format(mask=mask))
    printed = StringIO()
    try:
        names: dict[str, Any] = {"model": model, "tokenizer": tokenizer}
        if sentence_transformers:
            names["model"] = _SentenceEncoder(folder)
        with redirect_stdout(printed):
            exec(code, names)
    except (ValueError, RuntimeError, IndexError, KeyError, TypeError):
        return ""  # such as a head that reads something else: no reason to fail a conversion
    finally:
        model.to("cpu")
    return "\n".join([code, *(f"# {line}" for line in printed.getvalue().splitlines())])


def _unknown(tokenizer: Any, text: str) -> bool:
    """Whether a text has tokens that the tokenizer does not know."""
    return tokenizer.unk_token_id in tokenizer(text).input_ids
