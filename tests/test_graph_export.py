"""torch.export and ONNX: one program for every batch size and length, beyond the trained one too.

The programs are compared with the model itself, ONNX graphs run by onnxruntime. P = 16 throughout, so that lengths on
both sides of the end of every table are run, whichever of them the program was recorded with.
"""

import openvino
import pytest
import torch
from oracles import ON_TOKENS, extra_inputs, onnx_program, onnx_runner, tiny_model
from selection import FEATURE_SCHEMES, with_full
from torch.export import Dim
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

from hf_relpos import RelPosBertForSequenceClassification, RelPosBertModel
from hf_relpos.schemes import SCHEMES


RECORDED = with_full([12], [24])  # within the table and past its end
BACKENDS = with_full(["relpos"], ["eager", "sdpa"])
SIZES = [(2, 12), (1, 5), (3, 16), (2, 17), (2, 40), (1, 1)]
NAMED = {0: Dim("batch"), 1: Dim("length")}


def sequences(batch, length):
    """Token ids and a mask whose last row is half padding, (B, L) each."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, (length + 1) // 2 :] = 0
    return {"input_ids": torch.randint(1, 50, (batch, length)), "attention_mask": mask}


def classifier(scheme, backend="relpos", **overrides):
    return tiny_model(RelPosBertForSequenceClassification, scheme, backend, num_hidden_layers=1, **overrides)


def check(model, run):
    """`run`, given inputs by name, has the logits of the model at every size."""
    for batch, length in SIZES:
        inputs = sequences(batch, length)
        with torch.no_grad():
            expected = model(**inputs).logits
        torch.testing.assert_close(run(**inputs), expected, rtol=0, atol=1e-5, msg=f"{batch} rows of {length}")


def check_program(model, length, dims):
    """The same for the program of a batch of two rows of that length."""
    program = torch.export.export(model, tuple(sequences(2, length).values()), dynamic_shapes=[dims, dims])
    check(model, lambda **inputs: program.module()(*inputs.values()).logits)


@pytest.mark.parametrize("length", RECORDED)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", with_full(["relative_key_query", "tables", "deberta"], FEATURE_SCHEMES))
def test_exported_program_runs_at_every_size(scheme, backend, length):
    """No bound on the length is guarded in, which would be an error at some size."""
    check_program(classifier(scheme, backend), length, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC})


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
    check_program(classifier(variant.split()[0], position_options=VARIANTS[variant]), length, NAMED)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", with_full(["tables", "harmonic"], FEATURE_SCHEMES))
def test_onnx_graph_runs_at_every_size(scheme, backend):
    """With autograd on, as by default: SDPA is then decomposed otherwise."""
    model = classifier(scheme, backend)
    check(model, onnx_runner(onnx_program(model, sequences(2, 12))))


@pytest.mark.parametrize("scheme", ["t5", "relative_key"])
def test_gaps_of_positions_are_an_error_of_the_runtime(scheme):
    """ONNX has no assertions; positions that begin anew are followed."""
    model, packed = classifier(scheme), torch.arange(12).expand(2, -1) % 6
    inputs = {**sequences(2, 12), "token_type_ids": 0 * packed, "position_ids": packed}
    run = onnx_runner(onnx_program(model, inputs))
    with torch.no_grad():
        torch.testing.assert_close(run(**inputs), model(**inputs).logits, rtol=0, atol=1e-5)
    with pytest.raises(Exception, match="out of data bounds"):
        run(**inputs | {"position_ids": packed + (packed > 2)})


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["harmonic", "relative_key", "deberta"])
def test_openvino_runs_the_onnx_graph_at_every_size(scheme, tmp_path):
    model = classifier(scheme)
    onnx_program(model, sequences(2, 12)).save(tmp_path / "model.onnx")
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = openvino.compile_model(openvino.convert_model(tmp_path / "model.onnx"), "CPU", settings)

    check(model, lambda **inputs: torch.from_numpy(compiled({name: each.numpy() for name, each in inputs.items()})[0]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", with_full([], FEATURE_SCHEMES))
def test_transformers_onnx_exporter(scheme, backend):
    model = classifier(scheme, backend)
    exported = OnnxExporter().export(model, sequences(2, 12), config=OnnxConfig(dynamic=True))
    check(model, lambda **inputs: exported(**inputs)[0])  # called, it runs onnxruntime


@pytest.mark.parametrize("scheme", SCHEMES)
def test_torchscript_trace(scheme):
    """With the outputs of the model on the traced input."""
    model = tiny_model(RelPosBertModel, scheme, return_dict=False)
    inputs = sequences(2, 12) | extra_inputs(scheme, 2, 12)
    with torch.no_grad():
        expected = model(**inputs)[0]
        traced = torch.jit.trace(model, example_kwarg_inputs=inputs, check_trace=False)
        torch.testing.assert_close(traced(**inputs)[0], expected, rtol=0, atol=1e-5)
