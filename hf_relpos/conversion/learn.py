"""The methods that learn from text: `distil`, `calibrate`, and both, `calibrate+distil`.

This module prepares windows of text, runs calibration and distillation, resumes them, and measures the result. The
fits are in `hf_relpos.conversion.calibration`.
"""

import hashlib
import json
import time
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console

from ..attention.dispatch import AUTO
from ..console import progress_bar
from ..data.text import TextError
from ..data.windows import PairLayout, Windows, pair_windows
from ..evaluation.inspection import has_mlm_head
from ..evaluation.loading import find_tokenizer
from ..families.errors import ConversionError
from ..families.live.optimize import optimize
from ..families.names import is_scheme
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from ..processes import process_state, sum_over
from .agreement import held_out_fidelity
from .calibration.batches import make_batches
from .calibration.calibrate import Calibrator
from .calibration.embeddings import correct_first_token_bias, fold_positions
from .calibration.saved import Saved, one_process
from .calibration.settings import CalibrationError, CalibrationSettings, estimate_memory
from .calibration.windows import (
    TOO_FEW,
    check_windows,
    distance_histogram,
    gather,
    gather_all,
    mask_windows,
    random_windows,
    shared_first_token,
    window_lengths,
)
from .options import CalibrateOptions, DistilOptions
from .run import ConversionRun


# Learning rates, by the sentence cosine of all-MiniLM-L6-v2 with `harmonic` on held-out passages. From tables of
# zeros, 400 steps of 512 tokens, at 16 and 512 tokens: .993 and .982 with (1e-4, 3e-3), .988 and .974 with (3e-4,
# 3e-3), .985 and .976 with (3e-4, 1e-2). After a calibration on 20,000 tokens, 120 steps, mean of 16 to 512 tokens:
# .978 with (1e-4, 3e-3), .975 with (1e-4, 1e-2). Many small steps are better than few large ones.
LEARNING_RATE, TABLE_LEARNING_RATE = 1e-4, 3e-3

# Share of the windows that are segment pairs. For all-MiniLM-L6-v2, calibrated and trained for 120 steps, the token
# cosine in both segments is .960 and .936 without pairs, .980 and .977 with this share; the sentence cosine of single
# texts at 512 tokens is .9695 without and .9674 with pairs.
PAIRS = 0.5


# Number of random tokens if there is no text. More tokens did not help.
RANDOM_TOKENS = 30_000
# Steps on short rows per step on rows past the source's limit, which are expensive. With 1 instead of 2,
# all-MiniLM-L6-v2 was no better on long rows, and worse on sentence pairs.
SHORT_STEPS = 2


def learn(model: RelPosBertPreTrainedModel, run: ConversionRun) -> dict[str, str]:
    """Fit the model to its source, distil the source into it, or both, as the options of the method say.

    A fit is `hf_relpos.conversion.calibration.calibrate`. A distillation, `hf_relpos.training.distillation`, starts
    from it, or else from the positions added to the embeddings and tables of zeros.

    Raises:
        ConversionError: for a decoder, too little text, unsuitable options, and a folder that cannot be written.
    """
    state = process_state()
    try:
        _check_options(model, run)
        with one_process(run.resume_folder if state.is_main_process else None):
            return _fit(model, run, state)
    except CalibrationError as error:
        raise ConversionError(str(error)) from error
    except TextError as error:
        raise ConversionError(f"texts: {error}") from error


