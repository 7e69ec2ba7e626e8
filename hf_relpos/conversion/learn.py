"""The method that learns from text, `distil`: windows of text, the training, and the measurement."""

import math
import time
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console

from ..attention.dispatch import AUTO
from ..checkpoints.errors import ConversionError
from ..console import ProgressCallback, progress_bar, spinner
from ..data.batching import pad_rows
from ..data.windows import Windows
from ..evaluation.inspection import has_mlm_head
from ..evaluation.loading import load_tokenizer
from ..families.names import is_scheme
from ..live.optimize import optimize
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from ..products.cpu_gemm import linear_library, multiplies_bfloat16
from .build import build_teacher, fold
from .held_out import held_out_fidelity, held_out_rows, processor_name, speed
from .plan import Conversion
from .texts import SHORT_STEPS, learning_windows, shared_first_token


# Learning rates, by the sentence cosine of all-MiniLM-L6-v2 with `harmonic` on held-out passages, 400 steps of 512
# tokens, at 16 and 512 tokens. When all was trained: .993 and .982 with (1e-4, 3e-3), .988 and .974 with (3e-4, 3e-3),
# .985 and .976 with (3e-4, 1e-2). On today's passages .994 and .977 with (1e-4, 3e-3); without feed-forward matrices
# .994 and .973 with it, .994 and .977 with (2e-4, 3e-3). Many small steps are better than few large ones. Adam's rate
# is in inverse proportion to the width (Yang et al. 2022, arXiv 2203.03466): with the demo's BERT of width 128 and 100
# steps the sentence cosine at 128 tokens is .974 with 1e-4, .996 with 5e-4; an MPNet of width 768 was close with 1e-4.
LEARNING_RATE, WIDTH, TABLE_LEARNING_RATE = 2e-4, 384, 3e-3

# Windows over which the increase of [CLS]'s logit is averaged.
COUNTED_WINDOWS = 32


def learn(model: RelPosBertPreTrainedModel, conversion: Conversion) -> dict[str, str]:
    """Distil the source into the model (`hf_relpos.training.distillation`), and measure the agreement and the speed.

    The model starts from the positions added to the embeddings, and tables of zeros.

    Returns:
        The tensors that have changed, with a note on each.

    Raises:
        ValueError: for a decoder, too little text, and unsuitable options.
    """
    _check_options(model, conversion)
    tokenizer = load_tokenizer(conversion.spec.folder, model.config.vocab_size, local_files_only=True)
    with spinner("reading the text", conversion.progress):
        windows, held_out = learning_windows(conversion, tokenizer, model), held_out_rows(conversion, tokenizer)
    conversion.try_writing()
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dtype = model.dtype
    student, teacher = model.float(), build_teacher(conversion).float()
    console = Console(stderr=True, quiet=not conversion.progress)
    began = time.process_time()
    for each in (student, teacher):
        each.set_attn_implementation(AUTO)  # returns attention weights only where they are compared
    # bfloat16 is faster where the processor multiplies it, and the result is as close to the source; targets are exact
    is_fast = conversion.device.type == "cpu" and multiplies_bfloat16() and linear_library().allowed
    fast = "bfloat16" if is_fast else "float32"
    conversion.details["computed"] = {"student": fast, "teacher": "float32", "on": processor_name(conversion.device)}
    with progress_bar(console, not console.quiet) as progress:
        # unpad=False: the hidden states of padding are needed
        with optimize(student, fast, unpad=False), optimize(teacher, "float32", unpad=False):
            conversion.details["distillation"] = _distil(student, teacher, windows, conversion, console, progress)
        trained = time.process_time()
        with optimize(student, "float32", unpad=False), optimize(teacher, "float32", unpad=False):
            found = held_out_fidelity(student, teacher, tokenizer, held_out, conversion, progress)
            conversion.details["fidelity"] = found
    conversion.details["cpu_seconds"] = {"distillation": trained - began, "check": time.process_time() - trained}
    conversion.details["speed"] = speed(student, teacher)
    model.to("cpu", dtype)  # type: ignore[arg-type]  # Transformers' decorator hides self
    return {
        name: "trained" if is_scheme(name) else "trained to reproduce the source's outputs on text"
        for name, tensor in model.state_dict().items()
        if not torch.equal(tensor, original[name])
    }


