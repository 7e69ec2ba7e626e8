"""Optimize what a program loads, without a change of its code: `HF_RELPOS_OPTIMIZE=1`, and `hf-relpos run`.

`PreTrainedModel.from_pretrained` is wrapped. So are `pipeline` and the constructors of sentence-transformers' models:
they know the tokenizer, and who reads the outputs. A model that is loaded in the course of another load is optimized
once, with the outermost object. `hf-relpos run` puts the folder of this file on PYTHONPATH, for its `sitecustomize`.
"""

import atexit
import contextlib
import functools
import os
import sys
import threading
from typing import Any

from ..deferred import when_auto_classes_are_imported, when_imported
from ..deprecation import variable
from ..host.cores import threads_of


# Environment variables: "0" or a dtype, where "1" is float32; `unpad`, `join` and `capture` of `optimize`; threads of
# PyTorch, a number or "auto"; "1" for the whole report.
OPTIMIZE, UNPAD, JOIN = "HF_RELPOS_OPTIMIZE", "HF_RELPOS_UNPAD", "HF_RELPOS_JOIN"
CAPTURE, THREADS, VERBOSE = "HF_RELPOS_CAPTURE", "HF_RELPOS_THREADS", "HF_RELPOS_VERBOSE"
WIDTH, SHORTEST = 119, 12  # of the line for a model; and of its name where that is too long
SENTENCE_TRANSFORMERS = ("SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVectorEncoder")


class _Load(threading.local):
    """The load that a thread is in: how many calls deep, and whether it has loaded a model."""

    depth = 0
    has_model = False


_load = _Load()


_started: "Autoload | None" = None


def start() -> "Autoload | None":
    """Do what the environment variables say; a second call does nothing until `undo`."""
    global _started
    dtype = os.environ.get(OPTIMIZE, "0")
    if dtype not in ("", "0") and not (_started and _started.is_active):
        unpad = variable(UNPAD) or "auto"
        is_set = [os.environ.get(name, "0") not in ("", "0") for name in (VERBOSE, JOIN, CAPTURE)]
        if threads := threads_of(os.environ.get(THREADS, "")):  # also where OMP_NUM_THREADS says otherwise
            when_imported("torch", lambda: sys.modules["torch"].set_num_threads(threads))
        _started = Autoload("float32" if dtype == "1" else dtype, unpad, *is_set)
    return _started


class Autoload:
    """Applies `optimize` to each model that is loaded from now on, and says so in one line on standard error.

    An error of `optimize` is such a line, too, and leaves the model as it is.
    """

    def __init__(
        self,
        dtype: str = "float32",
        unpad: str = "auto",
        verbose: bool = False,
        join: bool = False,
        capture: bool = False,
    ) -> None:
        """
        Args:
            dtype, unpad, join, capture: as of `optimize`.
            verbose: print the report of `optimize` below each line.
        """
        self.dtype, self.unpad, self.verbose, self.join, self.capture = dtype, unpad, verbose, join, capture
        self.is_active = True
        self.replaced: list[tuple[Any, str, Any, Any]] = []
        self.reports: list[tuple[str, Any]] = []  # of `optimize`, with the name of a class
        atexit.register(self._say_counts)
        when_auto_classes_are_imported(self._wrap_transformers)
        when_imported("transformers.pipelines", self._wrap_pipelines)
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

    def _wrap_pipelines(self) -> None:
        if self.is_active:
            self._wrap(sys.modules["transformers.pipelines"], "pipeline")

    def _wrap_sentence_transformers(self) -> None:
        for name in SENTENCE_TRANSFORMERS if self.is_active else ():
            kind = getattr(sys.modules["sentence_transformers"], name, None)
            if isinstance(kind, type) and "__init__" in vars(kind):
                self._wrap(kind, "__init__")

    def _wrap(self, owner: Any, name: str) -> None:
        """Wrap a constructor, or a function that returns a model, maybe with what is known of its loading."""
        before = vars(owner)[name]
        function = getattr(before, "__func__", before)

        @functools.wraps(function)
        def load(*args: Any, **kwargs: Any) -> Any:
            _load.depth += 1
            try:
                result = function(*args, **kwargs)
                _load.has_model |= result is not None
            finally:
                _load.depth -= 1
                has_model = _load.has_model
                if not _load.depth:
                    _load.has_model = False
            if self.is_active and has_model and not _load.depth:
                model = args[0] if result is None else result[0] if isinstance(result, tuple) else result
                # threads of PyTorch belong to the one that calls it, and a process with them could not fork any more
                worker = threading.Thread(target=self._optimize, args=(model,))
                worker.start()
                worker.join()
            return result

        after = load if function is before else classmethod(load)
        self.replaced.append((owner, name, before, after))
        setattr(owner, name, after)

    def _say_counts(self) -> None:
        """What became of the calls, at the end; without `verbose` only where more than half of the padding stayed."""
        for kind, report in self.reports:
            counts = report.counts()
            if counts.calls and (self.verbose or counts.padding_computed > 0.5):
                with contextlib.suppress(OSError, ValueError):  # of a standard error that is closed
                    sys.stderr.write(f"hf-relpos: {kind}: {counts}\n")

    def _optimize(self, model: Any) -> None:
        try:
            from ..live import optimize

            report = optimize(model, self.dtype, self.unpad, join=self.join, capture=self.capture)
            said, more = report.summary, str(report)
            self.reports.append((type(model).__name__, report))
        except Exception as error:  # the program is to go on
            more = f"{type(error).__name__}: {' '.join(str(error).split())}"
            said = f"left as it is ({more})"
        with contextlib.suppress(Exception):  # such as a standard error that nobody reads
            module = model if hasattr(model, "modules") else model.model  # of a pipeline
            names = (getattr(getattr(each, "config", None), "name_or_path", None) for each in module.modules())
            kind, name = type(module).__name__, str(next(filter(None, names), ""))
            room = WIDTH - len(f"hf-relpos: {kind} of : ")
            while len(said) > room - SHORTEST and "; " in said:
                said = said.rpartition("; ")[0]
            if len(name) > room - len(said):
                name = f"...{name[len(name) - max(room - len(said) - 3, 0) :]}"
            line = f"hf-relpos: {kind}{' of ' * bool(name)}{name}: {said}"[:WIDTH]
            sys.stderr.write("\n  ".join([line, *more.splitlines() * self.verbose]) + "\n")
            sys.stderr.flush()
