"""The methods that learn from text: `calibrate`, and `calibrate+distil`.

What surrounds the fits of `calibrate.py`: options, several processes, going on after an interruption, and what the
report says of the result.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedModel

from ..calibration.batches import make_batches
from ..calibration.calibrate import Calibrator, Settings, fold_positions
from ..calibration.errors import CalibrationError
from ..calibration.processes import processes, sum_over
from ..calibration.saved import Saved
from ..calibration.windows import (
    LENGTHS,
    TOO_FEW,
    check_windows,
    gather,
    gather_all,
    mask_some,
    octaves,
    random_windows,
    shared_first,
)
from ..console import progress_bar
from ..data.text import TextError
from ..data.windows import Windows, special_tokens
from ..evaluation.inspection import has_mlm_head
from ..model.modeling_relpos_bert import RelPosBertPreTrainedModel
from ..model.scheme import Option, Scheme, choice, is_count, is_number
from ..model.schemes import SCHEMES
from .names import is_scheme, is_table
from .source import ConversionError


if TYPE_CHECKING:
    from .methods import ConversionContext


# Lengths at which the report compares teacher and student, and tokens of text for each.
CHECKED = (16, 64, 128, 256, 512)
CHECK_TOKENS = 6144
# From a calibrated start lower rates do better than distil's own, which are for tables of zeros. all-MiniLM-L6-v2, 50
# steps of 512 tokens, mean sentence cosine on fresh text: .968 with (1e-4, 3e-2), .980 with (1e-4, 1e-2), .982 with
# (3e-5, 1e-2).
LEARNING_RATE, TABLE_LEARNING_RATE = 5e-5, 1e-2

OUTPUT = choice(
    None,
    "ridge",
    "bias",
    "none",
    help="what corrects the residual stream: output projections (ridge), their biases, or nothing; None: ridge with "
    "text, bias without",
)
# Tokens of the windows that stand in for text; more were not better.
RANDOM_TOKENS = 30_000
CALIBRATE = {
    "tokens": Option(50_000, "tokens of text to fit; a positive integer", is_count),
    "output": OUTPUT,
    "ridge": Option(
        Settings.ridge, "penalty of the tables' squares, relative to their curvature; a positive number", is_number
    ),
    "smooth": Option(
        Settings.smooth, "penalty of the difference of neighbouring distances, likewise; a positive number", is_number
    ),
    "length": Option(
        None,
        "tokens of the longest rows to fit; half of the text is cut so where the source does not read as many, and it "
        "reads them in overlapping windows. A positive integer, or None for what the source reads",
        lambda v: v is None or is_count(v),
    ),
    "window": Option(
        None,
        "attention_window of the result; a positive integer, or None for a result whose tokens attend to all",
        lambda v: v is None or is_count(v),
    ),
    "mask": Option(
        0.15,
        "share of the tokens that are [MASK] in half of the text, for a model that predicts masked tokens; 0 to 0.5",
        lambda v: isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v <= 0.5,
    ),
    "field": Option("text", "key or column of the text in .jsonl, .tsv and .csv files", lambda v: isinstance(v, str)),
}
DISTIL = {
    "steps": Option(200, "steps of the distillation; a positive integer", is_count),
    "batch_tokens": Option(1024, "tokens in a step of the distillation; a positive integer", is_count),
    "distil_tokens": Option(
        None, "tokens of text to distil on; None: as many as the steps read", lambda v: v is None or is_count(v)
    ),
}


def can_be_fitted(scheme: type[Scheme]) -> str:
    """Refuses a scheme none of whose terms is linear in parameters of a layer; names those that can be fitted."""
    if scheme.linear_parameters:
        return ""
    fitting = ", ".join(name for name, each in SCHEMES.items() if each.linear_parameters)
    return f"nothing of this scheme can be fitted in closed form; the schemes that can: {fitting}"


def calibrate(model: RelPosBertPreTrainedModel, context: "ConversionContext") -> dict[str, str]:
    """Fit the model to its source; see `calibrate.py`."""
    return _checked(model, context, distil=False)


def calibrate_and_distil(model: RelPosBertPreTrainedModel, context: "ConversionContext") -> dict[str, str]:
    """Fit the model to its source, then distil the source into it; see `hf_relpos.training.distillation`."""
    return _checked(model, context, distil=True)


def _checked(model: RelPosBertPreTrainedModel, context: "ConversionContext", distil: bool) -> dict[str, str]:
    try:
        return _learn(model, context, distil)
    except CalibrationError as error:
        raise ConversionError(str(error)) from error


def _learn(model: RelPosBertPreTrainedModel, context: "ConversionContext", distil: bool) -> dict[str, str]:
    started, cpu = time.perf_counter(), time.process_time()
    if model.config.is_decoder:
        raise ConversionError("is_decoder = True: only encoders are calibrated; choose method = 'keep' or 'drop'")
    tokenizer = load_tokenizer(context.tokenizer_folder)
    limit = context.config.max_position_embeddings
    options = context.options
    lengths = tuple(length for length in LENGTHS if length <= limit) or (limit,)
    if options["tokens"] < TOO_FEW:
        raise ConversionError(
            f"method_options['tokens'] = {options['tokens']}: too few to fit anything; ask for at least {TOO_FEW}, "
            "better 50,000"
        )
    length = options["length"] or limit
    if length > limit and 2 * length > options["tokens"]:
        raise ConversionError(
            f"method_options['length'] = {length}: half of tokens = {options['tokens']} is cut into such rows, and is "
            "less than one; ask for more tokens, or for a shorter length"
        )
    model.config.attention_window = options["window"]
    if context.texts is None:
        if length > limit:
            raise ConversionError(
                f"method_options['length'] = {length}: longer than the {limit} tokens that the source reads, and "
                "random tokens say nothing of long texts; give texts, or leave it out"
            )
        windows = random_windows(tokenizer, min(options["tokens"], RANDOM_TOKENS), limit, context.seed)
        notes = ["no text was given: fitted to random tokens. With some text of its kind the result would be closer"]
    else:
        try:
            windows = gather_all(
                tokenizer, context.texts, options["tokens"], lengths, length, options["field"], context.seed
            )
        except TextError as error:
            raise ConversionError(f"texts: {error}") from error
        notes = check_windows(windows, max(limit, length))
    windows = mask_some(windows, model, tokenizer, options["mask"], context.seed)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dtype = model.dtype
    student, teacher = model.float(), context.keep().float()
    for each in (student, teacher):
        each.set_attn_implementation("eager")

    first = shared_first(windows.ids)
    table = next(tensor for name, tensor in context.source.tensors.items() if is_table(name)).float()
    counts = torch.zeros(len(table), dtype=torch.float64)
    for ids in windows.ids:
        counts[: len(ids)] += len(ids) / min(len(ids), limit)  # of a longer row, as often as its windows
    fold_positions(student, table, first, counts)

    state = processes()
    output = options["output"] or ("bias" if context.texts is None else "ridge")
    settings = Settings(ridge=options["ridge"], smooth=options["smooth"], output=output, seed=context.seed)
    pad = model.config.pad_token_id or 0
    batches = make_batches(
        windows.ids, pad, settings.batch_tokens, settings.holdout, state.process_index, state.num_processes, limit
    )
    memory = memory_needed(windows, settings, model, state.num_processes)
    saved = None
    if context.state is not None:
        saved = Saved(context.state, fingerprint(context, windows, settings, model), writes=state.is_main_process)
        state.wait_for_everyone()
    console = Console(stderr=True, quiet=not (context.progress and state.is_main_process))
    console.print(
        f"calibrating on {windows.tokens:,} tokens in {len(windows.ids):,} windows; about {memory / 2**20:,.0f} MB of "
        "memory beside the models. Interrupted, the same command goes on where it was",
        highlight=False,
    )
    with progress_bar(console, context.progress and state.is_main_process) as report:
        run = Calibrator(teacher, student, batches, settings, sum_over(state), report)
        result = run.run(saved)
    if first is not None:
        spare_first_token(student, run, first, before)
    details = context.details
    details["calibration"] = {
        **result.to_dict(),
        "seen": octaves(windows.ids),
        "unknown_share": round(windows.unknown_rate, 5),
        "memory_bytes": memory,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu,
        "notes": notes,
    }
    if distil:
        details["distillation"] = _distil(student, teacher, context, tokenizer, lengths, console)
    details["fidelity"] = check(student, teacher, context, tokenizer, limit)
    model.to(dtype)
    if saved is not None:
        state.wait_for_everyone()
        saved.clear()
    return {
        name: "fitted" if is_scheme(name) else "fitted to the source's outputs on text"
        for name, tensor in model.state_dict().items()
        if not torch.equal(tensor, before[name])
    }


def load_tokenizer(folder: Path):
    """The tokenizer of the source.

    Raises:
        ConversionError: for a folder without one.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        spec = len(tokenizer)
    except (OSError, ValueError, ImportError) as error:
        raise ConversionError(
            f"{folder}: its tokenizer cannot be loaded ({error}); add its files to the folder"
        ) from error
    if spec < 10:
        raise ConversionError(f"{folder}: has no tokenizer files, and text must be cut into tokens; add them")
    return tokenizer


