"""Edges with labels: Shaw et al. 2018, eq. 3 and 4, with the vectors of a graph's edges.

e_ij = x_i W^Q (x_j W^K + a^K_{e(i,j)})ᵀ / √d,   z_i = Σ_j α_ij (x_j W^V + a^V_{e(i,j)})
"""

from functools import partial

import numpy as np
import pytest
import torch
from errors import raises
from oracles import REAL, array, extra_inputs, layer_error, tiny_attention, tiny_model, with_vectors

from hf_relpos import RelPosBertForMaskedLM, RelPosBertLMHeadModel, RelPosBertModel
from hf_relpos.attention.context import TokenInputs
from hf_relpos.schemes import AttentionContext


def with_labels(labels):
    return AttentionContext(labels.shape[1], labels.shape[2], tokens=TokenInputs(relation_ids=labels))


def paper(layer, labels, none):
    """Score and value of one row of the batch."""
    tables = [array(table) for table in layer.distance_embedding.parameters()]

    def vector(table, h, i, j):
        label = int(labels[i, j])
        rows = table[h] if table.ndim == 3 else table
        return np.zeros(8) if label == none else rows[label]

    return with_vectors(*(partial(vector, table) for table in tables))


@pytest.mark.parametrize("values", [True, False], ids=["values", "keys"])
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "heads"])
@pytest.mark.parametrize("none", [0, 4, None])
def test_equals_the_paper(none, per_head, values):
    options = {"num_relations": 5, "none_label": none, "per_head": per_head, "values": values}
    layer = tiny_attention("relation", position_options=options)
    hidden, labels = torch.randn(2, 9, 24, dtype=torch.float64), torch.randint(0, 5, (2, 9, 9))
    for row in range(2):  # every row of a batch has its own graph
        arguments = (layer, hidden[row : row + 1], REAL[row : row + 1])
        context = with_labels(labels[row : row + 1])
        assert layer_error(*arguments, *paper(layer, labels[row], none), context) <= 1e-10
    with torch.no_grad():
        together = layer(hidden, context=with_labels(labels))[0]
        apart = [layer(hidden[row : row + 1], context=with_labels(labels[row : row + 1]))[0] for row in range(2)]
    assert (together - torch.cat(apart)).abs().max() <= 1e-12


@torch.no_grad()
def test_a_pair_without_an_edge_is_a_pair_of_a_plain_layer():
    """Whatever the row of that label holds."""
    layer, plain = tiny_attention("relation"), tiny_attention("absolute")
    plain.load_state_dict({key: value for key, value in layer.state_dict().items() if "distance" not in key})
    hidden = torch.randn(2, 9, 24, dtype=torch.float64)
    layer.distance_embedding.key[0] = layer.distance_embedding.value[0] = torch.nan
    out, _ = layer(hidden, context=with_labels(torch.zeros(2, 9, 9, dtype=torch.long)))
    assert (out - plain(hidden)[0]).abs().max() <= 1e-12


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
@torch.no_grad()
def test_labels_of_any_integer_type(dtype):
    model = tiny_model(RelPosBertModel, "relation", position_options={"num_relations": 6})
    ids, labels = torch.randint(1, 50, (2, 9)), torch.randint(0, 6, (2, 9, 9))
    expected = model(ids, relation_ids=labels).last_hidden_state
    assert torch.equal(model(ids, relation_ids=labels.to(dtype)).last_hidden_state, expected)
    assert (model(ids, relation_ids=labels.mT).last_hidden_state - expected).abs().max() > 1e-3


def test_every_table_learns():
    model = tiny_model(RelPosBertForMaskedLM, "relation", position_options={"num_relations": 6})
    ids, labels = torch.randint(1, 50, (2, 9)), torch.randint(0, 6, (2, 9, 9))
    model(ids, attention_mask=REAL.long(), relation_ids=labels, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all()
        if "distance_embedding" in name:
            assert (parameter.grad[1:].abs().amax(-1) > 0).all() and not parameter.grad[0].any()


@pytest.mark.parametrize("values", [True, False])
@torch.no_grad()
def test_runs_on_sdpa(values):
    model = tiny_model(RelPosBertModel, "relation", position_options={"values": values})
    inputs = {"input_ids": torch.randint(1, 50, (1, 4)), **extra_inputs("relation", 1, 4)}
    model.set_attn_implementation("eager")
    expected = model(**inputs).last_hidden_state
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(**inputs).last_hidden_state, expected)


@pytest.mark.parametrize(
    "labels, words",
    [
        (None, ["relation_ids", "(batch, length, length)"]),
        *((torch.zeros(shape).long(), ["relation_ids", "(1, 4, 4)"]) for shape in ((4, 4), (1, 4, 5), (1, 3, 4))),
        *((torch.full((1, 4, 4), label), [label, "num_relations'] = 6", "0 to 5"]) for label in (-1, 6)),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(getattr(value, "shape", value)),
)
def test_labels_that_are_refused(labels, words):
    model = tiny_model(RelPosBertModel, "relation", position_options={"num_relations": 6})
    with raises(ValueError, *words):
        model(torch.randint(1, 50, (1, 4)), relation_ids=labels)


@torch.no_grad()
def test_no_labels_for_what_is_in_a_cache():
    model = tiny_model(RelPosBertLMHeadModel, "relation", is_decoder=True)
    ids, labels = torch.randint(1, 50, (1, 5)), torch.ones(1, 5, 5, dtype=torch.long)
    cache = model(ids, relation_ids=labels, use_cache=True).past_key_values
    with raises(ValueError, "use_cache=False"):
        model(ids[:, :1], relation_ids=labels[:, :1, :1], past_key_values=cache, use_cache=True)
