"""The methods that learn from text: `calibrate`, and `calibrate+distil`.

Options, windows of text, several processes, resuming, and what the report says of the result; the fits themselves are
in `hf_relpos.conversion.calibration`.
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
from ..families.names import is_scheme
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from ..processes import process_state, sum_over
from ..schemes.scheme import Option, choice, is_count
from .calibration.batches import make_batches
from .calibration.calibrate import Calibrator
from .calibration.embeddings import correct_first_token_bias, fold_positions
from .calibration.errors import CalibrationError
from .calibration.saved import Saved, one_process
from .calibration.settings import PENALTIES, CalibrationSettings, estimate_memory, is_penalty
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
from .context import ConversionContext
from .held_out import held_out_fidelity


# From a calibrated start lower rates do better than distil's own, which are for tables of zeros. all-MiniLM-L6-v2,
# `harmonic` calibrated on 20,000 tokens, sentence cosine on held-out passages, mean of 16 to 512 tokens: .951 before;
# after 120 steps of 512 tokens .975 with (1e-4, 1e-2), .973 with (2e-4, 1e-2), .978 with (1e-4, 3e-3); after 60 steps
# of 1,024 tokens .973 with (5e-5, 1e-2), .952 with (1e-4, 3e-2). Many small steps do better than few large ones.
LEARNING_RATE, TABLE_LEARNING_RATE = 1e-4, 3e-3

# Share of the windows that are fitted as pairs of segments. all-MiniLM-L6-v2, default quality, by its own check: token
# cosine in the segments of pairs .960 and .936 fitted to none, .980 and .977 to a half; sentence cosine of single
# texts at 512 tokens .9695 and .9674.
PAIRS = 0.5


def is_share(value: Any) -> bool:
    """Whether a value is a number from 0 to 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


OUTPUT = choice(
    None,
    "ridge",
    "bias",
    "none",
    help="what corrects the residual stream: output projections (ridge), their biases, or nothing; None: ridge with "
    "text, bias without",
)
PENALTY = f"a positive number, from {PENALTIES[0]:g} to {PENALTIES[1]:g}"
# Tokens of random windows, where there is no text; more were not better.
RANDOM_TOKENS = 30_000
CALIBRATE = {
    "tokens": Option(50_000, "tokens of text to fit; a positive integer", is_count),
    "output": OUTPUT,
    "ridge": Option(
        CalibrationSettings.ridge,
        f"penalty of the tables' squares, relative to their curvature; {PENALTY}",
        is_penalty,
    ),
    "smooth": Option(
        CalibrationSettings.smooth,
        f"penalty of the difference of neighbouring distances, likewise; {PENALTY}",
        is_penalty,
    ),
    "length": Option(
        None,
        "tokens of the longest rows to fit; half of the text is cut so where the source does not read as many, and it "
        "reads them in overlapping windows; every third step of a distillation has such a row. A positive integer, "
        "or None for what the source reads",
        lambda v: v is None or is_count(v),
    ),
    "window": Option(
        None,
        "attention_window of the result; a positive integer, or None for a result whose tokens attend to all",
        lambda v: v is None or is_count(v),
    ),
    "pairs": Option(
        None,
        "share of the windows, of those that the source reads at once, that are fitted and trained on as pairs of "
        "segments with their token types, for tasks such as question answering; 0 to 1; None: 0.5, and 0 for a "
        "SentenceTransformer and for a source without two token types",
        lambda v: v is None or is_share(v),
    ),
    "mask": Option(
        0.15,
        "share of the tokens that are [MASK] in half of the text, for a model that predicts masked tokens; 0 to 0.5",
        lambda v: is_share(v) and v <= 0.5,
    ),
}
# Steps of a distillation on short rows for one on rows past the source's limit, the dear ones. With 1 all-MiniLM-L6-v2
# came no closer on long rows, and lost more on pairs of sentences.
SHORT_STEPS = 2
DISTIL = {
    "steps": Option(200, "steps of the distillation; a positive integer", is_count),
    "batch_tokens": Option(1024, "tokens in a step of the distillation; a positive integer", is_count),
    "distil_tokens": Option(
        None, "tokens of text to distil on; None: as many as the steps read", lambda v: v is None or is_count(v)
    ),
}


def calibrate(model: RelPosBertPreTrainedModel, context: ConversionContext) -> dict[str, str]:
    """Fit the model to its source; see `hf_relpos.conversion.calibration.calibrate`.

    Raises:
        ConversionError: for a decoder, options or text that leave too little to fit, and a folder that cannot be
            written.
    """
    return _learn(model, context, distils=False)


def calibrate_and_distil(model: RelPosBertPreTrainedModel, context: ConversionContext) -> dict[str, str]:
    """Fit the model to its source, then distil the source into it; see `hf_relpos.training.distillation`.

    Raises:
        ConversionError: as `calibrate`.
    """
    return _learn(model, context, distils=True)


