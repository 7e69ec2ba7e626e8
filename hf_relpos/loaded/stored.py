"""Read the tensors of the checkpoint that a model was loaded from, one by one, under the model's names."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoints.files import open_tensors, weight_files
from ..families.loading import state_dict, weights_here
from ..host.loader import converted_tensors


def find_weights(model: PreTrainedModel, source: Any = None) -> list[str]:
    """Paths of the safetensors that a model was loaded from; the Hub's from its cache.

    Args:
        source: folder, file or Hub repository; None for where the model says that it comes from.

    Raises:
        ValueError: if there are none.
    """
    place = str(source or model.name_or_path or "")
    if os.path.isfile(place):
        return [place]
    revision = getattr(model.config, "_commit_hash", None) if source is None else None
    folder = weights_here(os.path.expanduser(place), {"revision": revision}) if place else None
    files = weight_files(folder) if folder else []
    if not files:
        remedy = "give source, the folder or file that it was loaded from"
        raise ValueError(f"{place or type(model).__name__}: no safetensors to compare the model with; {remedy}")
    return files


def stored_tensors(
    model: PreTrainedModel, files: list[str], contents: bool = True
) -> Iterator[tuple[str, list[str], dict[str, torch.Tensor]]]:
    """What Transformers' loader makes of the tensors in files, as `host.loader.converted_tensors`.

    Args:
        contents: whether to read them; if not, tensors are on the meta device.

    Raises:
        ValueError: for a broken file.
    """
    if contents and getattr(model.config, "converted_from", None):
        architecture = type(model).__name__.removeprefix("RelPos")
        found = state_dict(os.path.dirname(files[0]), architecture, {}, by_tensors=True)
        if found is not None:  # of another architecture, which ours read as a whole
            yield from converted_tensors(model, found[1], found[1].__getitem__)
            return
    owner: dict[str, Any] = {}
    with ExitStack() as stack:
        for path in files:
            file = stack.enter_context(open_tensors(path))
            owner |= dict.fromkeys(file.keys(), file)

        def read(name: str) -> torch.Tensor:
            if contents:
                tensor: torch.Tensor = owner[name].get_tensor(name)
                return tensor
            return torch.empty(owner[name].get_slice(name).get_shape(), device="meta")

        yield from converted_tensors(model, owner, read)
