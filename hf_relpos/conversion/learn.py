"""The method that learns from text, `distil`: windows of text, the training, its resumption, and the measurement."""

import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from rich.console import Console

from ..attention.dispatch import AUTO
from ..attention.products import multiplies_bfloat16
from ..console import ProgressCallback, progress_bar
from ..data.batching import pad_rows
from ..data.text import TextError
from ..data.windows import PairLayout, Windows, pair_windows
from ..evaluation.inspection import has_mlm_head
from ..evaluation.loading import find_tokenizer
from ..families.errors import ConversionError
from ..families.live.optimize import optimize
from ..families.names import is_scheme
from ..files import describe_write_error
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from ..processes import process_state
from .absolute_tables import fold
from .agreement import held_out_fidelity, speed
from .options import DistilOptions
from .run import ConversionRun
from .windows import (
    TOO_FEW,
    check_windows,
    distance_histogram,
    gather,
    mask_windows,
    shared_first_token,
    window_lengths,
)


# Learning rates, by the sentence cosine of all-MiniLM-L6-v2 with `harmonic` on held-out passages. From tables of
# zeros, 400 steps of 512 tokens, at 16 and 512 tokens: .993 and .982 with (1e-4, 3e-3), .988 and .974 with (3e-4,
# 3e-3), .985 and .976 with (3e-4, 1e-2). Many small steps are better than few large ones. Adam's rate is in inverse
# proportion to the width (Yang et al. 2022, arXiv 2203.03466) below that model's: with the demo's BERT of width 128
# and 100 steps the sentence cosine at 128 tokens is .974 with 1e-4, .996 with 5e-4. An MPNet of width 768 was as close
# with 1e-4 as that model.
LEARNING_RATE, WIDTH, TABLE_LEARNING_RATE = 1e-4, 384, 3e-3

# Share of the windows that are segment pairs, also for a sentence encoder, which may be fine-tuned on pairs. For
# all-MiniLM-L6-v2, 400 steps, the sentence cosine of single texts at 512 tokens is .977 without pairs, .978 with a
# quarter of them and .977 with half. Fine-tuned on pairs of STS-B, half is 3.2 ± .3 points above the source, a quarter
# .3 ± 2.5; without pairs, F1 on questions of SQuAD was 17 points below it.
PAIRS = 0.5

# Steps on short rows per step on rows past the source's limit, which are expensive and come in addition: on two thirds
# of the steps, the sentence cosine of short rows was lower by up to .006; now by .003. With 1 instead of 2,
# all-MiniLM-L6-v2 was no better on long rows.
SHORT_STEPS = 2

# Windows over which the increase of [CLS]'s logit is averaged.
COUNTED_WINDOWS = 32


def learn(model: RelPosBertPreTrainedModel, run: ConversionRun) -> dict[str, str]:
    """Distil the source into the model: see `hf_relpos.training.distillation`.

    The model starts from the positions added to the embeddings, and tables of zeros. An interrupted run left its
    checkpoints beside the folder to write, and the same conversion goes on from the last one.

    Raises:
        ConversionError: for a decoder, too little text, unsuitable options, and a folder that cannot be written.
    """
    state = process_state()
    try:
        _check_options(model, run)
        return _learn(model, run, quiet=not (run.progress and state.is_main_process))
    except TextError as error:
        raise ConversionError(f"texts: {error}") from error


@contextmanager
def resumable(folder: Path | None) -> Iterator[None]:
    """Context of a conversion with checkpoints in a folder, from learning to the finished result.

    No other process converts there at the same time, and the checkpoints are removed in the end, unless there is an
    exception.

    Args:
        folder: of the checkpoints; None in all processes but the main one, and for methods that do not learn.

    Raises:
        ConversionError: if another process uses the folder, or it cannot be written.
    """
    if folder is None:
        yield
        return
    lock = FileLock(folder.with_name(f"{folder.name}.lock"), blocking=False, is_singleton=True)
    try:
        lock.acquire()
    except Timeout as error:
        raise ConversionError(
            f"{folder}: another process is converting into the same folder; wait for it, or choose another folder"
        ) from error
    except OSError as error:
        raise ConversionError(describe_write_error(error, folder)) from error
    try:
        yield
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        with suppress(OSError):  # before the release, after which it may be that of another process
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def _learn(model: RelPosBertPreTrainedModel, run: ConversionRun, quiet: bool) -> dict[str, str]:
    tokenizer = load_tokenizer(run.tokenizer_folder, model.config.vocab_size)
    if run.options.window is not None:
        model.config.attention_window = run.options.window
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dtype = model.dtype
    student, teacher = model.float(), run.build_teacher().float()
    console = Console(stderr=True, quiet=quiet)
    marks = {"": time.process_time()}
    for each in (student, teacher):
        each.set_attn_implementation(AUTO)  # returns attention weights only where they are compared
    bfloat16 = run.device.type == "cpu" and multiplies_bfloat16()  # faster, and the result is as close to the source
    with progress_bar(console, not console.quiet, first="reading the text") as progress:
        with _optimized(student, teacher, "bfloat16" if bfloat16 else "float32"):
            run.details["distillation"] = _distil(student, teacher, tokenizer, run, console, progress)
        marks["distillation"] = time.process_time()
        with _optimized(student, teacher, "float32"):
            run.details["fidelity"] = held_out_fidelity(student, teacher, tokenizer, run, progress)
        marks["check"] = time.process_time()
    run.details["speed"] = speed(student, teacher)
    spent = pairwise(marks.items())
    run.details["cpu_seconds"] = {what: end - start for (_, start), (what, end) in spent}
    model.to("cpu", dtype)
    return {
        name: "fitted" if is_scheme(name) else "fitted to the source's outputs on text"
        for name, tensor in model.state_dict().items()
        if not torch.equal(tensor, original[name])
    }


