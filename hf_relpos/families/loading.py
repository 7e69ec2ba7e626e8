"""Read checkpoints of other families in `from_pretrained`, without a converted folder.

This covers families whose layout or positions differ from stock BERT's; Transformers reads the others.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..checkpoints.files import variant_name
from ..checkpoints.hub import find_folder
from ..checkpoints.weights import PICKLED_FILES, SAFETENSORS_FILES, has_safetensors, read_tensors, tensor_names
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..models.loading import hub_arguments
from .family import Family
from .names import is_buffer, is_table
from .recognition import recognise
from .registry import FAMILIES, family_of, resemblance as resemblance
from .tensors import rename_tensors


# Values of `model_type` of checkpoints that may be of another architecture, by their tensors.
MARKED = {family.marks for family in FAMILIES.values() if family.told_by_tensors}


def directly_read(config: Mapping[str, Any], names: Iterable[str] = ()) -> type[Family] | None:
    """The directly read family that configuration or tensors show; None for none."""
    family = FAMILIES.get(family_of(config, names)[0])
    return family if family and family.read_directly else None


def replaces_own_code(source: Any, config: Mapping[str, Any], hub: Mapping[str, Any]) -> bool:
    """Whether a checkpoint of one of these families would run code of its own, for lack of a class in Transformers.

    Args:
        source: folder or Hub repository; tensors are looked at where they are on this machine.
        config: content of config.json.
        hub: arguments of `from_pretrained` that say where on the Hub the files are.
    """
    if "auto_map" not in config and config.get("model_type", "bert") in CONFIG_MAPPING:
        return False
    family = directly_read(config, _names_here(source, config, hub))
    return family is not None and family.stock is None


def _names_here(source: Any, config: Mapping[str, Any], hub: Mapping[str, Any]) -> list[str]:
    """Names of the tensors of a checkpoint that may be of another architecture than it says, if it is on this machine.

    Checkpoints that call themselves BERT are told when their weights are read.
    """
    if config.get("model_type", "bert") not in MARKED - {"bert"}:
        return []
    folder = weights_here(source, hub)
    return tensor_names(folder) if folder else []


def conversion_of(model_type: str, source: Any) -> str:
    """What to do with a checkpoint of a model_type that `from_pretrained` of our classes does not read."""
    if model_type not in FAMILIES:
        return "`hf-relpos families` lists what is read"
    return f"it is {FAMILIES[model_type].title}; convert it with `hf-relpos convert {source} OUT` and load OUT"


def refuse_converted_only(source: Any, config: Mapping[str, Any]) -> None:
    """Refuse a NEZHA checkpoint: only `convert` reads it, as Transformers 5 has no class for it.

    Raises:
        ValueError: with the command that converts it.
    """
    name, mark = family_of(config)
    if name in FAMILIES and name not in CONFIG_MAPPING and not FAMILIES[name].read_directly:
        raise ValueError(f"{source or 'BertConfig'}: {mark}: {conversion_of(name, source)}")


def config_fields(source: Any, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Fields of a RelPosBertConfig, from those of a config.json.

    Args:
        source: checkpoint of the configuration, for errors.
        config: content of config.json.

    Returns:
        The fields; None for a configuration that does not show another architecture.

    Raises:
        ValueError: for a configuration that has no counterpart here.
    """
    refuse_converted_only(source, config)
    names = _names_here(source, config, {})
    return None if directly_read(config, names) is None else _fields(recognise(Path(str(source)), config, names))


def state_dict(
    source: Any, architecture: str, arguments: Mapping[str, Any], by_tensors: bool
) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    """Fields of a RelPosBertConfig, and tensors under our names.

    Args:
        source: folder or Hub repository.
        architecture: class of stock BERT with the head to load.
        arguments: arguments of `from_pretrained`.
        by_tensors: also recognise another architecture with BERT's model_type by its tensors.

    Returns:
        Fields and tensors; None for a checkpoint that is not of another architecture.

    Raises:
        ValueError: for a checkpoint that has no counterpart here, or is broken.
    """
    hub = hub_arguments(arguments)
    config, _ = PreTrainedConfig.get_config_dict(source, **hub)
    if not config:  # an adapter's folder, which Transformers before 5.23 raises an OSError for
        return None
    model_type = config.get("model_type", "bert")
    # looking at the tensors of each BERT would download them twice
    if directly_read(config) is None and (model_type not in MARKED or (model_type == "bert" and not by_tensors)):
        return None
    variant = arguments.get("variant")
    folder = _folder(source, hub, variant)
    names = tensor_names(folder, variant=variant)
    if names and directly_read(config, names) is None:
        return None
    # as in Transformers, which reads pickles of tensors alone
    stored = read_tensors(folder, arguments.get("use_safetensors") is not True, variant)
    if directly_read(config, stored) is None:
        return None
    spec = recognise(folder, config, stored)
    if (head := spec.heads_by_stock().get(architecture)) is not None:
        spec = spec.with_head(head)
    renamed, _ = rename_tensors(spec, spec.unpack(stored), base=architecture == "BertModel")
    kept = {name: tensor for name, tensor in renamed.items() if not is_buffer(name)}
    return _fields(spec), {name: tensor[spec.cut :] if is_table(name) else tensor for name, tensor in kept.items()}


def weights_here(source: Any, hub: Mapping[str, Any]) -> Path | None:
    """The folder of the weights if they are on this machine, as files or in the Hub's cache."""
    with suppress(OSError, ValueError):  # not in the cache, or no name of a repository
        return _folder(source, {**hub, "local_files_only": True}, None)
    return None


def _folder(source: Any, hub: Mapping[str, Any], variant: str | None) -> Path:
    """The folder of the weights, downloaded if it is on the Hub."""
    options = {name: value for name, value in hub.items() if name not in ("proxies", "subfolder")}

    def fetch(patterns: tuple[str, ...]) -> Path:
        # shards of a variant: model.fp16-00001-of-00002.safetensors, once model-00001-of-00002.fp16.safetensors
        wanted = [variant_name(pattern, variant and f"{variant}*") for pattern in patterns]
        return find_folder(source, wanted, hub.get("subfolder") or "", **options)

    folder = fetch(SAFETENSORS_FILES)
    return folder if has_safetensors(folder, variant) else fetch((*SAFETENSORS_FILES, *PICKLED_FILES))


def _fields(spec: Family) -> dict[str, Any]:
    dtype = spec.config.get("dtype", spec.config.get("torch_dtype"))
    return {**spec.fields, **({} if dtype is None else {"dtype": dtype}), "model_type": RelPosBertConfig.model_type}