def _learn(model: RelPosBertPreTrainedModel, context: ConversionContext, distils: bool) -> dict[str, str]:
    state = process_state()
    try:
        _check_options(model, context)
        with one_process(context.resume_folder if state.is_main_process else None):
            return _fit(model, context, state, distils)
    except CalibrationError as error:
        raise ConversionError(str(error)) from error
    except TextError as error:
        raise ConversionError(f"texts: {error}") from error


def _fit(
    model: RelPosBertPreTrainedModel, context: ConversionContext, state: PartialState, distils: bool
) -> dict[str, str]:
    tokenizer = load_tokenizer(context.tokenizer_folder, model.config.vocab_size)
    if context.options["window"] is not None:
        model.config.attention_window = context.options["window"]
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dtype = model.dtype
    student, teacher = model.float(), context.build_teacher().float()
    for each in (student, teacher):
        each.set_attn_implementation("eager")
    console = Console(stderr=True, quiet=not (context.progress and state.is_main_process))
    marks = {"": time.process_time()}
    saved = _calibrate(student, teacher, tokenizer, context, state, console)
    marks["fit"] = time.process_time()
    if distils:
        context.details["distillation"] = _distil(student, teacher, tokenizer, context, console)
        marks["distillation"] = time.process_time()
    with progress_bar(console, not console.quiet) as progress:
        context.details["fidelity"] = held_out_fidelity(student, teacher, tokenizer, context, progress)
    marks["check"] = time.process_time()
    spent = pairwise(marks.items())
    context.details["cpu_seconds"] = {what: end - start for (_, start), (what, end) in spent}
    model.to("cpu", dtype)
    if saved is not None:
        state.wait_for_everyone()
        saved.clear()
    return {
        name: "fitted" if is_scheme(name) else "fitted to the source's outputs on text"
        for name, tensor in model.state_dict().items()
        if not torch.equal(tensor, original[name])
    }


def _check_options(model: RelPosBertPreTrainedModel, context: ConversionContext) -> None:
    options, limit = context.options, context.source_config.max_position_embeddings
    if model.config.is_decoder:
        raise ConversionError("is_decoder = True: only encoders are calibrated; choose method = 'keep' or 'drop'")
    if options["tokens"] < TOO_FEW:
        raise ConversionError(
            f"method_options['tokens'] = {options['tokens']}: too few to fit anything; ask for at least {TOO_FEW}, "
            "better 12,000"
        )
    distil_tokens = options.get("distil_tokens")
    if distil_tokens is not None and distil_tokens < TOO_FEW:
        raise ConversionError(
            f"method_options['distil_tokens'] = {distil_tokens}: too few to learn anything; ask for at least "
            f"{TOO_FEW}, or leave it out"
        )
    length, window = options["length"], options["window"]
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
    if 2 * length > options["tokens"]:
        raise ConversionError(
            f"method_options['length'] = {length}: half of tokens = {options['tokens']} is cut into such rows, and is "
            "less than one; ask for more tokens, or for a shorter length"
        )
    if context.texts is None:
        raise ConversionError(
            f"method_options['length'] = {length}: longer than the {limit} tokens that the source reads, and "
            "random tokens say nothing of long texts; give texts, or leave it out"
        )


def _windows_to_fit(
    model: RelPosBertPreTrainedModel, tokenizer: Any, context: ConversionContext
) -> tuple[Windows, list[str]]:
    """The windows of tokens to fit, and notes on the text for the report."""
    options, limit = context.options, context.source_config.max_position_embeddings
    length = options["length"] or limit
    layout, share = _layout_and_share(tokenizer, context)
    if context.texts is None:
        windows = random_windows(tokenizer, min(options["tokens"], RANDOM_TOKENS), limit, context.seed)
        notes = ["no text was given: fitted to random tokens. With some text of its kind the result would be closer"]
    else:
        windows = gather_all(
            tokenizer,
            context.texts,
            options["tokens"],
            window_lengths(limit),
            length,
            context.field,
            context.seed,
        )
        notes = check_windows(windows, max(limit, length))
    windows = pair_windows(windows, layout, share, limit, context.seed)
    return mask_windows(windows, model, tokenizer, options["mask"], context.seed), notes