@contextmanager
def _optimized(student: torch.nn.Module, teacher: torch.nn.Module, precision: str) -> Iterator[None]:
    """Context with fast products of both models. Padding stays, since hidden states are compared."""
    with optimize(student, precision, unpad=False), optimize(teacher, precision, unpad=False):
        yield


def _check_options(model: RelPosBertPreTrainedModel, run: ConversionRun) -> None:
    options: DistilOptions = run.options
    limit = run.source_config.max_position_embeddings
    if model.config.is_decoder:
        raise ConversionError("is_decoder = True: only encoders learn from text; choose method = 'keep' or 'drop'")
    if options.distil_tokens is not None and options.distil_tokens < TOO_FEW:
        raise ConversionError(
            f"method_options['distil_tokens'] = {options.distil_tokens}: too few to learn anything; ask for at least "
            f"{TOO_FEW}, or leave it out"
        )
    length, window = options.length, options.window
    fitted = max(window_lengths(limit))
    if length is not None and length < limit and length <= fitted:
        raise ConversionError(
            f"method_options['length'] = {length}: rows of up to {fitted} tokens are learnt from in any case, and so "
            f"it would change nothing; leave it out, or give more than {limit}, which is what the source reads"
        )
    longest = max(fitted, length or 0)
    if window is not None and window >= longest - 1:
        raise ConversionError(
            f"method_options['window'] = {window}: in the rows to learn from, of at most {longest} tokens, none is "
            f"so far from another, so it would change nothing there; give less than {longest - 1}, or longer rows "
            "with 'length', or leave it out and set attention_window when you load the result"
        )
    tokens = options.tokens_to_distil
    if length is not None and length > limit and 2 * length > tokens:
        raise ConversionError(
            f"method_options['length'] = {length}: half of {tokens} tokens is less than one such row; ask for more "
            "steps, or for a shorter length"
        )


def _layout_and_share(tokenizer: Any, run: ConversionRun) -> tuple[PairLayout | None, float]:
    """The layout of segment pairs, None if there are none, and their share of the windows.

    Raises:
        ConversionError: if a share is given for a source without segment pairs.
    """
    share = run.options.pairs
    if share == 0:
        return None, 0.0
    layout = PairLayout.of(tokenizer) if run.tells_segments_apart else None
    if layout is None and share is not None:
        raise ConversionError(
            f"method_options['pairs'] = {share}: the source does not tell the segments of a pair apart by token "
            "types, or its tokenizer gives none, so that there is nothing to learn; leave it out"
        )
    return layout, PAIRS if share is None else share


