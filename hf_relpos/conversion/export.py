"""Export a model as a checkpoint of its original architecture."""

import json
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from ..checkpoints.errors import ConversionError, abbreviate, conversion_errors
from ..checkpoints.hub import download
from ..checkpoints.paths import local_folder
from ..checkpoints.weights import TOKENIZER_FILES
from ..families.family import NOT_KEPT, Family
from ..families.loading import directly_read
from ..families.names import is_table
from ..families.recognition import recognise
from ..families.registry import FAMILIES
from ..files import write_json
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..models.modeling_relpos_bert import HEADS, RelPosBertPreTrainedModel
from ..schemes.registry import scheme_parts
from .build import ARCHITECTURES
from .configurations import source_config
from .folder import Layout, check_target, new_folder
from .verify import under_own_names


# Fields that do not change the outputs, and those of the positions, which are compared with their defaults.
NO_EFFECT = {*NOT_KEPT, "converted_from", "save_code", "tokenizer_class", "unpad_inputs", "use_cache"}
NO_EFFECT |= {"position_options", "max_position_embeddings"}  # in the scheme's resolved options


@conversion_errors()
def export_checkpoint(
    source: str | Path | RelPosBertPreTrainedModel, out: str | Path, *, overwrite: bool = False
) -> str:
    """Write a model that was read from another architecture, such as DeBERTa, as a checkpoint of that architecture.

    This is the inverse of `hf_relpos.convert` with the method `exact` (or `keep`, with the source's scheme), and of
    reading such a checkpoint with `from_pretrained`. Weights that were not trained are restored bit for bit. The
    folder is written under another name, and renamed when it is complete.

    Args:
        source: folder that `save_pretrained` or `convert` wrote, or a model.
        out: folder to write. The tokenizer's files are copied from the source, or from the folder or Hub repository
            that the model was loaded from. If there are none, a warning is raised.
        overwrite: replace an existing `out` that holds only a checkpoint.

    Returns:
        Name of the class of the exported model.

    Raises:
        ConversionError: if the model was not read from another architecture, has a field, tensor or head that the
            architecture lacks, or the folder cannot be written.
    """
    target = check_target(out, overwrite, source if isinstance(source, str | Path) else None)
    model = source if isinstance(source, RelPosBertPreTrainedModel) else _load(Path(source))
    spec = _spec(model)
    stock = None if spec.stock is None else _stock_model(model, spec)
    origin = _origin(model)
    with new_folder(out, target, overwrite) as unfinished:
        if stock is None:
            _write_for_own_code(unfinished, model, spec)
        else:
            stock.save_pretrained(unfinished)
        copied = () if origin is None else Layout(origin).copy(unfinished, stock or model)
    if not set(copied) & set(TOKENIZER_FILES):
        lack = f"{out} has no tokenizer, because none was found in {origin or model.name_or_path or 'the model'}"
        warnings.warn(f"{lack}; save one there, otherwise AutoTokenizer creates an empty one", stacklevel=3)
    return spec.head


def _origin(model: RelPosBertPreTrainedModel) -> Path | None:
    """The folder that a model was loaded from, downloaded if it is on the Hub; None if there is none any more."""
    name, commit = model.name_or_path, getattr(model.config, "_commit_hash", None)
    if not name:
        return None
    with suppress(ConversionError):
        return local_folder(name) or download(name, commit, "", (*TOKENIZER_FILES, "generation_config.json"))
    return None


def _load(folder: Path) -> RelPosBertPreTrainedModel:
    """Load the model in a folder with the class that its configuration names."""
    if not folder.is_dir():
        raise ConversionError(f"source = '{folder}' is not a folder; give one that `save_pretrained` wrote")
    with conversion_errors(kinds=(OSError, ValueError)):
        config = RelPosBertConfig.from_pretrained(folder)
    names = {head.__name__: head for head in HEADS.values()}
    name = (config.architectures or ["RelPosBertModel"])[0]
    if name not in names:
        raise ConversionError(f"{folder}: architectures = {name!r} is not a class of hf_relpos; nothing to export")
    return names[name].from_pretrained(folder, dtype="auto", local_files_only=True)