def _fit(model: RelPosBertPreTrainedModel, run: ConversionRun, state: PartialState) -> dict[str, str]:
    tokenizer = load_tokenizer(run.tokenizer_folder, model.config.vocab_size)
    if run.options.window is not None:
        model.config.attention_window = run.options.window
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dtype = model.dtype
    student, teacher = model.float(), run.build_teacher().float()
    for each in (student, teacher):
        each.set_attn_implementation("eager")
    console = Console(stderr=True, quiet=not (run.progress and state.is_main_process))
    marks = {"": time.process_time()}
    saved = None
    with optimize(student, unpad=False), optimize(teacher, unpad=False):
        if isinstance(run.options, CalibrateOptions):
            saved = _calibrate(student, teacher, tokenizer, run, state, console)
            marks["fit"] = time.process_time()
        if isinstance(run.options, DistilOptions):
            run.details["distillation"] = _distil(student, teacher, tokenizer, run, console)
            marks["distillation"] = time.process_time()
        with progress_bar(console, not console.quiet) as progress:
            run.details["fidelity"] = held_out_fidelity(student, teacher, tokenizer, run, progress)
        marks["check"] = time.process_time()
    spent = pairwise(marks.items())
    run.details["cpu_seconds"] = {what: end - start for (_, start), (what, end) in spent}
    model.to("cpu", dtype)
    if saved is not None:
        state.wait_for_everyone()
        saved.clear()
    return {
        name: "fitted" if is_scheme(name) else "fitted to the source's outputs on text"
        for name, tensor in model.state_dict().items()
        if not torch.equal(tensor, original[name])
    }


def _check_options(model: RelPosBertPreTrainedModel, run: ConversionRun) -> None:
    options, limit = run.options, run.source_config.max_position_embeddings
    if model.config.is_decoder:
        raise ConversionError("is_decoder = True: only encoders learn from text; choose method = 'keep' or 'drop'")
    tokens = options.tokens if isinstance(options, CalibrateOptions) else options.tokens_to_distil
    if isinstance(options, CalibrateOptions) and tokens < TOO_FEW:
        raise ConversionError(
            f"method_options['tokens'] = {tokens}: too few to fit anything; ask for at least {TOO_FEW}, better 12,000"
        )
    distil_tokens = options.distil_tokens if isinstance(options, DistilOptions) else None
    if distil_tokens is not None and distil_tokens < TOO_FEW:
        raise ConversionError(
            f"method_options['distil_tokens'] = {distil_tokens}: too few to learn anything; ask for at least "
            f"{TOO_FEW}, or leave it out"
        )
    length, window = options.length, options.window
    fitted = max(window_lengths(limit))
    if length is not None and length < limit and length <= fitted:
        raise ConversionError(
            f"method_options['length'] = {length}: rows of up to {fitted} tokens are fitted in any case, and so it "
            f"would change nothing; leave it out, or give more than {limit}, which is what the source reads"
        )
    longest = max(fitted, length or 0)
    if window is not None and window >= longest - 1:
        raise ConversionError(
            f"method_options['window'] = {window}: in the rows that are fitted, of at most {longest} tokens, none is "
            f"so far from another, so it would change nothing there; give less than {longest - 1}, or longer rows "
            "with 'length', or leave it out and set attention_window when you load the result"
        )
    if length is None or length <= limit:
        return
    if 2 * length > tokens:
        raise ConversionError(
            f"method_options['length'] = {length}: half of {tokens} tokens is less than one such row; ask for more "
            "tokens or steps, or for a shorter length"
        )
    if run.texts is None:
        raise ConversionError(
            f"method_options['length'] = {length}: longer than the {limit} tokens that the source reads, and "
            "random tokens say nothing of long texts; give texts, or leave it out"
        )


def _windows_to_fit(model: RelPosBertPreTrainedModel, tokenizer: Any, run: ConversionRun) -> tuple[Windows, list[str]]:
    """The windows of tokens to fit, and notes on the text for the report."""
    options, limit = run.options, run.source_config.max_position_embeddings
    length = options.length or limit
    layout, share = _layout_and_share(tokenizer, run)
    if run.texts is None:
        windows = random_windows(tokenizer, min(options.tokens, RANDOM_TOKENS), limit, run.seed)
        notes = ["no text was given: fitted to random tokens. With some text of its kind the result would be closer"]
    else:
        windows = gather_all(
            tokenizer,
            run.texts,
            options.tokens,
            window_lengths(limit),
            length,
            run.field,
            run.seed,
        )
        notes = check_windows(windows, max(limit, length))
    windows = pair_windows(windows, layout, share, limit, run.seed)
    return mask_windows(windows, model, tokenizer, options.mask, run.seed), notes