def _all_steps(run: ConversionRun) -> int:
    """Steps of the training: `steps`, and one on rows past the source's limit after each `SHORT_STEPS` of them."""
    steps: int = run.options.steps
    is_long = (run.options.length or 0) > run.source_config.max_position_embeddings
    return steps + -(-steps // SHORT_STEPS) if is_long else steps


def _cut_windows(tokenizer: Any, run: ConversionRun) -> Windows:
    """The windows to learn from: rows past the source's limit are in addition to all others."""
    options, limit = run.options, run.source_config.max_position_embeddings
    lengths, length, batch = window_lengths(limit), options.length or limit, options.batch_tokens
    tokens = options.tokens_to_distil
    cut = partial(gather, tokenizer, run.texts, part="fit", field=run.field, passage=max(*lengths, length))
    if length <= limit:
        return cut(tokens=tokens, lengths=lengths, seed=run.seed + 1)
    short = cut(tokens=tokens, lengths=lengths, seed=run.seed + 1)
    long_steps = -(-short.tokens // (batch * SHORT_STEPS))
    rows = long_steps * max(1, batch // length)
    return short.joined(cut(tokens=rows * length, lengths=(length,), seed=run.seed + 4, short=0.0))


def _distil(
    student: RelPosBertPreTrainedModel,
    teacher: RelPosBertPreTrainedModel,
    tokenizer: Any,
    run: ConversionRun,
    console: Console,
    progress: ProgressCallback,
) -> dict[str, Any]:
    """Train the student in place and add `text` to the details; returns the report of the training."""
    from ..training import DistillationSettings, distil  # imports the Trainer
    from ..training.distillation_losses import DEFAULT_LOSSES

    options, limit, seed = run.options, run.source_config.max_position_embeddings, run.seed + 1
    windows = pair_windows(_cut_windows(tokenizer, run), *_layout_and_share(tokenizer, run), limit, seed)
    windows = mask_windows(windows, student, tokenizer, options.mask, seed)
    run.details["text"] = {
        "tokens": windows.tokens,
        "windows": len(windows.ids),
        "seen": distance_histogram(windows.ids),
        "unknown_share": round(windows.unknown_rate, 5),
        "pair_windows": sum(map(any, windows.types or ())),
        "notes": check_windows(windows, max(limit, options.length or 0)),
    }
    if run.source_config.has_absolute_table:
        _fold(student, teacher, windows, run.source_table.float(), limit)
    for model in (student, teacher):
        model.to(run.device)
    pairs = zip(windows.ids, windows.token_types, strict=True)
    rows = [{"input_ids": ids, "token_type_ids": types} for ids, types in pairs]
    losses = dict(DEFAULT_LOSSES)
    if has_mlm_head(student):
        losses["logits"] = 1.0
    settings = DistillationSettings(
        steps=_all_steps(run),
        batch_tokens=options.batch_tokens,
        learning_rate=LEARNING_RATE * max(1.0, WIDTH / student.config.hidden_size),
        table_learning_rate=TABLE_LEARNING_RATE,
        losses=losses,
        seed=run.seed,
        trainer_arguments={"use_cpu": True} if run.device.type == "cpu" else {},
    )
    console.print(
        f"distilling: {settings.steps} steps on {windows.tokens:,} tokens. Interrupted, the same command resumes",
        highlight=False,
    )
    train = partial(distil, student, teacher, rows, settings, progress=progress)
    with torch.enable_grad():
        if run.resume_folder is None:
            return train().to_dict()
        folder = _checkpoints(run.resume_folder, student, teacher, windows, settings)
        try:
            report = train(output_dir=folder, resume=True)
        except OSError as error:
            raise ConversionError(describe_write_error(error, folder)) from error
    return report.to_dict()


def _checkpoints(
    folder: Path,
    student: RelPosBertPreTrainedModel,
    teacher: RelPosBertPreTrainedModel,
    windows: Windows,
    settings: Any,
) -> Path:
    """The folder with the checkpoints of this training, by a digest of all its inputs; those of others are removed.

    All processes use the digest of the main one: on another processor folded weights can differ by rounding.
    """
    from ..training.distillation_checkpoints import model_fingerprint

    inputs: list[Any] = [windows.ids, windows.types, asdict(settings), *map(model_fingerprint, (student, teacher))]
    config = student.config
    inputs += [config.position_embedding_type, config.position_options, config.attention_window]
    [name] = broadcast_object_list([hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]])
    own, state = folder / name, process_state()
    if state.is_main_process and folder.is_dir():
        for other in folder.iterdir():
            if other != own and other.is_dir():
                shutil.rmtree(other, ignore_errors=True)
    state.wait_for_everyone()
    return own


@torch.no_grad()
def _fold(
    student: RelPosBertPreTrainedModel,
    teacher: RelPosBertPreTrainedModel,
    windows: Windows,
    table: torch.Tensor,
    limit: int,
) -> None:
    """Add the mean of the source's positions in these windows to the embeddings, and [CLS]'s to its own.

    An output layer that is tied to the word embeddings would predict [CLS] everywhere with position vector 0 in its
    embedding. The mean increase of its logit over the text is taken off its bias.
    """
    counts = torch.zeros(len(table), dtype=torch.float64)
    for ids in windows.ids:
        counts[: len(ids)] += len(ids) / min(len(ids), limit)  # a long row counts once per window
    first_token = shared_first_token(windows.ids)
    words = student.base_model.embeddings.word_embeddings.weight
    before = None if first_token is None else words[first_token].clone()
    fold(student, table, counts, first_token)
    predictions = getattr(getattr(teacher, "cls", None), "predictions", None)
    decoder = getattr(getattr(getattr(student, "cls", None), "predictions", None), "decoder", None)
    if before is None or predictions is None or decoder is None or decoder.weight is not words:
        return
    inputs, mask = pad_rows([row for row in windows.ids if len(row) <= limit][:COUNTED_WINDOWS], 0)
    hidden = teacher.base_model(input_ids=inputs, attention_mask=mask.long()).last_hidden_state[mask.bool()]
    decoder.bias[first_token] -= (predictions.transform(hidden) @ (words[first_token] - before)).mean()


def load_tokenizer(folder: Path, vocab_size: int) -> Any:
    """Load the tokenizer of the source.

    Args:
        folder: folder of the source.
        vocab_size: vocabulary size of the source.

    Raises:
        ConversionError: for a folder without a tokenizer, and a tokenizer with more tokens.
    """
    tokenizer, reason = find_tokenizer(folder, local_files_only=True)
    if reason:
        raise ConversionError(
            f"{folder}: its tokenizer cannot be loaded ({reason}), and the method needs its tokens; add its files to "
            "the folder (`tokenizer.save_pretrained`)"
        )
    if len(tokenizer) > vocab_size:
        raise ConversionError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, and vocab_size = {vocab_size}; add those of the "
            "tokenizer that the model was trained with"
        )
    return tokenizer
