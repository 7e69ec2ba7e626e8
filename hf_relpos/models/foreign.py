"""Checkpoints of other architectures, read as they are: what `import hf_relpos` adds to the code shipped alone.

The package registers a module here; it is imported when the first checkpoint needs it.
"""

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch


class Reader(Protocol):
    """What a registered module has."""

    def config_fields(self, source: Any, config: Mapping[str, Any], architecture: str | None) -> dict[str, Any] | None:
        """Fields of a RelPosBertConfig, from those of a config.json.

        Args:
            source: of the configuration, for errors.
            config: what config.json holds.
            architecture: class of stock BERT whose head is wanted; None for the one that the file names.

        Returns:
            None for a configuration that does not tell another architecture.

        Raises:
            ValueError: for a configuration that has no counterpart here.
        """

    def state_dict(
        self, source: Any, architecture: str, arguments: Mapping[str, Any], by_tensors: bool
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
        """Fields of a RelPosBertConfig, and tensors under our names.

        Args:
            source: folder or Hub repository.
            architecture: class of stock BERT whose head is wanted.
            arguments: of `from_pretrained`.
            by_tensors: whether one that calls itself a BERT may be told by its tensors.

        Returns:
            None for a checkpoint that is not of another architecture.

        Raises:
            ValueError: for one that has no counterpart here, or is broken.
        """


_modules: list[str] = []


def register_reader(module: str) -> None:
    """Let checkpoints of other architectures be read by a module, given by its full name. Idempotent."""
    if module not in _modules:
        _modules.append(module)


def reader() -> Reader | None:
    """The module that was registered; None without the package."""
    return cast(Reader, importlib.import_module(_modules[0])) if _modules else None
