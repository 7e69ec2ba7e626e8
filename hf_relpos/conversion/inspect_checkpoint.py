"""Recognise a checkpoint, and name the command to run on it."""

from dataclasses import dataclass
from pathlib import Path

from ..families.checkpoint import CHECKPOINT_FILES, download, has_safetensors, read_config, tensor_names
from ..families.paths import local_folder
from ..families.recognition import CheckpointSpec, check_tables, recognise
from ..families.registry import FAMILIES, OWN
from ..models.checkpoint_files import read_json
from ..schemes.registry import STOCK_SCHEME
from .folder import SENTENCE_CONFIG


# Parts of the names of position tensors, in the families and here.
POSITION_TENSORS = ("position_embeddings", "distance_embedding", "rel_embeddings", "relative_attention_bias")


@dataclass(frozen=True)
class Inspection:
    """The description of a checkpoint.

    Attributes:
        name: name given by the caller.
        family: key of `FAMILIES`, or `relpos_bert`.
        architecture: the class in its config.json; empty for none.
        positions: absolute or the scheme with its options, and the evidence.
        trained_length: `max_position_embeddings`, in tokens; None if the configuration has none.
        max_seq_length: tokens to which its SentenceTransformer cuts texts; None for none.
        tables: names of the position tensors.
        elsewhere: what Transformers v5 without this package does with it.
        load: expression that reads a relative checkpoint of another architecture as it is; empty for none.
        command: the command that converts it; empty if none is needed.
    """

    name: str
    family: str
    architecture: str
    positions: str
    trained_length: int | None
    max_seq_length: int | None
    tables: tuple[str, ...]
    elsewhere: str
    load: str
    command: str


def inspect_checkpoint(source: str | Path, revision: str | None = None) -> Inspection:
    """Recognise a checkpoint by its config.json and the names of its tensors, which are not read.

    Args:
        source: folder or Hub repository, whose files are downloaded as for a conversion.
        revision: revision of the Hub repository.

    Raises:
        ConversionError: for a checkpoint that cannot be found, is broken or has an unknown architecture.
    """
    files = (*CHECKPOINT_FILES, SENTENCE_CONFIG)
    folder = local_folder(source, revision) or download(str(source), revision, "", files)[0]
    names = tensor_names(folder)
    spec = recognise(folder, read_config(folder), names)
    check_tables(spec, folder, names)
    family = next((name for name, family in FAMILIES.items() if family is spec.family), "relpos_bert")
    architectures = spec.config.get("architectures") or [""]
    return Inspection(
        str(source),
        family,
        str(architectures[0]),
        _positions(spec),
        spec.fields.get("max_position_embeddings"),
        read_json(folder / SENTENCE_CONFIG).get("max_seq_length") if (folder / SENTENCE_CONFIG).is_file() else None,
        tuple(name for name in names if any(part in name for part in POSITION_TENSORS)),
        _elsewhere(spec),
        _load(spec, str(source)),
        _command(spec, folder, str(source)),
    )


def _positions(spec: CheckpointSpec) -> str:
    """Absolute, or scheme and options, and the field or tensor that shows it."""
    schemes = [spec.scheme] if isinstance(spec.scheme, str) else spec.scheme or []
    kinds = [STOCK_SCHEME] * spec.absolute + schemes
    options = ", ".join(f"{name} = {value!r}" for name, value in spec.options.items())
    return " + ".join(kinds) + (f" ({options})" if options else "") + f": {spec.evidence}"


def _elsewhere(spec: CheckpointSpec) -> str:
    """What Transformers v5 without this package does with the checkpoint, and with code that comes with it."""
    said = _without_remote_code(spec)
    if spec.family is OWN or not spec.config.get("auto_map"):
        return said
    return (
        f"{said}. With its remote code, Transformers leaves buffers uninitialised that are computed when the model is "
        "built; hf_relpos.fill_buffers(model) names and fills them, and --trust-remote-code lists them"
    )


def _without_remote_code(spec: CheckpointSpec) -> str:
    if spec.family is OWN:
        return "loads it after `import hf_relpos`, or with trust_remote_code=True if its code was saved with it"
    if spec.legacy_attention is not None:
        return "silently wrong: it drops the relative positions, and the load report lists them as UNEXPECTED"
    if spec.family.stock is None:
        return "has no class for it; loaded as a BERT, its feed-forward weights would be random"
    return "loads it right; hf_relpos.optimize(model) makes it faster on a CPU"


def _load(spec: CheckpointSpec, name: str) -> str:
    """The expression that reads a relative checkpoint of another architecture as it is; empty if none does."""
    bert = spec.family is FAMILIES["bert"] and spec.legacy_attention is not None
    if spec.family is OWN or not (spec.family.read_directly or bert):
        return ""
    architectures = spec.config.get("architectures") or [""]
    stock = spec.family.heads(spec.config).get(str(architectures[0]), "BertModel")
    return f"hf_relpos.RelPos{stock}.from_pretrained({name!r})"


def _command(spec: CheckpointSpec, folder: Path, name: str) -> str:
    """The command that converts it to a relative model; empty if it is one already."""
    if spec.family is OWN and not spec.absolute:
        return ""
    text = " --text FILE" if spec.absolute and spec.scheme is None else ""
    pickle = "" if has_safetensors(folder) else " --allow-pickle"
    return f"hf-relpos convert {name} OUT{text}{pickle}"
