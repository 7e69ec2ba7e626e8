"""Longer tables of absolute positions: the rows, the checkpoints made with them, and what is refused."""

import pytest
import test_sources
import torch
from test_convert import POSITIONS, TABLE, assert_same_outputs, contents, every_head, inputs, load, saved
from transformers import BertModel

from hf_relpos.conversion import ConversionError, convert
from hf_relpos.conversion.absolute_tables import decompose, interpolate


METHODS = ("interpolate", "hierarchical")


def rows(count, width=3):
    return torch.randn(count, width, dtype=torch.float64)


@pytest.mark.parametrize("count, length", [(5, 13), (5, 20), (3, 4), (2, 8), (20, 80)])
def test_interpolated_rows(count, length):
    """Row 0, then the others evenly from row 1 to the last, linear in between."""
    table = rows(count)
    made = interpolate(table, length)
    assert made.shape == (length, 3) and torch.equal(made[0], table[0])
    for position in range(1, length):
        at = 1 + (position - 1) * (count - 2) / (length - 2)
        left = min(int(at), count - 2) if count > 2 else 1
        right = min(left + 1, count - 1)
        expected = table[left] * (1 - (at - left)) + table[right] * (at - left)
        assert (made[position] - expected).abs().max() <= 1e-12
    assert (made[-1] - table[-1]).abs().max() <= 1e-12


@pytest.mark.parametrize("count, length", [(4, 16), (4, 9), (7, 20)])
def test_hierarchical_rows(count, length):
    """By the definition: block i, index j, α = 0.4; the rows of the table come out of it too."""
    table = rows(count)
    part = [(row - 0.4 * table[0]) / 0.6 for row in table]
    made = decompose(table, length, cls=False)
    assert torch.equal(made[:count], table)
    for position in range(length):
        i, j = divmod(position, count)
        assert (made[position] - (0.4 * part[i] + 0.6 * part[j])).abs().max() <= 1e-12
    with_cls = decompose(torch.cat([rows(1), table]), length + 1, cls=True)
    assert torch.equal(with_cls[1:], made)


def test_hierarchical_keeps_cls():
    table = rows(5)
    made = decompose(table, 17, cls=True)
    assert torch.equal(made[:5], table)
    moved = table.clone()
    moved[0] += 1  # of no consequence for any other row
    assert torch.equal(decompose(moved, 17, cls=True)[1:], made[1:])
    assert not torch.equal(decompose(moved, 17, cls=False)[5:], decompose(table, 17, cls=False)[5:])


def test_the_decomposition_ends():
    with pytest.raises(ValueError, match="4 rows make 16 positions, not 17"):
        decompose(rows(4), 17, cls=False)


@every_head
@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint(tmp_path, architecture, method):
    """Longer inputs are read, longer ones yet refused; nothing but the table changes."""
    stock, source = saved(tmp_path / "stock", architecture)
    report = convert(source, tmp_path / "out", method=method)
    model = load(architecture, tmp_path / "out")
    assert model.config.position_embedding_type == report.position_embedding_type == "absolute"
    assert model.config.max_position_embeddings == 4 * POSITIONS and not model.config.absolute_position_embeddings
    weights, table = model.state_dict(), stock.base_model.embeddings.position_embeddings.weight
    for name, tensor in stock.state_dict().items():
        if name.endswith(TABLE):
            expected = interpolate(table, 80) if method == "interpolate" else decompose(table, 80, cls=True)
            assert torch.equal(weights.pop(name), expected.float())
        else:
            assert torch.equal(weights.pop(name), tensor), name
    assert not weights
    with torch.inference_mode():
        for output in model(**inputs(architecture, 4 * POSITIONS)).values():
            assert not isinstance(output, torch.Tensor) or output.isfinite().all()
        with pytest.raises(ValueError, match="absolute positions end at max_position_embeddings = 80"):
            model(**inputs(architecture, 4 * POSITIONS + 1))
    if method == "hierarchical":
        assert report.difference <= 1e-12
        assert_same_outputs(stock, model, inputs(architecture, POSITIONS))
    else:
        assert report.difference is None