def memory_needed(windows: Windows, settings: Settings, model: PreTrainedModel, processes: int) -> int:
    """About how many bytes a process holds beside the models: hidden states, and the rows of the score fits."""
    config = model.config
    width, heads, limit = config.hidden_size, config.num_attention_heads, config.max_position_embeddings
    states = 6 * windows.tokens * width
    rows = (min(settings.rows * max(1, 2 * len(ids) // limit - 1), len(ids)) * len(ids) for ids in windows.ids)
    pairs = sum(rows) * heads
    keys = 2 * sum(map(len, windows.ids)) * width
    sums = 4 * 2 * config.intermediate_size**2  # float64
    attention = 4 * heads * max(map(len, windows.ids)) ** 2
    return 4 * ((states + 5 * pairs + keys) // processes + sums + attention)


def fingerprint(context: "ConversionContext", windows: Windows, settings: Settings, model: PreTrainedModel) -> str:
    """Tells one calibration from another: weights, text, scheme, window and settings."""
    digest = hashlib.sha256()
    for name, tensor in sorted(context.source.tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.double().sum().numpy().tobytes())
    digest.update(json.dumps([windows.ids, asdict(settings)]).encode())
    config = model.config
    digest.update(
        json.dumps([config.position_embedding_type, config.position_options, config.attention_window]).encode()
    )
    return digest.hexdigest()


@torch.no_grad()
def spare_first_token(
    student: RelPosBertPreTrainedModel, run: Calibrator, first: int, before: Mapping[str, torch.Tensor]
) -> None:
    """Undo, for a language model's predictions, what the fold did to the word vector of the first token.

    The output layer is tied to the word vectors. The position vector of place 0, folded into that of [CLS], would make
    it likelier everywhere: its bias gives back the mean over the text.
    """
    head = getattr(student, "cls", None)
    decoder = getattr(getattr(head, "predictions", None), "decoder", None)
    words = student.base_model.embeddings.word_embeddings.weight
    if decoder is None or decoder.weight is not words or decoder.bias is None:
        return
    name = next(name for name, parameter in student.named_parameters() if parameter is words)
    difference = words[first].double() - before[name][first].double()
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in run.batches:
        hidden = batch.real(head.predictions.transform(batch.student)).double()
        sums += torch.stack([(hidden @ difference).sum(), torch.tensor(float(len(hidden)), dtype=torch.float64)])
    total, count = run.reduce(sums).tolist()
    decoder.bias[first] -= total / count


def _distil(
    student, teacher, context: "ConversionContext", tokenizer, lengths: Sequence[int], console: Console
) -> dict[str, Any]:
    from ..training import DistillationSettings, distil
    from ..training.distillation_losses import DEFAULT_LOSSES

    options = context.options
    tokens = options["distil_tokens"] or options["steps"] * options["batch_tokens"]
    windows = gather(tokenizer, context.texts, tokens, lengths, "fit", options["field"], context.seed + 1)
    windows = mask_some(windows, student, tokenizer, options["mask"], context.seed + 1)
    losses = dict(DEFAULT_LOSSES)
    if has_mlm_head(student):
        losses["logits"] = 1.0
    console.print(f"distilling: {options['steps']} steps on {windows.tokens:,} tokens", highlight=False)
    with torch.enable_grad():
        settings = DistillationSettings(
            steps=options["steps"],
            batch_tokens=options["batch_tokens"],
            learning_rate=LEARNING_RATE,
            table_learning_rate=TABLE_LEARNING_RATE,
            losses=losses,
            seed=context.seed,
        )
        report = distil(student, teacher, windows.ids, settings, progress=context.progress)
    student.to("cpu")
    return report.to_dict()


def check(student, teacher, context: "ConversionContext", tokenizer, limit: int) -> dict[str, Any]:
    """Fidelity on text that nothing was fitted to, by length."""
    if context.texts is None:
        return {"skipped": "there was no text; `hf-relpos compare` measures it on yours"}
    from ..evaluation import FidelitySettings, fidelity, verdict

    lengths = [length for length in CHECKED if length <= limit] or [limit]
    try:
        windows = gather(
            tokenizer,
            context.texts,
            len(lengths) * CHECK_TOKENS,
            tuple(length for length in LENGTHS if length <= limit) or (limit,),
            "check",
            context.options["field"],
            context.seed,
            short=0.0,
        ).ids
        if (length := context.options["length"] or limit) > limit:
            lengths.append(length)
            tokens, field = max(CHECK_TOKENS, 2 * length), context.options["field"]
            windows += gather(tokenizer, context.texts, tokens, (length,), "check", field, context.seed, short=0.0).ids
    except TextError as error:
        return {"skipped": f"no text was left to check with: {error}"}
    before, after = special_tokens(tokenizer)
    by_length: dict[int, list[list[int]]] = {}
    for length in lengths:
        inner = length - len(before) - len(after)
        rows = []
        for ids in windows:
            body = ids[len(before) : len(ids) - len(after)]
            rows += [[*before, *body[at : at + inner], *after] for at in range(0, len(body) - inner + 1, inner)]
        if rows:
            step = max(1, len(rows) // max(1, CHECK_TOKENS // length))
            by_length[length] = rows[::step][: max(4, CHECK_TOKENS // length)]
    if not by_length:
        return {"skipped": f"no text was left to check with that fills {min(lengths)} tokens"}
    mask = tokenizer.mask_token_id if has_mlm_head(student) and has_mlm_head(teacher) else None
    found = fidelity(teacher, student, by_length, FidelitySettings(mask_token_id=mask, seed=context.seed))
    return {**found.to_dict(), "verdict": verdict(found)}