def _layout_and_share(tokenizer: Any, context: ConversionContext) -> tuple[PairLayout | None, float]:
    """How the source reads pairs of segments, None where none are to be made; and the share of the windows for them.

    Raises:
        ConversionError: for a share that was asked for, of a source that reads none.
    """
    share = context.options["pairs"]
    if share == 0 or (share is None and context.is_sentence_encoder):
        return None, 0.0
    layout = PairLayout.of(tokenizer) if context.tells_segments_apart else None
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
    context: ConversionContext,
    state: PartialState,
    console: Console,
) -> Saved | None:
    """Fit the student in place and add to the details; the fitted layers on disk, to be removed at the end."""
    started, cpu = time.perf_counter(), time.process_time()
    options, limit = context.options, context.source_config.max_position_embeddings
    windows, notes = _windows_to_fit(student, tokenizer, context)
    first_token = shared_first_token(windows.ids)
    words = student.base_model.embeddings.word_embeddings.weight
    first_vector = None if first_token is None else words[first_token].clone()
    if context.source_config.has_absolute_table:
        table = context.source_table.float()
        counts = torch.zeros(len(table), dtype=torch.float64)
        for ids in windows.ids:
            counts[: len(ids)] += len(ids) / min(len(ids), limit)  # of a longer row, as often as its windows
        fold_positions(student, table, first_token, counts)

    output = options["output"] or ("bias" if context.texts is None else "ridge")
    settings = CalibrationSettings(ridge=options["ridge"], smooth=options["smooth"], output=output, seed=context.seed)
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
    if context.resume_folder is not None:
        digest = fingerprint(context, windows, settings, student)
        saved = Saved(context.resume_folder, digest, writes=state.is_main_process)
        state.wait_for_everyone()
    console.print(
        f"calibrating on {windows.tokens:,} tokens in {len(windows.ids):,} windows; about {memory / 2**20:,.0f} MB of "
        "memory besides the models. Interrupted, the same command resumes",
        highlight=False,
    )
    for model in (student, teacher):
        model.to(context.device)
    with progress_bar(console, not console.quiet) as progress:
        calibrator = Calibrator(teacher, student, batches, settings, sum_over(state), progress)
        report = calibrator.run(saved)
    if first_token is not None and first_vector is not None:
        correct_first_token_bias(student, first_token, first_vector, calibrator.batches, calibrator.reduce)
    context.details["calibration"] = {
        **report.to_dict(),
        "seen": distance_histogram(windows.ids),
        "unknown_share": round(windows.unknown_rate, 5),
        "pair_windows": sum(map(any, windows.types or ())),
        "memory_bytes": memory,
        "device": context.device.type,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu,
        "notes": notes,
    }
    return saved


def load_tokenizer(folder: Path, vocab_size: int) -> Any:
    """The tokenizer of the source.

    Args:
        folder: of the source.
        vocab_size: how many tokens the source knows.

    Raises:
        ConversionError: for a folder without one, and one that has more tokens.
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
    context: ConversionContext, windows: Windows, settings: CalibrationSettings, model: RelPosBertPreTrainedModel
) -> str:
    """A digest of all that the fits depend on: weights, text, scheme, window and settings."""
    digest = hashlib.sha256()
    for name, tensor in sorted(context.source.tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.double().sum().numpy().tobytes())
    digest.update(json.dumps([windows.ids, windows.types, asdict(settings)]).encode())
    config = model.config
    digest.update(
        json.dumps([config.position_embedding_type, config.position_options, config.attention_window]).encode()
    )
    return digest.hexdigest()


def _windows_to_distil(tokenizer: Any, context: ConversionContext) -> Windows:
    """The windows of a distillation; past the source's limit one step of long rows for `SHORT_STEPS` of the others."""
    options, limit = context.options, context.source_config.max_position_embeddings
    lengths, length, batch = window_lengths(limit), options["length"] or limit, options["batch_tokens"]
    tokens = options["distil_tokens"] or options["steps"] * batch
    cut = partial(gather, tokenizer, context.texts, part="fit", field=context.field, passage=max(*lengths, length))
    if length <= limit:
        return cut(tokens=tokens, lengths=lengths, seed=context.seed + 1)
    short = cut(tokens=tokens * SHORT_STEPS // (SHORT_STEPS + 1), lengths=lengths, seed=context.seed + 1)
    long_steps = -(-short.tokens // (batch * SHORT_STEPS))
    rows = long_steps * max(1, batch // length)
    return short.joined(cut(tokens=rows * length, lengths=(length,), seed=context.seed + 4, short=0.0))


def _distil(
    student: RelPosBertPreTrainedModel,
    teacher: RelPosBertPreTrainedModel,
    tokenizer: Any,
    context: ConversionContext,
    console: Console,
) -> dict[str, Any]:
    from ..training import DistillationSettings, distil  # imports the Trainer
    from ..training.distillation_losses import DEFAULT_LOSSES

    options, limit, seed = context.options, context.source_config.max_position_embeddings, context.seed + 1
    windows = pair_windows(_windows_to_distil(tokenizer, context), *_layout_and_share(tokenizer, context), limit, seed)
    windows = mask_windows(windows, student, tokenizer, options["mask"], seed)
    pairs = zip(windows.ids, windows.token_types, strict=True)
    rows = [{"input_ids": ids, "token_type_ids": types} for ids, types in pairs]
    losses = dict(DEFAULT_LOSSES)
    if has_mlm_head(student):
        losses["logits"] = 1.0
    console.print(f"distilling: {options['steps']} steps on {windows.tokens:,} tokens", highlight=False)
    settings = DistillationSettings(
        steps=options["steps"],
        batch_tokens=options["batch_tokens"],
        learning_rate=LEARNING_RATE,
        table_learning_rate=TABLE_LEARNING_RATE,
        losses=losses,
        seed=context.seed,
        trainer_arguments={"use_cpu": True} if context.device.type == "cpu" else {},
    )
    for each in (student, teacher):
        each.set_attn_implementation(AUTO)  # returns the attention where it is compared; of long rows it need not be
    with torch.enable_grad():
        report = distil(student, teacher, rows, settings, progress=context.progress)
    return report.to_dict()
