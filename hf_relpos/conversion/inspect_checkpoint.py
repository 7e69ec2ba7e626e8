"""Recognise a checkpoint, and name the command to run on it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, PreTrainedModel

from ..checkpoints.errors import ConversionError, UnsupportedError, abbreviate, conversion_errors
from ..checkpoints.files import INDEX, WEIGHTS, check_weights, read_json, weight_files
from ..checkpoints.hub import download
from ..checkpoints.paths import local_folder
from ..checkpoints.weights import CHECKPOINT_FILES, PICKLES, has_safetensors, tensor_names
from ..families.bert import Own
from ..families.family import Family, first_class
from ..families.names import TABLE
from ..families.recognition import recognise
from ..families.registry import FAMILIES, resemblance
from ..loaded.check import planned_load
from ..schemes.registry import STOCK_SCHEME
from .configurations import read_config
from .folder import MODULES, SENTENCE_CONFIG


# Parts of the names of position tensors, in the families and here.
POSITION_TENSORS = ("position_embeddings", "distance_embedding", "rel_embeddings", "relative_attention_bias")
# Likewise of fields of config.json, with the scheme that each shows.
POSITION_FIELDS = {"rope": "rope", "rotary": "rope", "alibi": "alibi", "relative_attention": "relative"}


@conversion_errors()
def inspect_checkpoint(source: str | Path, revision: str | None = None) -> dict[str, Any]:
    """Recognise a checkpoint by its config.json and the names and shapes of its tensors, which are not read.

    Args:
        source: folder or Hub repository, whose files are downloaded as for a conversion.
        revision: revision of the Hub repository.

    Returns:
        - name: name given by the caller.
        - family: key of `FAMILIES`, or `relpos_bert`, or the model_type of an architecture that is not converted.
        - architecture: the class in its config.json; empty for none.
        - positions: absolute or the scheme with its options, and the evidence.
        - trained_length: `max_position_embeddings`, in tokens; None if the configuration has none.
        - max_seq_length: tokens to which its SentenceTransformer cuts texts; None for none.
        - tables: names of the position tensors.
        - elsewhere: what Transformers v5 without this package does with it.
        - load: expression that reads a relative checkpoint of another architecture as it is; empty for none.
        - command: the command that converts it; empty if none is needed, or there is none.
        - refused: why a checkpoint of a known architecture is not converted as it is; empty if it is.

    Raises:
        ConversionError: for a checkpoint that cannot be found, is broken or incomplete, or has an architecture that
            neither this package nor Transformers knows.
    """
    files = (*CHECKPOINT_FILES, SENTENCE_CONFIG, MODULES)
    here = local_folder(source, revision)
    folder = here or download(str(source), revision, "", files)
    config = read_config(folder)
    weights = weight_files(folder)
    check_weights(weights)
    if here and not weights and not any(path for pattern in PICKLES for path in folder.glob(pattern)):
        raise ConversionError(f"{folder}: no {WEIGHTS} or {INDEX}; restore the weights")
    names = tensor_names(folder)
    spec, refused = None, ""
    try:
        spec = recognise(folder, config, names)
        refused = _without_positions(spec, names, str(source))
    except UnsupportedError as error:
        if config.get("model_type") not in CONFIG_MAPPING and "auto_map" not in config:
            raise
        refused = str(error) if config.get("model_type") in FAMILIES else ""
    sentences = folder / SENTENCE_CONFIG
    tables = tuple(name for name in names if any(part in name for part in POSITION_TENSORS))
    return {
        "name": str(source),
        "family": (spec.name if spec else "") or str(config.get("model_type", "")),
        "architecture": first_class(config),
        "positions": _positions(spec) if spec else _positions_elsewhere(config, tables),
        "trained_length": (spec.fields if spec else config).get("max_position_embeddings"),
        "max_seq_length": read_json(sentences).get("max_seq_length") if sentences.is_file() else None,
        "tables": tables,
        "elsewhere": _elsewhere(folder, config, weights, spec),
        "load": _load(spec, str(source)) if spec else "",
        "command": _command(spec, folder, str(source)) if spec and not refused else "",
        "refused": refused,
    }


def _positions(spec: Family) -> str:
    """Absolute, or scheme and options, and the field or tensor that shows it."""
    found = spec.positions
    schemes = [found.scheme] if isinstance(found.scheme, str) else found.scheme or []
    kinds = [STOCK_SCHEME, *schemes] if found.absolute else schemes
    options = ", ".join(f"{name} = {value!r}" for name, value in found.options.items())
    return " + ".join(kinds) + (f" ({options})" if options else "") + f": {spec.evidence}"


def _positions_elsewhere(config: Mapping[str, Any], tables: tuple[str, ...]) -> str:
    """What config.json and the tensors of an architecture that is not converted show."""
    if named := config.get("position_embedding_type"):
        return f"{named}: position_embedding_type"
    for part, scheme in POSITION_FIELDS.items():
        if field := next((name for name, value in config.items() if part in name and value), None):
            return f"{scheme}: {field} = {config[field]!r}"
    return f"{STOCK_SCHEME}: {tables[0]}" if tables else "not named in config.json"


def _without_positions(spec: Family, names: list[str], source: str) -> str:
    """Likely cause and remedy if an absolute checkpoint has no position table; empty if it has one."""
    has_table = not names or any(POSITION_TENSORS[0] in name for name in names)
    if isinstance(spec, Own) or has_table or not spec.positions.absolute:
        return ""
    remedy = resemblance(names, source, spec.config.get("model_type", ""), missing=[TABLE])
    return f"the weights have no table of positions. {remedy}"


def _elsewhere(folder: Path, config: Mapping[str, Any], files: list[str], spec: Family | None) -> str:
    """What Transformers v5 without this package does with the checkpoint, and with code that comes with it."""
    if isinstance(spec, Own):
        return "loads it with `import hf_relpos`, or with trust_remote_code=True if its code is saved with it"
    said = _without_remote_code(folder, config, files, spec)
    if not config.get("auto_map"):
        return said
    return (
        f"{said}. Its remote code: Transformers leaves buffers uninitialised that are computed when the model is "
        "built. --trust-remote-code runs it here and compares what it loads with the files, as "
        "hf_relpos.verify_weights(model) does; hf_relpos.initialize_buffers(model) fills the buffers"
    )


def _without_remote_code(folder: Path, config: Mapping[str, Any], files: list[str], spec: Family | None) -> str:
    """What a load by a class of Transformers would do, which is built on the meta device."""
    if config.get("model_type") not in CONFIG_MAPPING:
        return "has no class for it: AutoModel raises an error"
    try:
        model = _stock_model(folder)
    except Exception as error:  # whatever a class raises for an unsound configuration
        return f"has a class for it, which cannot be built from config.json ({type(error).__name__}: {error})"
    count = len(list(model.parameters()))
    random, left, other_sizes = planned_load(model, files) if files else ([], [], [])
    if other_sizes:
        return f"raises an error: sizes other than config.json's of {abbreviate(other_sizes, 2)}"
    random = [name for name in random if "pooler." not in name]  # masked language models are saved without it
    faults = []
    if left:
        what = "its relative positions" if any("distance_embedding" in name for name in left) else "tensors"
        faults.append(f"leaves out {what} (UNEXPECTED in its load report: {abbreviate(left, 1)})")
    if random:
        listed = f"MISSING in its load report: {abbreviate(random, 2)}"
        faults.append(f"starts {len(random)} of {count} parameters at random ({listed})")
    if faults:
        return f"reads it as {type(model).__name__}, and {' and '.join(faults)}: wrong outputs"
    rotations = (spec.positions.options.get("rope_parameters") if spec else None) or {}
    is_dynamic = rotations.get("rope_type") == "dynamic"
    trained = rotations.get("original_max_position_embeddings") if is_dynamic else None
    past = f", right up to {trained:,} tokens" if trained else ""
    kinds = (transformers.MODEL_FOR_MASKED_LM_MAPPING, transformers.MODEL_FOR_TEXT_ENCODING_MAPPING)
    encodes = any(type(model.config) in kind for kind in kinds)
    encodes |= spec is not None or (folder / MODULES).is_file()  # such as Qwen3-Embedding
    decodes = type(model.config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    faster = "; used as an encoder, hf_relpos.optimize(model) may make it faster on a CPU" if decodes else ""
    faster = "; hf_relpos.optimize(model) makes that faster on a CPU" if encodes else faster
    return f"loads it as it is{past}{faster}"


def _stock_model(folder: Path) -> PreTrainedModel:
    """The class that config.json names, or else the encoder, without memory for its weights."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    named: Any = getattr(transformers, first_class(config.to_dict()), None)
    kind = getattr(named, "config_class", None)
    build = named if kind is not None and isinstance(config, kind) else AutoModel.from_config
    with torch.device("meta"):
        model: PreTrainedModel = build(config)
    return model


def _load(spec: Family, name: str) -> str:
    """The expression that reads a relative checkpoint of another architecture as it is; empty if none does."""
    bert = spec.name == "bert" and spec.legacy_terms is not None
    if isinstance(spec, Own) or not (spec.read_directly or bert):
        return ""
    stock = spec.heads().get(first_class(spec.config), "BertModel")
    return f"hf_relpos.RelPos{stock}.from_pretrained({name!r})"


def _command(spec: Family, folder: Path, name: str) -> str:
    """The command that converts it to a relative model; empty if it is one already, or was converted."""
    if isinstance(spec, Own) and (spec.positions.scheme is not None or not spec.positions.absolute):
        return ""
    text = " --texts FILE" if spec.positions.absolute and spec.positions.scheme is None else ""
    pickle = "" if has_safetensors(folder) else " --allow-pickle"
    return f"hf-relpos convert {name} OUT{text}{pickle}"
