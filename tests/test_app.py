"""The page of `hf-relpos app`: what its views show, its server, and the page in a browser."""

import socket
import sys

import pytest
import torch
from oracles import tiny_model
from transformers import BertTokenizer, RobertaConfig, RobertaForMaskedLM
from typer.testing import CliRunner

import hf_relpos.app.models as models
from hf_relpos import RelPosBertForMaskedLM, RelPosBertModel
from hf_relpos.app import page
from hf_relpos.app.models import PACKAGED, load
from hf_relpos.app.views import attention_figure, cosine_figure, position_figure, prediction_rows, predictions
from hf_relpos.cli import app
from hf_relpos.demo import CHECKPOINT
from hf_relpos.evaluation import load_model
from hf_relpos.evaluation.position_scores import attention_maps, example_inputs, record_calls, score_map


TEXT = "I have been waiting [MASK] you."


@pytest.fixture(scope="module")
def relative(tmp_path_factory):
    """The packaged BERT with tables at zero, as quick a conversion as there is, in place of the page's own."""
    folder = tmp_path_factory.mktemp("app") / "relative"
    models.convert(CHECKPOINT, folder, position_embedding_type="relative_key", method="keep")
    return str(folder)


# positions and attention


@pytest.mark.parametrize("scheme", ["relative_key_query", "alibi", "absolute", "rope"])
def test_attention_with_positions_is_the_models(scheme):
    model = tiny_model(RelPosBertModel, scheme, attn_implementation="eager").eval()
    inputs = {"input_ids": example_inputs(model.config, 12)["input_ids"][:1]}
    shown, without = attention_maps(model, 1, inputs)
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True).attentions[1][0]
    assert (shown - expected).abs().max() < 1e-6
    assert (without.sum(-1) - 1).abs().max() < 1e-6 and (shown - without).abs().max() > 1e-4


def test_without_positions_only_content_counts():
    """A bias by distance is taken away exactly; tokens that are the same get the same attention, wherever they are."""
    model = tiny_model(RelPosBertModel, "alibi").eval()
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}
    shown, without = attention_maps(model, 0, inputs)
    biased = (without.log() + score_map(record_calls(model, inputs)[0][0])).softmax(-1)
    assert (biased - shown).abs().max() < 1e-6
    for scheme in ("alibi", "absolute"):
        model = tiny_model(RelPosBertModel, scheme).eval()
        _, without = attention_maps(model, 0, {"input_ids": torch.tensor([[5, 6, 5, 6, 5]])})
        assert (without[:, :, 0] - without[:, :, 4]).abs().max() < 1e-6
        assert (without[:, 0] - without[:, 4]).abs().max() < 1e-6


def test_attention_that_does_not_reach_all_pairs_is_refused():
    model = tiny_model(RelPosBertModel, "alibi", attention_window=4)
    with pytest.raises(ValueError, match="attention_window = 4: only attention from every token to every token"):
        attention_maps(model, 0, {"input_ids": torch.ones(1, 8, dtype=torch.long)})


def test_the_packaged_bert_is_itself():
    encoder, stock = load(PACKAGED), load_model(CHECKPOINT)
    assert isinstance(encoder.model, RelPosBertForMaskedLM) and load(f" {PACKAGED}") is not None
    ids = torch.arange(10, 30)[None]
    with torch.no_grad():
        assert encoder.model(ids).logits.equal(stock(ids).logits)
    token, probability = predictions(encoder, TEXT)[0][0]
    assert token == "for" and 0.64 < probability < 0.66  # as its model card says


def test_figures_of_both_kinds_of_positions(relative):
    for name, scheme in ((PACKAGED, "absolute"), (relative, "relative_key")):
        assert scheme in position_figure(load(name), TEXT).get_suptitle()
    figure = attention_figure(load(relative), TEXT, 3, 1)
    left, right = figure.axes[:2]
    assert [label.get_text() for label in left.get_xticklabels()][:3] == ["[CLS]", "i", "have"]
    assert (left.get_title(), right.get_title()) == ("with positions", "without")


def test_predictions_side_by_side(relative):
    rows = prediction_rows(load(PACKAGED), load(relative), "[MASK] have been waiting [MASK] you.")
    assert [row[:2] for row in rows] == [[number, rank] for number in (1, 2) for rank in range(1, 6)]
    assert rows[5][2].startswith("for (") and all(row[2] == row[3] for row in rows)  # `keep` has the same outputs


def test_similarities_where_no_words_are_predicted(tmp_path):
    """A model without a masked-token head gets the cosines of its lines, not an error."""
    load_model(CHECKPOINT).base_model.save_pretrained(tmp_path)
    BertTokenizer.from_pretrained(CHECKPOINT).save_pretrained(tmp_path)
    words, rows = page.show_predictions(PACKAGED, str(tmp_path), "The ship.\n\nThe boat.\nA tree.", 0)
    assert words is None and [row[:2] for row in rows] == [
        ["The ship.", "The boat."],
        ["The ship.", "A tree."],
        ["The boat.", "A tree."],
    ]
    left, right = (load(name).encode(["The ship.", "The boat."]) for name in (PACKAGED, str(tmp_path)))
    expected = [f"{float(torch.cosine_similarity(*each, dim=0)):.2f}" for each in (left, right)]
    assert rows[0][2:] == expected and expected[0] == expected[1]
    assert len(page.show_predictions(PACKAGED, str(tmp_path), "One line.", 0)[1]) == 3
    for text, words in ((" ", "the text is empty"), ("line\n" * 51, "51 lines"), ("\ud800", "surrogate")):
        with pytest.raises(ValueError, match=words):
            page.show_predictions(PACKAGED, str(tmp_path), text, 0)