def _spec(model: RelPosBertPreTrainedModel) -> Family:
    """The description of the exported checkpoint.

    Raises:
        ConversionError: for a model whose outputs that checkpoint's class cannot compute.
    """
    family = directly_read(model.config.converted_from or {})
    if family is None:
        known = ", ".join(repr(name) for name, each in FAMILIES.items() if each.read_directly)
        source = f"converted_from = {model.config.converted_from!r}"
        raise ConversionError(f"{source}: only models that were read from one of these can be exported: {known}")
    spec = recognise(Path("config.json"), _fields(model.config, family))
    head = next(name for name, kind in ARCHITECTURES.items() if isinstance(model, kind))
    heads = spec.heads_by_stock()
    if head not in heads:
        known = f"{family.class_prefixes[0]} has no such head, only {', '.join(heads)}"
        raise ConversionError(f"{type(model).__name__}: {known}")
    spec = spec.with_head(heads[head])
    if spec.cut:
        spec.config["max_position_embeddings"] += spec.cut
    own, again = model.config, source_config(spec)
    fields = {name: value for name, value in own.to_dict().items() if name not in NO_EFFECT}
    differing = [name for name, value in fields.items() if again.to_dict().get(name, value) != value]
    if scheme_parts(own) != scheme_parts(again):
        differing += ["position_embedding_type", "position_options"]
    if differing:
        listed = ", ".join(f"{name} = {getattr(own, name)!r}" for name in differing)
        known = f"{spec.head} supports only {', '.join(repr(getattr(again, name)) for name in differing)}"
        raise ConversionError(f"{listed}: {known}; set it back, or keep the model in the format of hf_relpos")
    return spec


def _fields(config: RelPosBertConfig, family: type[Family]) -> dict[str, Any]:
    """config.json of the architecture: common fields from our configuration, the others from `converted_from`."""
    ours, fields = RelPosBertConfig().to_dict(), json.loads(config.to_json_string(use_diff=False))
    theirs = CONFIG_MAPPING[family.stock or "bert"]().to_dict()
    unknown = ("tokenizer_class", *family.dropped_fields, *NOT_KEPT)  # not in our configuration
    kept = {name: value for name, value in fields.items() if (name in theirs or name not in ours)}
    return {name: value for name, value in kept.items() if name not in unknown} | dict(config.converted_from or {})


@torch.no_grad()
def _write_for_own_code(folder: Path, model: RelPosBertPreTrainedModel, spec: Family) -> None:
    """Write config.json and model.safetensors in the layout of an architecture without a class in Transformers.

    Tied tensors are written once; the architecture's code ties them again.
    """
    written: dict[str, torch.Tensor] = {}
    places: set[int] = set()
    for name, tensor in spec.pack(model.state_dict()).items():
        own = spec.original_name(name)
        if own and tensor.data_ptr() not in places:
            places.add(tensor.data_ptr())
            rows = spec.cut if is_table(name) else 0  # before that of position 0, which only padding uses
            written[own] = nn.functional.pad(tensor, (0, 0, rows, 0)) if rows else tensor.contiguous()
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    dtype = str(model.dtype).removeprefix("torch.")
    fields = {name: value for name, value in spec.config.items() if not name.startswith("_")}  # not what tensors told
    write_json(folder / "config.json", {**fields, "torch_dtype": dtype}, indent=2)


@torch.no_grad()
def _stock_model(model: RelPosBertPreTrainedModel, spec: Family) -> PreTrainedModel:
    """The model of Transformers' class, with the same tensors.

    Raises:
        ConversionError: for tensors of the model that the class does not have.
    """
    config = CONFIG_MAPPING[str(spec.stock)].from_dict(spec.config)
    with torch.device("meta"):
        stock = getattr(transformers, spec.head)(config)
    base = spec.architecture == "BertModel"
    own, tensors = stock.state_dict(), model.state_dict()
    used = {spec.rename(each, base)[0] for each in spec.unpack(own)}
    placed = {tensors[each].data_ptr() for each in used if each in tensors}
    stray = [each for each, tensor in tensors.items() if tensor.data_ptr() not in placed]
    stray = [each for each in stray if not (base and each.startswith("pooler."))]
    lost = [each for each in used if each not in tensors]
    if stray or lost:
        found = f"{abbreviate(stray) or 'none'}; tensors that the model lacks: {abbreviate(lost) or 'none'}"
        remedy = "Merge adapters, and undo changes of the module tree"
        raise ConversionError(f"tensors that {spec.head} does not have: {found}. {remedy}")
    stock.load_state_dict(under_own_names(spec, own, tensors), assign=True)
    stock.tie_weights()
    stock.config.dtype = model.dtype
    return stock