@pytest.mark.parametrize("family", test_sources.ABSOLUTE)
@pytest.mark.parametrize("method", METHODS)
def test_other_families(tmp_path, family, method):
    """Tables that begin at another row; embeddings of another width; MPNet's own bias, which stays."""
    stock, source = test_sources.saved(tmp_path / "stock", family, "ForMaskedLM")
    report = convert(source, tmp_path / "out", method=method)
    model = test_sources.load(tmp_path / "out", report)
    positions = test_sources.POSITIONS - (2 if test_sources.FAMILIES[family].padding else 0)
    assert report.details["positions"]["source"] == positions
    assert model.config.max_position_embeddings == 4 * positions
    assert model.config.position_embedding_type == (["t5", "absolute"] if family == "mpnet" else "absolute")
    with torch.no_grad():
        assert model(torch.randint(2, test_sources.WORDS, (1, 4 * positions))).logits.isfinite().all()
    if method == "hierarchical":
        test_sources.assert_same_outputs(stock, model, test_sources.batch(family))


def test_report(tmp_path):
    _, source = saved(tmp_path / "stock", "BertForMaskedLM")
    report = convert(source, tmp_path / "out", method="hierarchical", method_options={"length": 50, "cls": False})
    assert report.details == {"positions": {"source": 20, "result": 50, "kept": 20, "alpha": 0.4, "cls": False}}
    (step,) = report.of_kind("folded")
    assert step.source == step.target == "bert." + TABLE and step.shape == (50, 24)
    assert step.note == "20 rows, and 30 sums of two, by block (0.4) and index in it"
    report = convert(source, tmp_path / "other", method="interpolate", method_options={"length": 50})
    assert report.details == {"positions": {"source": 20, "result": 50, "kept": 1}}
    assert report.of_kind("folded")[0].note == "rows 1 to 19 of 20 stretched over 1 to 49, linear in between"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_the_dtype_is_kept(tmp_path, dtype, method):
    stock, source = saved(tmp_path / "stock", dtype=dtype)
    convert(source, tmp_path / "out", method=method)
    table = load("BertModel", tmp_path / "out").embeddings.position_embeddings.weight
    assert table.dtype == dtype
    kept = POSITIONS if method == "hierarchical" else 1
    assert torch.equal(table[:kept], stock.embeddings.position_embeddings.weight[:kept])


def test_a_source_shorter_than_the_batch_of_the_comparison(tmp_path):
    """The outputs are compared within the source's own length; and the default ends where the decomposition does."""
    _, source = saved(tmp_path / "stock", max_position_embeddings=3)
    report = convert(source, tmp_path / "out", method="hierarchical")
    assert report.difference <= 1e-12 and report.details["positions"]["result"] == 5  # 1 + 2²


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"method_options": {"length": 20}}, r"\['length'\] = 20: the source reads 20 tokens already; give more"),
        ({"method_options": {"length": 8}}, r"\['length'\] = 8: the source reads 20"),
        ({"method_options": {"length": "long"}}, r"\['length'\] = 'long' is not accepted .* length: tokens that"),
        ({"method_options": {"range": 80}}, r"\['range'\] = 80: .*no such option; known: length"),
        (
            {"position_embedding_type": "shaw"},
            "'shaw': the result of this method has absolute .* supports: absolute",
        ),
    ],
)
def test_refusals_write_nothing(tmp_path, method, arguments, words):
    _, source = saved(tmp_path / "stock")
    before = contents(tmp_path)
    with pytest.raises(ConversionError, match=words):
        convert(source, tmp_path / "out", method=method, **arguments)
    assert contents(tmp_path) == before


def test_more_than_the_decomposition_has(tmp_path):
    _, source = saved(tmp_path / "stock")
    for cls, limit in ((True, 362), (False, 400)):
        options = {"length": limit + 1, "cls": cls}
        with pytest.raises(ConversionError, match=f"of 20 positions ends at {limit}; give fewer, or method='interp"):
            convert(source, tmp_path / "out", method="hierarchical", method_options=options)
    convert(source, tmp_path / "out", method="hierarchical", method_options={"length": 400, "cls": False})


@pytest.mark.parametrize("method", METHODS)
def test_a_table_of_one_row_is_refused(tmp_path, method):
    BertModel(
        BertModel.config_class(
            vocab_size=60,
            hidden_size=24,
            num_hidden_layers=1,
            num_attention_heads=3,
            intermediate_size=32,
            max_position_embeddings=1,
        )
    ).save_pretrained(tmp_path / "stock")
    with pytest.raises(ConversionError, match="a table of one row cannot be stretched"):
        convert(tmp_path / "stock", tmp_path / "out", method=method)