def test_cosines_by_length(relative, monkeypatch):
    monkeypatch.setattr("hf_relpos.app.views.TOKENS", 64)
    lines = {line.get_label(): line for line in cosine_figure(load(PACKAGED), load(relative)).axes[0].lines}
    lengths, cosines = lines["tokens"].get_data()
    assert list(lengths) == [16, 64, 128] and min(cosines) > 0.9999


def test_cosines_in_a_window_and_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_relpos.app.views.TOKENS", 64)
    relative = tmp_path / "relative"
    models.convert(CHECKPOINT, relative, position_embedding_type="relative_key", method="drop")
    own, windowed = load(str(relative)), load(str(relative), 8)
    assert own.model.config.attention_window is None and windowed.model.config.attention_window == 8
    lines = {
        line.get_label(): dict(zip(*line.get_data(), strict=True))
        for line in cosine_figure(load(PACKAGED), windowed, as_it_is=own).axes[0].lines
    }
    plain = cosine_figure(load(PACKAGED), own).axes[0].lines[0]
    expected = dict(zip(*plain.get_data(), strict=True))
    beside = lines["tokens, as it is"]
    assert beside == {length: expected[length] for length in (256, 512)}
    assert lines["tokens"].keys() == expected.keys() and lines["tokens"][512] != expected[512]


# errors


@pytest.mark.parametrize(
    "text, layer, head, words",
    [
        (" ", 0, 0, "there is no text"),
        ("half of \ud83d\ude00: \ud83d", 0, 0, "the text holds .* surrogate"),
        ("word " * 200, 0, 0, "the text has 202 tokens, and the model reads 128; shorten it"),
        (TEXT, 4, 0, "layer = 4: the model has layers 0 to 3"),
        (TEXT, 0, 4, "head = 4: the model has heads 0 to 3"),
    ],
)
def test_what_cannot_be_shown_says_why(text, layer, head, words):
    with pytest.raises(ValueError, match=words):
        attention_figure(load(PACKAGED), text, layer, head)


def test_models_that_cannot_be_shown_say_why(tmp_path):
    with pytest.raises(ValueError, match="no model is named"):
        load(" ")
    with pytest.raises(ValueError, match=r"has no config\.json, so this is not a checkpoint folder"):
        load(str(tmp_path))
    with pytest.raises(ValueError, match="attention_window = 10000"):
        load(PACKAGED, 10**30)
    with pytest.raises(ValueError, match=r"the text has no \[MASK\]"):
        predictions(load(PACKAGED), "word")
    tiny = RobertaConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=24)
    RobertaForMaskedLM(tiny).save_pretrained(tmp_path)
    BertTokenizer.from_pretrained(CHECKPOINT).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model_type = 'roberta'.*convert it first"):
        attention_figure(load(str(tmp_path)), TEXT, 0, 0)
    with pytest.raises(ValueError, match="hidden_size = 128 in the teacher and 24"):
        cosine_figure(load(PACKAGED), load(str(tmp_path)))


def test_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    result = CliRunner().invoke(app, ["app"])
    assert result.exit_code == 2
    assert result.stderr == "Error: the page needs gradio: pip install 'gradio>=6.0' 'matplotlib>=3.8'\n"


# the server


@pytest.fixture
def served(relative, monkeypatch):
    """The page, served, and the addresses that this process connected to since."""
    addresses, connect = set(), socket.socket.connect

    def record(self, address):
        addresses.add(address[0] if isinstance(address, tuple) else "local")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", record)
    running = page.serve(PACKAGED, relative, port=0, block=False)
    yield running, addresses
    running.close()


def test_the_served_page_answers(served, relative):
    """Over HTTP, as a browser does."""
    from gradio_client import Client

    running, addresses = served
    client = Client(running.local_url, verbose=False, analytics_enabled=False)

    def ask(view, *arguments):
        """Its message, and its results; None for what is not shown."""
        message, *results = client.predict(*arguments, api_name=f"/{view}")
        return [each["value"] if each["visible"] else None for each in (message, *results)]

    error, table, similar = ask("show_predictions", PACKAGED, relative, TEXT, 0)
    assert error is None and similar is None and table["data"][0][2] == "for (65.0%)"
    error, *pictures = ask("show_positions", PACKAGED, relative, TEXT)
    assert error is None and all(each["plot"].startswith("data:image/png;base64,") for each in pictures)
    error, *pictures = ask("show_attention", PACKAGED, relative, TEXT, 3, 1)
    assert error is None and all(each["plot"].startswith("data:image/png;base64,") for each in pictures)
    error, *_ = ask("show_predictions", PACKAGED, relative, "<b>", 0)
    assert 'role="alert"' in error and "the text has no [MASK]; put it in the place of a word" in error
    error, *pictures = ask("show_attention", "/<b>", relative, TEXT, 3, 1)
    assert "/&lt;b&gt;: no such folder" in error and pictures == [None, None]
    assert addresses <= {"127.0.0.1", "localhost", "::1", "local"}
