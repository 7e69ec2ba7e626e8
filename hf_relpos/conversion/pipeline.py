"""The conversion of a checkpoint into a relpos_bert folder: plan, read, build, learn, verify, write."""

import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from ..checkpoints.errors import ConversionError, PoorConversionWarning, conversion_errors
from ..checkpoints.weights import CARD, read_tensors, tensor_names
from ..console import spinner
from ..data.seed import check_seed
from ..families.recognition import choose_head, recognise
from ..families.tensors import rename_and_validate
from ..files import write_json, write_text
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from ..schemes.scheme import check_options, nearest
from ..version import __version__
from .build import Apply, build_model, drop, expected_shapes, rename_relative
from .card import model_card, source_metadata
from .configurations import read_config, resolved_options, source_config, target_config
from .folder import REPORT, check_apart, check_target, locate, new_folder
from .learn import learn
from .methods import METHODS
from .plan import Conversion, check_text, choose_device, choose_method
from .report import ConversionReport, has_vocabulary, list_steps
from .verify import compare_outputs, compare_tensors


# What methods do that change tensors.
APPLY: dict[str, Apply] = {"drop": drop, "distil": learn}
NOT_COMPARED = "outputs were not compared, since Transformers has no class for the source; all tensors equal its own"
NO_TOKENIZER = "the source has no tokenizer: put one into the folder before you load it as a SentenceTransformer"


@conversion_errors()
def convert(
    source: str | Path,
    out: str | Path,
    *,
    position_embedding_type: str | None = None,
    position_options: Mapping[str, Any] | None = None,
    method: str | None = None,
    method_options: Mapping[str, Any] | None = None,
    texts: str | Path | Iterable[str | Path] | None = None,
    field: str | Sequence[str] = "text",
    skip_unreadable: bool = False,
    seed: int = 0,
    architecture: str | None = None,
    revision: str | None = None,
    allow_pickle: bool = False,
    overwrite: bool = False,
    device: str | None = None,
    progress: bool = False,
) -> ConversionReport:
    """Write a checkpoint of one of `families.FAMILIES` or of this package as a relpos_bert folder with its tokenizer.

    The result is written to a temporary folder, read back, compared, and renamed to `out`. After an error `out` is
    unchanged. Before a training this is tried with the untrained model, so that nothing is refused after it. A result
    that fails a threshold of `ConversionReport.failed_thresholds` is written with a `PoorConversionWarning`.

    Args:
        source: local folder or Hub repository, with safetensors weights, or pickled ones if `allow_pickle` is set.
        out: folder to write. It also gets a report, `conversion.json`, a model card, `README.md`, and the modules of a
            sentence-transformers folder.
        position_embedding_type: scheme of the result, a key of `hf_relpos.schemes.SCHEMES`. None for `harmonic` if
            the method is `distil`, else the source's relative scheme, else `relative_key`. MPNet keeps its T5 bias.
        position_options: options of that scheme.
        method: `keep` (keep absolute positions and all outputs), `drop` (keep only the mean of absolute positions),
            `distil` (start relative terms at zero and train the model on `texts` to reproduce the source; also for
            relative sources), `exact` (for relative sources only: keep tables and outputs). None for `exact` if the
            source is relative, else `distil` if there are `texts`, else `keep`.
        method_options: options of the method: keys of `METHODS[method].options`. For `distil`, `{"steps": 150}` is
            faster and a little less close; the scheme `tables` with `{"steps": 1000}` is closer and slower.
        texts: for a method that learns from text: one path or several, read by `hf_relpos.data.read_texts`, each with
            the same share of the tokens; or documents (strings). In a list, strings that name existing files are
            paths. An iterator of documents is read once, up to 100 million characters. Of a Hub dataset, give a
            column: `load_dataset(name, split="train")["text"]`.
        field: key or column of the text in .jsonl, .tsv and .csv files; one for all, or one for each of `texts`.
        skip_unreadable: leave out, with a warning, text files without that field, or that are not text.
        seed: random seed, 0 to 2³² − 1.
        architecture: class with the head to keep; by default the class in config.json.
        revision: branch, tag or commit of a Hub repository.
        allow_pickle: if there are no safetensors, read (and download) `pytorch_model.bin` or its shards with
            `torch.load(weights_only=True)`, which creates tensors only. Use it for checkpoints that you trust.
        overwrite: replace an existing `out`, after success, if it holds only a checkpoint.
        device: device of a method that learns from text, such as "cpu" or "cuda:1"; it must support float64. None for
            an accelerator if there is one, else the CPU.
        progress: show a progress bar; without a terminal, print a line every 30 seconds.

    Returns:
        The report, as in `conversion.json`.

    Raises:
        ConversionError: if the source cannot be converted, a scheme or option is unknown, or a folder cannot be
            written. The message names the cause and the remedy.
    """
    given = dict(locals())  # before there are other variables
    target = check_target(out, overwrite, source)
    if method is not None and method not in METHODS:
        raise ConversionError(f"method = {method!r} is unknown{nearest(method, METHODS)}; known: {', '.join(METHODS)}")
    for name, example in (("position_options", {"clip": 32}), ("method_options", {"steps": 100})):
        if not isinstance(given[name], Mapping | None):
            raise ConversionError(f"{name} = {given[name]!r} is not a mapping; give names and values, as in {example}")
    check_seed(seed)
    layout = locate(source, revision, allow_pickle)
    check_apart(layout.top, target)  # the cache of the Hub
    folder = layout.top / layout.encoder
    spec = recognise(folder, read_config(folder), tensor_names(folder, allow_pickle))
    spec, left_behind = choose_head(spec, architecture)
    name = choose_method(method, texts is not None, spec)
    chosen = METHODS[name]
    found = check_text(texts, field, name)
    for other, key in itertools.product(METHODS, method_options or {}):
        if key in METHODS[other].options.keys() - chosen.options.keys():
            reason = f"is an option of method = {other!r}, which takes texts (--texts), and not of {name!r}"
            raise ConversionError(f"method_options[{key!r}] = {given['method_options'][key]!r}: it {reason}")
    check_options(method_options or {}, chosen.options, "method_options", f"method = {name!r}")
    options = {key: option.default for key, option in chosen.options.items()} | dict(method_options or {})
    place = choose_device(device) if chosen.learns else torch.device("cpu")
    own = source_config(spec)
    config = target_config(spec, own, position_embedding_type, position_options, chosen, options)
    with spinner("reading the source", progress):
        raw = spec.unpack(read_tensors(folder, allow_pickle))
        stock_names = {stock for stored in raw for stock in spec.rename(stored, base=False)}
        if layout.listed and architecture is None and all(stock.startswith("bert.") for stock in stock_names):
            # sentence-transformers saves only the encoder, but with the class name of the original model
            spec, left_behind = choose_head(spec, f"{spec.class_prefixes[0]}Model")
        checkpoint = rename_and_validate(spec, raw, expected_shapes(spec, own), own.tie_word_embeddings)

    def try_writing() -> None:
        with spinner("trying to write", progress), new_folder(out, target, overwrite, keep=False) as trial:
            _write(trial, conversion, *build_model(conversion, None))

    conversion = Conversion(
        given=given,
        method_name=name,
        source=checkpoint,
        renamed=rename_relative(checkpoint, own, config),
        layout=layout,
        spec=spec,
        left_behind=left_behind,
        source_config=own,
        config=config,
        try_writing=try_writing,
        options=SimpleNamespace(**options),
        texts=found,
        skip_unreadable=skip_unreadable,
        seed=seed,
        device=place,
        progress=progress,
    )
    with spinner("converting", progress and not chosen.learns):  # learning has its own progress bars
        model, changed = build_model(conversion, APPLY.get(name))
    with spinner("writing and checking", progress), new_folder(out, target, overwrite) as unfinished:
        report = _write(unfinished, conversion, model, changed)
    if failed := "; ".join(report.failed_thresholds):
        poor = f"{out}: the result was written, but is not close to its source: {failed}"
        warnings.warn(f"{poor}. Try more steps, or train it further", PoorConversionWarning, stacklevel=3)
    return report


