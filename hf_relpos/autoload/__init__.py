"""Optimize what a program loads, without a change of its code: `HF_RELPOS_OPTIMIZE=1`, and `hf-relpos run`.

`PreTrainedModel.from_pretrained` is wrapped. So are the constructors of sentence-transformers' models: they know the
tokenizer, and their other modules may read padding. A model that is loaded in the course of another load is optimized
once, with the outermost object. `hf-relpos run` puts the folder of this file on PYTHONPATH, for its `sitecustomize`.
"""

import contextlib
import functools
import os
import sys
import threading
from typing import Any

from ..deferred import when_auto_classes_are_imported, when_imported


# Environment variables: "0" or a precision, where "1" is float32; and `padding` of `optimize`.
OPTIMIZE, PADDING = "HF_RELPOS_OPTIMIZE", "HF_RELPOS_PADDING"
SENTENCE_TRANSFORMERS = ("SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVectorEncoder")


class _Load(threading.local):
    """The load that a thread is in: how many calls deep, and whether it has loaded a model."""

    depth = 0
    has_model = False


_load = _Load()


def start() -> "Autoload":
    """Do what the environment variables say."""
    precision = os.environ[OPTIMIZE]
    return Autoload("float32" if precision == "1" else precision, os.environ.get(PADDING) or "zeros")


class Autoload:
    """Applies `optimize` to each model that is loaded from now on, and says so in one line on standard error.

    An error of `optimize` is such a line, too, and leaves the model as it is.
    """

    def __init__(self, precision: str = "float32", padding: str = "zeros") -> None:
        """
        Args:
            precision, padding: as of `optimize`.
        """
        self.precision, self.padding = precision, padding
        self.is_active = True
        self.replaced: list[tuple[type, str, Any, Any]] = []
        when_auto_classes_are_imported(self._wrap_transformers)
        when_imported("sentence_transformers", self._wrap_sentence_transformers)

    def undo(self) -> None:
        """Load models as before; those that are loaded stay optimized."""
        self.is_active = False  # also where other code has wrapped the wrapper
        while self.replaced:
            owner, name, before, after = self.replaced.pop()
            if vars(owner)[name] is after:
                setattr(owner, name, before)

    def _wrap_transformers(self) -> None:
        from transformers import PreTrainedModel

        if self.is_active:
            self._wrap(PreTrainedModel, "from_pretrained")

    def _wrap_sentence_transformers(self) -> None:
        for name in SENTENCE_TRANSFORMERS if self.is_active else ():
            kind = getattr(sys.modules["sentence_transformers"], name, None)
            if isinstance(kind, type) and "__init__" in vars(kind):
                self._wrap(kind, "__init__")

    def _wrap(self, owner: type, name: str) -> None:
        """Wrap a constructor, or a class method that returns a model, maybe with what is known of its loading."""
        before = vars(owner)[name]
        function = getattr(before, "__func__", before)

        @functools.wraps(function)
        def load(first: Any, *args: Any, **kwargs: Any) -> Any:
            _load.depth += 1
            try:
                result = function(first, *args, **kwargs)
                _load.has_model |= result is not None
            finally:
                _load.depth -= 1
                has_model = _load.has_model
                if not _load.depth:
                    _load.has_model = False
            if self.is_active and has_model and not _load.depth:
                model = first if result is None else result[0] if isinstance(result, tuple) else result
                # threads of PyTorch belong to the one that calls it, and a process with them could not fork any more
                worker = threading.Thread(target=self._optimize, args=(model,))
                worker.start()
                worker.join()
            return result

        after = load if function is before else classmethod(load)
        self.replaced.append((owner, name, before, after))
        setattr(owner, name, after)

    def _optimize(self, model: Any) -> None:
        try:
            from ..live import optimize

            said = str(optimize(model, self.precision, padding=self.padding))
        except Exception as error:  # the program is to go on
            said = f"left as it is ({type(error).__name__}: {' '.join(str(error).split())})"
        with contextlib.suppress(Exception):  # such as a standard error that nobody reads
            names = (getattr(getattr(each, "config", None), "name_or_path", None) for each in model.modules())
            of = f" of {name}" if (name := next(filter(None, names), None)) else ""
            sys.stderr.write(f"hf-relpos: {type(model).__name__}{of}: {'; '.join(said.splitlines())}\n")
            sys.stderr.flush()
