"""The report that Transformers logs after it has loaded a checkpoint, and the layers that PEFT puts adapters on."""

import logging
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


# The logger of the report, which Transformers' function `log_state_dict_report` writes as one record.
LOGGER = logging.getLogger("transformers.modeling_utils")
REPORT = re.compile(r"(\w+) LOAD REPORT from: (.*)")
COLOUR = re.compile(r"\x1b\[[\d;]*m")
# Packages between a filter of that logger and who loads a model.
LOADERS = ("hf_relpos", "logging", "torch", "transformers", "transformers_modules")


def left_out(record: logging.LogRecord, tensors: re.Pattern[str]) -> tuple[str, str] | None:
    """The class of the model and its source, if a record is a report that lists a tensor as left out.

    Args:
        record: any record of the logger.
        tensors: matches the names of the tensors.
    """
    text = COLOUR.sub("", record.getMessage())
    found = REPORT.search(text)
    if found is None or not any("UNEXPECTED" in line and tensors.search(line) for line in text.splitlines()):
        return None
    return found[1], found[2]


def level_of_the_loader() -> int:
    """`stacklevel`, in the function that calls this, of the code that asked Transformers for a model."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in LOADERS:
        frame, level = frame.f_back, level + 1
    return level


@contextmanager
def named_in_reports(source: Any) -> Iterator[None]:
    """The report names a source, where the loader of this thread is given tensors and knows of none."""
    thread = threading.get_ident()

    def name(record: logging.LogRecord) -> bool:
        if record.thread == thread and isinstance(record.msg, str):
            record.msg = record.msg.replace(" from: None\n", f" from: {source}\n", 1)
        return True

    LOGGER.addFilter(name)
    try:
        yield
    finally:
        LOGGER.removeFilter(name)


def register_targets(model_type: str, like: str) -> None:
    """Adapters go on the layers that they go on in models of another type, unless others are given.

    Importing PEFT here costs nothing: Transformers does so for its callbacks, of which `hf_relpos` has one.
    """
    from peft.utils import constants

    for name, targets in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(targets, dict) and like in targets:
            targets.setdefault(model_type, targets[like])