def _write(
    folder: Path, conversion: Conversion, model: RelPosBertPreTrainedModel, changed: Mapping[str, str]
) -> ConversionReport:
    """Write all files of the result, read its weights back, and compare them; returns the report.

    Args:
        changed: note on each tensor that the method changed, from `build_model`.
    """
    layout, left = conversion.layout, conversion.left_behind
    encoder = folder / layout.encoder
    model.save_pretrained(encoder)
    files = layout.copy(folder, model)
    reloaded = type(model).from_pretrained(encoder, dtype="auto", local_files_only=True)
    if conversion.new_length is not None:
        layout.write_length(folder, conversion.new_length)
    steps = list_steps(model, conversion.renamed, changed, left)
    compare_tensors(model, reloaded, conversion.renamed, steps)
    notes, difference = [conversion.abilities], None
    if conversion.method.exact and conversion.spec.stock is not None:
        difference = compare_outputs(conversion, reloaded, rounded=bool(changed))
    elif conversion.method.exact:
        notes.append(NOT_COMPARED)
    if parts := {str(step.source).partition(".")[0] for step in steps if left and step.note == left}:
        notes.append(f"not converted: {', '.join(sorted(parts))} ({left})")
    if layout.listed and not has_vocabulary(files):
        notes.append(NO_TOKENIZER)
    report = ConversionReport(
        source=str(conversion.given["source"]),
        revision=layout.revision,
        out=str(conversion.given["out"]),
        architecture=conversion.spec.head,
        converted_to=type(model).__name__,
        method=conversion.method_name,
        position_embedding_type=conversion.config.position_embedding_type,
        position_options=resolved_options(conversion.config),
        method_options=vars(conversion.options),
        arguments=conversion.arguments,
        dtype=str(conversion.source.dtype).removeprefix("torch."),
        steps=steps,
        difference=difference,
        files=files,
        is_sentence_encoder=layout.pools and has_vocabulary(files),
        versions={"hf_relpos": __version__, "transformers": transformers.__version__, "torch": torch.__version__},
        details=conversion.details,
        notes=tuple(notes),
    )
    write_json(folder / REPORT, report.to_dict(), indent=2)
    card = model_card(report, reloaded.config, conversion.limit, source_metadata(layout.top))
    write_text(folder / CARD, card)
    return report
