"""Benchmark `optimize` on your own texts: seconds and outputs of a model before and after."""

import importlib.util
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

from ..checkpoints.files import read_json
from ..checkpoints.hub import find_folder
from ..data.text import TextError, read_texts
from ..live import optimize
from ..live.arguments import parameters_of
from ..live.find import takes_tokens
from .encoder import pool
from .loading import load_tokenizer, loading_errors


MOST_TEXTS, BATCH = 256, 32
LONGEST = 512  # tokens of a text, where the tokenizer has no limit


def measure_gain(
    name: str,
    sources: Sequence[str],
    field: str | Sequence[str] = "text",
    dtype: str = "float32",
    unpad: str = "pad_token",
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Measure the speed-up of `optimize` on the CPU; nothing is written.

    Args:
        name: folder or Hub repository, loaded as sentence-transformers' class that it is of, or else by AutoModel.
        sources: of texts, as of `read_texts`, by line. `MOST_TEXTS` of them are read.
        field: as of `read_texts`.
        dtype, unpad: as of `optimize`. "int8" and "auto" are measured on `BATCH` of the texts, from all of them.

    Returns:
        - model: name, and the class that it was loaded by.
        - report: of `optimize`: levels, what is taken out, what is left and why.
        - calls: level, tokens and reasons of each call, or why padding stayed.
        - texts: how many were computed, in batches of `BATCH`.
        - before, after: seconds of the wall for all texts.
        - cosine, least: of the outputs with those before, by text: mean and smallest.
        - difference: the largest, as a share of the largest value.

    Raises:
        ValueError: for an unknown model, one that takes no texts, and for text that cannot be read or has none.
    """
    texts = list(itertools.islice(read_texts(sources, field, by_line=True), MOST_TEXTS))
    if not texts:
        raise TextError(f"texts = {', '.join(sources)}: there is none; give a file with the texts that you compute")
    with loading_errors(name):
        model, inputs, outputs = _load(name, trust_remote_code)
    expected, before = _timed(outputs, texts)
    sample = None if dtype in ("float32", "bfloat16") else inputs(texts[:: -(-len(texts) // BATCH)])
    handle = optimize(model, dtype, unpad, sample=sample, verify="load")  # which times single calls
    calls = handle.explain(outputs, texts)
    found, after = _timed(outputs, texts)
    cosines = [float(torch.cosine_similarity(*pair, dim=0)) for pair in zip(found, expected, strict=True)]
    largest = max(float(each.abs().max()) for each in expected)
    return {
        "model": f"{name} ({type(model).__name__})",
        "report": str(handle),
        "calls": "\n".join(dict.fromkeys(map(str, calls))),
        "texts": len(texts),
        "before": before,
        "after": after,
        "cosine": sum(cosines) / len(cosines),
        "least": min(cosines),
        "difference": max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / largest,
    }


def describe_gain(gain: Mapping[str, Any]) -> str:
    """The result of `measure_gain` in lines."""
    before, after = gain["before"], gain["after"]
    return (
        f"{gain['model']}, {gain['texts']} texts in batches of {BATCH}\n{gain['report']}\n{gain['calls']}\n"
        f"{before:.2f} s before, {after:.2f} s now: {before / after:.2f}× faster\n"
        f"cosine of the outputs with those before: {gain['cosine']:.4f}, least {gain['least']:.4f}; largest "
        f"difference {gain['difference']:.0e} of the largest value"
    )


def _load(name: str, trust_remote_code: bool) -> tuple[Any, Callable[[list[str]], Any], Callable[[list[str]], Any]]:
    """The model as its folder says, and functions of texts: a sample for `optimize`, and the outputs by text."""
    kind = _kind(find_folder(name, ["*.json"])) if importlib.util.find_spec("sentence_transformers") else ""
    if kind:
        import sentence_transformers

        owner = getattr(sentence_transformers, kind)(name, device="cpu", trust_remote_code=trust_remote_code)
        settings = {"batch_size": BATCH, "show_progress_bar": False, "convert_to_tensor": True}
        if kind != "CrossEncoder":
            return owner, list, lambda texts: owner.encode(texts, **settings)

        def scores(texts: list[str]) -> torch.Tensor:  # of all texts for the first one, which are one output
            found: torch.Tensor = owner.predict([(texts[0], each) for each in texts], **settings)
            return found.flatten()[None]

        return owner, lambda texts: _tokenized(owner.tokenizer, [texts[0]] * len(texts), texts), scores
    model: PreTrainedModel = AutoModel.from_pretrained(name, trust_remote_code=trust_remote_code)
    model = model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else model
    if not takes_tokens(model, is_root=True):
        raise ValueError(f"{name}: {type(model).__name__} takes no tokens of text; give a text encoder or a reranker")
    tokenizer = load_tokenizer(name)
    names, _ = parameters_of(type(model).forward)
    options = {"use_cache": False} if "use_cache" in names else {}  # calls that return a cache keep their padding

    def inputs(texts: list[str]) -> dict[str, Any]:
        return {**_tokenized(tokenizer, texts), **options}

    @torch.inference_mode()
    def means(texts: list[str]) -> torch.Tensor:
        batches = [inputs(texts[begin : begin + BATCH]) for begin in range(0, len(texts), BATCH)]
        return torch.cat([pool(model(**batch)[0], batch["attention_mask"].bool()) for batch in batches])

    return model.eval(), inputs, means


def _tokenized(tokenizer: Any, *texts: list[str]) -> dict[str, torch.Tensor]:
    """Texts, or pairs of them, as a padded batch."""
    most = min(tokenizer.model_max_length, LONGEST)
    return dict(tokenizer(*texts, padding=True, truncation=True, max_length=most, return_tensors="pt"))


def _kind(folder: Path) -> str:
    """The class of sentence-transformers that a folder is of; empty for none of them."""
    paths = (folder / "config.json", folder / "config_sentence_transformers.json")
    config, sentences = (read_json(path) if path.is_file() else {} for path in paths)
    if (folder / "modules.json").is_file():
        found: str = sentences.get("model_type", "SentenceTransformer")
        return found
    scores = len(config.get("id2label", ())) == 1 and "SequenceClassification" in str(config.get("architectures"))
    return "CrossEncoder" if scores or "sentence_transformers" in config else ""


def _timed(outputs: Callable[[list[str]], Any], texts: list[str]) -> tuple[list[torch.Tensor], float]:
    """Outputs by text, in one dimension; and the seconds of all texts, after a first batch that is not timed."""
    outputs(texts[:BATCH])
    start = time.perf_counter()
    found = outputs(texts)
    seconds = time.perf_counter() - start
    return [torch.as_tensor(each).to_dense().double().flatten() for each in found], seconds
