"""Other ways to run a stock encoder on the CPU: torch.compile, ONNX Runtime, OpenVINO; int8, too.

disentangled-flash is for DeBERTa v2 and v3: its PyTorch backend, without padding. CTranslate2 is for BERT.

Each takes a model and the inputs that it is made with, and returns a call: inputs to the last hidden states. All use
as many threads as PyTorch. What is not installed raises ModuleNotFoundError.
"""

import contextlib
import copy
import functools
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn


Inputs = dict[str, torch.Tensor]
Run = Callable[[Inputs], torch.Tensor]
PACKAGES = ("onnx", "onnxscript", "onnxruntime", "openvino", "nncf", "disentangled-flash", "ctranslate2")


def versions() -> dict[str, str]:
    """Those of the packages of this module that are installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


class LastStates(nn.Module):
    """An encoder that returns its last hidden states alone, as a graph should."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **types)[0]


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Without what exporters and quantizers print and log."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def compiled(model: nn.Module) -> nn.Module:
    """By torch.compile, for inputs of any size."""
    return torch.compile(model, dynamic=True)


def export(model: nn.Module, inputs: Inputs, path: Path) -> None:
    """Write an ONNX graph for any number and length of rows."""
    import onnxscript  # noqa: F401  # what the exporter is written in

    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    shapes = {"input_names": list(inputs), "dynamic_shapes": {name: sizes for name in inputs}}
    with silence(), torch.no_grad():
        encoder = LastStates(model).eval()
        program = torch.onnx.export(encoder, kwargs=inputs, dynamo=True, verbose=False, **shapes)
        program.save(str(path))


def onnxruntime_session(path: Path) -> Run:
    """A graph in ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda inputs: torch.from_numpy(session.run(None, {name: each.numpy() for name, each in inputs.items()})[0])


def quantize_onnx(path: Path) -> Path:
    """The graph with dynamic int8 products, by ONNX Runtime."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantized = path.with_name(f"{path.stem}-int8.onnx")
    with silence():
        quantize_dynamic(str(path), str(quantized), weight_type=QuantType.QInt8)
    return quantized


def openvino_model(model: Any, precision: str | None = "f32") -> Run:
    """A graph in OpenVINO, as small requests one after another would have it; None for the precision that it takes."""
    import openvino

    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,
        **({} if precision is None else {"INFERENCE_PRECISION_HINT": precision}),
    }
    compiled_model = openvino.Core().compile_model(model, "CPU", settings)
    return lambda inputs: torch.from_numpy(compiled_model({name: each.numpy() for name, each in inputs.items()})[0])


def quantize_openvino(path: Path, samples: list[Inputs]) -> Any:
    """The graph with int8 products, by nncf: scales of these samples, SmoothQuant."""
    import nncf
    import openvino

    nncf.set_log_level(logging.ERROR)
    data = nncf.Dataset([{name: each.numpy() for name, each in inputs.items()} for inputs in samples])
    with silence():
        graph, kind = openvino.Core().read_model(str(path)), nncf.ModelType.TRANSFORMER
        return nncf.quantize(graph, data, model_type=kind, subset_size=len(samples))


def disentangled_flash(model: Any) -> Run:
    """A copy of a `DebertaV2Model` whose encoder runs on the tokens alone (`forward_packed`)."""
    from disentangled_flash import enable_deberta_inference, pack_padded_with_info, unpack_packed

    model = enable_deberta_inference(copy.deepcopy(model), backend="torch")

    def run(inputs: Inputs) -> torch.Tensor:
        mask = inputs["attention_mask"]
        with torch.inference_mode():
            states = model.embeddings(input_ids=inputs["input_ids"], mask=mask)
            tokens, bounds, info = pack_padded_with_info(states, mask)
            given = {"packed_info": info, "output_hidden_states": False}
            found = model.encoder.forward_packed(tokens, bounds, info.max_seqlen, **given).last_hidden_state
            return unpack_packed(found, bounds, mask.shape[1], packed_info=info)[0]

    return run


def ctranslate2_files(model: Any, folder: Path) -> Path:
    """A BERT as CTranslate2's converter writes it, with a vocabulary of as many words."""
    import ctranslate2
    from transformers import BertTokenizerFast

    stored, written = folder / "bert", folder / "ctranslate2"
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])}
    vocabulary |= {f"w{number}": number for number in range(len(vocabulary), model.config.vocab_size)}
    model = copy.deepcopy(model)
    model.config.position_embedding_type = "absolute"  # which the converter asks for
    with silence():
        model.save_pretrained(stored)
        BertTokenizerFast(vocab=vocabulary).save_pretrained(stored)
        ctranslate2.converters.TransformersConverter(str(stored)).convert(str(written))
    return written


def ctranslate2_encoder(files: Path, kind: str) -> Run:
    """These files in CTranslate2, which takes lists of ids."""
    import ctranslate2

    threads = {"intra_threads": torch.get_num_threads(), "inter_threads": 1}
    encoder = ctranslate2.Encoder(str(files), device="cpu", compute_type=kind, **threads)

    def run(inputs: Inputs) -> torch.Tensor:
        real = inputs["attention_mask"].bool()
        ids = [row[mask].tolist() for row, mask in zip(inputs["input_ids"], real, strict=True)]
        states = torch.from_numpy(numpy.array(encoder.forward_batch(ids).last_hidden_state))
        return nn.functional.pad(states, (0, 0, 0, real.shape[1] - states.shape[1]))

    return run


def runtimes(model: nn.Module, samples: list[Inputs]) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Names of the graphs, each with what makes it; the files are there until the iterator is closed.

    Args:
        model: a stock encoder.
        samples: batches, for the shapes of the export and the scales of int8.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"

        @functools.cache
        def graph() -> Path:
            export(model, samples[0], path)
            return path

        yield "ONNX Runtime", lambda: onnxruntime_session(graph())
        yield "ONNX Runtime, int8", lambda: onnxruntime_session(quantize_onnx(graph()))
        yield "OpenVINO", lambda: openvino_model(str(graph()))
        yield "OpenVINO, default precision", lambda: openvino_model(str(graph()), precision=None)
        yield "OpenVINO, int8", lambda: openvino_model(quantize_openvino(graph(), samples))
        if type(model).__name__ == "DebertaV2Model":
            yield "disentangled-flash", lambda: disentangled_flash(model)
        if type(model).__name__ == "BertModel":
            files = functools.cache(lambda: ctranslate2_files(model, Path(folder)))
            yield "CTranslate2", lambda: ctranslate2_encoder(files(), "float32")
            yield "CTranslate2, int8", lambda: ctranslate2_encoder(files(), "int8_float32")