def _layout_and_share(tokenizer: Any, run: ConversionRun) -> tuple[PairLayout | None, float]:
    """The layout of segment pairs, None if there are none, and their share of the windows.

    Raises:
        ConversionError: if a share is given for a source without segment pairs.
    """
    share = run.options.pairs
    if share == 0 or (share is None and run.is_sentence_encoder):
        return None, 0.0
    layout = PairLayout.of(tokenizer) if run.tells_segments_apart else None
    if layout is None and share is not None:
        raise ConversionError(
            f"method_options['pairs'] = {share}: the source does not tell the segments of a pair apart by token "
            "types, or its tokenizer gives none, so that there is nothing to fit; leave it out"
        )
    return layout, PAIRS if share is None else share


def _calibrate(
    student: RelPosBertPreTrainedModel,
    teacher: RelPosBertPreTrainedModel,
    tokenizer: Any,
    run: ConversionRun,
    state: PartialState,
    console: Console,
) -> Saved | None:
    """Fit the student in place and add to the details; returns the layers saved on disk, to be removed at the end."""
    started, cpu = time.perf_counter(), time.process_time()
    options, limit = run.options, run.source_config.max_position_embeddings
    windows, notes = _windows_to_fit(student, tokenizer, run)
    run.details["text"] = _about(windows, notes)
    first_token = shared_first_token(windows.ids)
    words = student.base_model.embeddings.word_embeddings.weight
    first_vector = None if first_token is None else words[first_token].clone()
    _fold(student, windows, run)

    output = options.output or ("bias" if run.texts is None else "ridge")
    settings = CalibrationSettings(ridge=options.ridge, smooth=options.smooth, output=output, seed=run.seed)
    batches = make_batches(
        windows.ids,
        student.config.pad_token_id or 0,
        settings.batch_tokens,
        settings.holdout,
        state.process_index,
        state.num_processes,
        limit,
        windows.types,
    )
    memory = estimate_memory(list(map(len, windows.ids)), settings, student.config, limit, state.num_processes)
    saved = None
    if run.resume_folder is not None:
        digest = fingerprint(run, windows, settings, student)
        saved = Saved(run.resume_folder, digest, writes=state.is_main_process)
        state.wait_for_everyone()
    console.print(
        f"calibrating on {windows.tokens:,} tokens in {len(windows.ids):,} windows; about {memory / 2**20:,.0f} MB of "
        "memory besides the models. Interrupted, the same command resumes",
        highlight=False,
    )
    for model in (student, teacher):
        model.to(run.device)
    with progress_bar(console, not console.quiet) as progress:
        calibrator = Calibrator(teacher, student, batches, settings, sum_over(state), progress)
        report = calibrator.run(saved)
    if first_token is not None and first_vector is not None:
        correct_first_token_bias(student, first_token, first_vector, calibrator.batches, calibrator.reduce)
    run.details["calibration"] = {
        **report.to_dict(),
        "memory_bytes": memory,
        "device": run.device.type,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu,
    }
    return saved


def _about(windows: Windows, notes: list[str]) -> dict[str, Any]:
    """What the report says of the text that a model has learnt from."""
    return {
        "tokens": windows.tokens,
        "windows": len(windows.ids),
        "seen": distance_histogram(windows.ids),
        "unknown_share": round(windows.unknown_rate, 5),
        "pair_windows": sum(map(any, windows.types or ())),
        "notes": notes,
    }


