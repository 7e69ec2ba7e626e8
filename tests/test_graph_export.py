"""torch.export and ONNX: one program for every batch size and length, beyond the trained one too.

The programs are compared with the model itself, ONNX graphs run by onnxruntime. P = 16 throughout, so that lengths on
both sides of the end of every table are run, whichever of them the program was recorded with.
"""

import contextlib
import io

import onnxruntime
import openvino
import pytest
import torch
from oracles import ON_TOKENS, tiny_model
from selection import FEATURE_SCHEMES, with_full
from torch.export import Dim
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

from hf_relpos import SCHEMES, RelPosBertForSequenceClassification


RECORDED = with_full([12], [24])  # within the table and past its end
BACKENDS = with_full(["relpos"], ["eager", "sdpa"])
SIZES = [(2, 12), (1, 5), (3, 16), (2, 17), (2, 40), (1, 1)]
NAMES = ("input_ids", "attention_mask")


def sequences(batch, length):
    """Token ids and a mask whose last row is half padding, (B, L) each."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, (length + 1) // 2 :] = 0
    return torch.randint(1, 50, (batch, length)), mask


def classifier(scheme, backend="relpos", **overrides):
    return tiny_model(RelPosBertForSequenceClassification, scheme, backend, num_hidden_layers=1, **overrides)


def check(model, run):
    """`run(input_ids, attention_mask)` gives the logits of the model at every size."""
    for batch, length in SIZES:
        arguments = sequences(batch, length)
        with torch.no_grad():
            expected = model(*arguments).logits
        torch.testing.assert_close(run(*arguments), expected, rtol=0, atol=1e-5, msg=f"{batch} rows of {length}")


def program_of(model, length, dims):
    """The program for a batch of two rows of that length."""
    return torch.export.export(model, sequences(2, length), dynamic_shapes=[dims, dims])


def onnx_runner(program):
    """`run` of `check`, by onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options)

    def run(*arguments):
        feed = {name: tensor.numpy() for name, tensor in zip(NAMES, arguments, strict=True)}
        return torch.from_numpy(session.run(None, feed)[0])

    return run


@pytest.mark.parametrize("length", RECORDED)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", with_full(["relative_key_query", "tables", "deberta"], FEATURE_SCHEMES))
def test_exported_program_runs_at_every_size(scheme, backend, length):
    """No bound on the length is guarded in, which would be an error at some size."""
    model = classifier(scheme, backend)
    program = program_of(model, length, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC})
    check(model, lambda *arguments: program.module()(*arguments).logits)


# a learned table of absolute positions has an end, and longer inputs are an error
ANY_LENGTH = [name for name in ON_TOKENS if not SCHEMES[name].learned_input_table]


VARIANTS = {
    "relative_key_query zero": {"out_of_range": "zero"},
    "deberta v3": {"buckets": 8, "max_distance": 14, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    "tables zero": {"out_of_range": "zero", "dense": 3, "per_octave": 2},
    "shaw zero": {"out_of_range": "zero", "clip": 4},
    "tables rows": {"storage": "rows"},
    "transformer_xl clip": {"out_of_range": "clip"},
    **dict.fromkeys(ANY_LENGTH),
}


@pytest.mark.parametrize("length", RECORDED)
@pytest.mark.parametrize("variant", with_full(["relative_key_query zero", "deberta v3"], VARIANTS))
def test_named_dimensions_have_no_bound(variant, length):
    """Which torch.export would prove, an error otherwise: zeros, buckets and knots are chosen in the graph."""
    model = classifier(variant.split()[0], position_options=VARIANTS[variant])
    program = program_of(model, length, {0: Dim("batch"), 1: Dim("length")})
    check(model, lambda *arguments: program.module()(*arguments).logits)


def onnx_program(model):
    """Of a classifier, with named dimensions."""
    dims = {0: Dim("batch"), 1: Dim("length")}
    with contextlib.redirect_stdout(io.StringIO()):
        return torch.onnx.export(
            model, sequences(2, 12), dynamo=True, input_names=NAMES, dynamic_shapes=[dims, dims], verbose=False
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", with_full(["tables", "harmonic"], FEATURE_SCHEMES))
def test_onnx_graph_runs_at_every_size(scheme, backend):
    """With autograd on, as by default: SDPA is then decomposed otherwise."""
    model = classifier(scheme, backend)
    check(model, onnx_runner(onnx_program(model)))


@pytest.mark.parametrize("scheme", ["t5", "relative_key"])
def test_gaps_of_positions_are_an_error_of_the_runtime(scheme):
    """ONNX has no assertions; positions that begin anew are followed."""
    model = classifier(scheme)
    ids, mask = sequences(2, 12)
    packed = torch.arange(12).expand(2, -1) % 6
    dims = {0: Dim("batch"), 1: Dim("length")}
    named = dict(zip((*NAMES, "position_ids"), (ids, mask, packed), strict=True))
    with contextlib.redirect_stdout(io.StringIO()):
        program = torch.onnx.export(
            model, (), kwargs=named, dynamo=True, dynamic_shapes=dict.fromkeys(named, dims), verbose=False
        )
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    feed = {name: tensor.numpy() for name, tensor in named.items()}
    with torch.no_grad():
        expected = model(**named).logits
    torch.testing.assert_close(torch.from_numpy(session.run(None, feed)[0]), expected, rtol=0, atol=1e-5)
    with pytest.raises(Exception, match="out of data bounds"):
        session.run(None, feed | {"position_ids": (packed + (packed > 2)).numpy()})


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["harmonic", "relative_key", "deberta"])
def test_openvino_runs_the_onnx_graph_at_every_size(scheme, tmp_path):
    model = classifier(scheme)
    onnx_program(model).save(tmp_path / "model.onnx")
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = openvino.compile_model(openvino.convert_model(tmp_path / "model.onnx"), "CPU", settings)

    def run(*arguments):
        feed = {name: tensor.numpy() for name, tensor in zip(NAMES, arguments, strict=True)}
        return torch.from_numpy(compiled(feed)[0])

    check(model, run)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", with_full([], FEATURE_SCHEMES))
def test_transformers_onnx_exporter(scheme, backend):
    model = classifier(scheme, backend)
    inputs = dict(zip(NAMES, sequences(2, 12), strict=True))
    exported = OnnxExporter().export(model, inputs, config=OnnxConfig(dynamic=True))
    # called, it runs onnxruntime
    check(model, lambda *arguments: exported(**dict(zip(NAMES, arguments, strict=True)))[0])