def _check_options(model: RelPosBertPreTrainedModel, conversion: Conversion) -> None:
    options, limit = conversion.options, conversion.limit
    if model.config.is_decoder:
        raise ConversionError("is_decoder = True: 'distil' supports encoders only; choose method = 'keep' or 'drop'")
    length, tokens = options.length, conversion.tokens_to_distil
    if length is not None and length > limit and 2 * length > tokens:
        raise ConversionError(f"method_options['length'] = {length} is too long for {tokens} tokens; give more steps")


def _distil(
    student: RelPosBertPreTrainedModel,
    teacher: RelPosBertPreTrainedModel,
    windows: Windows,
    conversion: Conversion,
    console: Console,
    progress: ProgressCallback,
) -> dict[str, Any]:
    """Train the student in place; returns the report of the training."""
    from ..training import distil  # imports the Trainer
    from ..training.losses import DEFAULT_LOSSES

    options, limit = conversion.options, conversion.limit
    if conversion.source_config.has_absolute_table:
        _fold(student, teacher, windows, conversion)
    for model in (student, teacher):
        model.to(conversion.device)  # type: ignore[arg-type]  # Transformers' decorator hides self
    pairs = zip(windows.ids, windows.token_types, strict=True)
    rows = [{"input_ids": ids, "token_type_ids": types} for ids, types in pairs]
    losses = dict(DEFAULT_LOSSES)
    if has_mlm_head(student):
        losses["logits"] = 1.0
    steps = options.steps
    if (options.length or 0) > limit:  # a step on rows past the source's limit after each `SHORT_STEPS` steps
        steps += math.ceil(steps / SHORT_STEPS)
    rate = LEARNING_RATE * WIDTH / student.config.hidden_size
    settings: dict[str, Any] = {"steps": steps, "batch_tokens": options.batch_tokens, "learning_rate": rate}
    settings |= {"table_learning_rate": TABLE_LEARNING_RATE, "losses": losses, "seed": conversion.seed}
    console.print(f"distilling: {settings['steps']} steps on {windows.tokens:,} tokens", highlight=False)
    on_cpu: dict[str, Any] = {"use_cpu": True} if conversion.device.type == "cpu" else {}
    _freeze(student, words="logits" not in losses)
    with torch.enable_grad():
        report = distil(student, teacher, rows, progress=progress, **settings, **on_cpu)
    return {**asdict(report), "settings": settings}


def _freeze(student: RelPosBertPreTrainedModel, words: bool) -> None:
    """Leave the matrices of feed-forward layers, and with `words` the word embeddings, out of the training.

    They are five sixths of the parameters of all-MiniLM-L6-v2, and training them brings it no closer to the source.
    """
    base: Any = student.base_model
    matrices = [part.dense.weight for layer in base.encoder.layer for part in (layer.intermediate, layer.output)]
    for matrix in [*matrices, *([base.embeddings.word_embeddings.weight] if words else [])]:
        matrix.requires_grad_(False)


@torch.no_grad()
def _fold(
    student: RelPosBertPreTrainedModel, teacher: RelPosBertPreTrainedModel, windows: Windows, conversion: Conversion
) -> None:
    """Add the mean of the source's positions in these windows to the embeddings, and [CLS]'s to its own.

    With position vector 0 in its embedding, [CLS] would be predicted everywhere by an output layer that is tied to the
    word embeddings. So the mean increase of its logit over the text is subtracted from its bias.
    """
    table, limit = conversion.source_table.float(), conversion.limit
    counts = torch.zeros(len(table), dtype=torch.float64)
    for ids in windows.ids:
        counts[: len(ids)] += len(ids) / min(len(ids), limit)  # a long row counts once per window
    first_token = shared_first_token(windows.ids)
    embeddings: Any = student.get_input_embeddings()
    words = embeddings.weight
    before = None if first_token is None else words[first_token].clone()
    fold(student, table, counts, first_token)
    predictions = getattr(getattr(teacher, "cls", None), "predictions", None)
    decoder = getattr(getattr(getattr(student, "cls", None), "predictions", None), "decoder", None)
    if before is None or predictions is None or decoder is None or decoder.weight is not words:
        return
    inputs, mask = pad_rows([row for row in windows.ids if len(row) <= limit][:COUNTED_WINDOWS], 0)
    hidden = teacher.base_model(input_ids=inputs, attention_mask=mask.long()).last_hidden_state[mask.bool()]
    decoder.bias[first_token] -= (predictions.transform(hidden) @ (words[first_token] - before)).mean()