def _fold(student: RelPosBertPreTrainedModel, windows: Windows, run: ConversionRun) -> None:
    """Add the mean of the source's positions in these windows to the embeddings, and [CLS]'s to its own."""
    if not run.source_config.has_absolute_table:
        return
    table, limit = run.source_table.float(), run.source_config.max_position_embeddings
    counts = torch.zeros(len(table), dtype=torch.float64)
    for ids in windows.ids:
        counts[: len(ids)] += len(ids) / min(len(ids), limit)  # a long row counts once per window
    fold_positions(student, table, shared_first_token(windows.ids), counts)


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


def fingerprint(
    run: ConversionRun, windows: Windows, settings: CalibrationSettings, model: RelPosBertPreTrainedModel
) -> str:
    """A digest of all inputs of the fits: weights, text, scheme, window and settings."""
    digest = hashlib.sha256()
    for name, tensor in sorted(run.source.tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.double().sum().numpy().tobytes())
    digest.update(json.dumps([windows.ids, windows.types, asdict(settings)]).encode())
    config = model.config
    digest.update(
        json.dumps([config.position_embedding_type, config.position_options, config.attention_window]).encode()
    )
    return digest.hexdigest()


def _windows_to_distil(tokenizer: Any, run: ConversionRun) -> Windows:
    """The windows of a distillation. One step on rows past the source's limit follows `SHORT_STEPS` other steps."""
    options, limit = run.options, run.source_config.max_position_embeddings
    lengths, length, batch = window_lengths(limit), options.length or limit, options.batch_tokens
    tokens = options.tokens_to_distil
    cut = partial(gather, tokenizer, run.texts, part="fit", field=run.field, passage=max(*lengths, length))
    if length <= limit:
        return cut(tokens=tokens, lengths=lengths, seed=run.seed + 1)
    short = cut(tokens=tokens * SHORT_STEPS // (SHORT_STEPS + 1), lengths=lengths, seed=run.seed + 1)
    long_steps = -(-short.tokens // (batch * SHORT_STEPS))
    rows = long_steps * max(1, batch // length)
    return short.joined(cut(tokens=rows * length, lengths=(length,), seed=run.seed + 4, short=0.0))


def _distil(
    student: RelPosBertPreTrainedModel,
    teacher: RelPosBertPreTrainedModel,
    tokenizer: Any,
    run: ConversionRun,
    console: Console,
) -> dict[str, Any]:
    from ..training import DistillationSettings, distil  # imports the Trainer
    from ..training.distillation_losses import DEFAULT_LOSSES

    options, limit, seed = run.options, run.source_config.max_position_embeddings, run.seed + 1
    windows = pair_windows(_windows_to_distil(tokenizer, run), *_layout_and_share(tokenizer, run), limit, seed)
    windows = mask_windows(windows, student, tokenizer, options.mask, seed)
    if not isinstance(options, CalibrateOptions):  # nothing was fitted before
        run.details["text"] = _about(windows, check_windows(windows, max(limit, options.length or 0)))
        _fold(student, windows, run)
        for model in (student, teacher):
            model.to(run.device)
    pairs = zip(windows.ids, windows.token_types, strict=True)
    rows = [{"input_ids": ids, "token_type_ids": types} for ids, types in pairs]
    losses = dict(DEFAULT_LOSSES)
    if has_mlm_head(student):
        losses["logits"] = 1.0
    console.print(f"distilling: {options.steps} steps on {windows.tokens:,} tokens", highlight=False)
    settings = DistillationSettings(
        steps=options.steps,
        batch_tokens=options.batch_tokens,
        learning_rate=LEARNING_RATE,
        table_learning_rate=TABLE_LEARNING_RATE,
        losses=losses,
        seed=run.seed,
        trainer_arguments={"use_cpu": True} if run.device.type == "cpu" else {},
    )
    for each in (student, teacher):
        each.set_attn_implementation(AUTO)  # returns attention weights only where they are compared
    with torch.enable_grad():
        report = distil(student, teacher, rows, settings, progress=run.progress)
    return report.to_dict()
