"""The card of a converted model after the Trainer: `hf_relpos.merge_card`."""

import re

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    Trainer,
    TrainingArguments,
)

from hf_relpos import merge_card
from hf_relpos.conversion import ConversionError, convert
from hf_relpos.conversion.push import plan_upload
from hf_relpos.conversion.trained_card import HEADING, SCRATCH


SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
INDEX = """model-index:
- name: model with shaw
  results:
  - task: {type: fill-mask}
    dataset: {type: user/novels, name: novels}
    metrics: [{type: cosine, name: token cosine, value: 0.9}]
"""


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A converted tiny BERT whose card says all that one of a Hub repository can say."""
    folder = tmp_path_factory.mktemp("card")
    config = BertConfig(vocab_size=30, max_position_embeddings=16, **SIZES)
    BertForMaskedLM(config).save_pretrained(folder / "stock")
    (folder / "stock" / "README.md").write_text("---\nlicense: mit\nlanguage: en\n---\n")
    convert(folder / "stock", folder / "out", method="drop", position_embedding_type="shaw")
    card = folder / "out" / "README.md"
    more = "base_model: user/bert\nbase_model_relation: finetune\ndatasets: [user/novels]\n" + INDEX
    card.write_text(card.read_text().replace("---\n", "---\n" + more, 1) + "\n![Tables](tables.png)\n")
    (folder / "out" / "tables.png").write_bytes(b"picture")
    return folder / "out"


def train(converted, folder, auto=AutoModelForSequenceClassification):
    """Trained for a step, saved with the Trainer's card."""
    model = auto.from_pretrained(converted)
    row = torch.arange(1, 9)
    labels = 1 if auto is AutoModelForSequenceClassification else row
    arguments = TrainingArguments(str(folder), max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": labels}] * 2)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(tags="mine")
    return model


@pytest.fixture(scope="module")
def trained(converted, tmp_path_factory):
    """Model, folder, and the card that the Trainer wrote."""
    folder = tmp_path_factory.mktemp("trained")
    model = train(converted, folder)
    before = (folder / "README.md").read_text()
    merge_card(converted, folder)
    return model, folder, before


def test_the_trainer_alone_drops_what_the_card_said(trained):
    """What `merge_card` is for; where this fails, it can go."""
    _, _, before = trained
    data = ModelCard(before).data
    assert data.license is None and data.base_model is None and SCRATCH in before and "shaw" not in before


def test_the_metadata_of_the_conversion_is_kept(trained):
    _, folder, before = trained
    card = ModelCard((folder / "README.md").read_text())
    assert card.data.to_dict() == {
        **{"license": "mit", "language": "en", "base_model": "user/bert", "base_model_relation": "finetune"},
        "datasets": ["user/novels"],
        "tags": ["hf_relpos", "relative-position", "mine", "generated_from_trainer"],
        "library_name": "transformers",
        "pipeline_tag": "text-classification",  # the head is another one
        "model-index": ModelCard(before).data.to_dict()["model-index"],  # not what was measured before the training
    }
    plan = plan_upload(folder, "user/name")
    assert plan.problems == plan.remarks == () and {"conversion.json", "tables.png"} <= set(plan.files)


def test_the_text_of_the_conversion_follows(converted, trained):
    _, folder, _ = trained
    own, _, theirs = (folder / "README.md").read_text().partition(HEADING)
    assert SCRATCH not in own and "converted checkpoint described below" in own
    assert "### Training hyperparameters" in own
    said = ModelCard((converted / "README.md").read_text()).text
    kept = re.sub(r"^## Use$.*?(?=^## )", "", said, flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in kept.splitlines() if line and not line.startswith("# ")]
    assert len(lines) > 10
    for line in lines:
        assert f"\n{'#' if line.startswith('##') else ''}{line}\n" in theirs, line
    assert not [line for line in theirs.splitlines() if re.match("##? ", line)]
    for name in ("conversion.json", "tables.png"):
        assert (folder / name).read_bytes() == (converted / name).read_bytes()


def test_the_card_loads_the_model_that_was_trained(trained):
    model, folder, _ = trained
    text = (folder / "README.md").read_text()
    first = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[0]
    found = {}
    exec(first.replace('"PATH"', repr(str(folder))), found)
    assert torch.equal(found["model"].classifier.weight, model.classifier.weight)


def test_a_second_call_changes_nothing(converted, trained):
    _, folder, _ = trained
    before = (folder / "README.md").read_bytes()
    merge_card(converted, folder)
    assert (folder / "README.md").read_bytes() == before


def test_what_the_trained_card_says_wins(converted, trained, tmp_path):
    (tmp_path / "README.md").write_text(
        "---\nlicense: other\nlanguage: de\nbase_model: a/b\ndatasets: user/own\n---\n# Mine\n\nText of mine.\n"
    )
    merge_card(converted, tmp_path)
    card = ModelCard((tmp_path / "README.md").read_text())
    data = card.data.to_dict()
    assert (data["license"], data["language"], data["base_model"]) == ("other", "de", "a/b")
    assert "base_model_relation" not in data and data["datasets"] == ["user/novels", "user/own"]
    assert card.text.strip().startswith("# Mine\n\nText of mine.") and "## Use" not in card.text
    assert "pipeline_tag" not in data  # there is no model that would have a task


def test_the_same_head_keeps_its_task(converted, tmp_path):
    train(converted, tmp_path, AutoModelForMaskedLM)
    merge_card(converted, tmp_path)
    assert ModelCard((tmp_path / "README.md").read_text()).data.pipeline_tag == "fill-mask"


@pytest.mark.parametrize(
    "theirs, own, words",
    [
        (None, "# A", "converted = '.*' has no README.md"),
        ("# A", None, r"trained = '.*' has no README.md"),
        ("---\nlicense: [\n---\n", "# A", "converted = '.*'"),
        ("# A", "---\n- a\n- list\n---\n", "trained = '.*'"),
    ],
)
def test_cards_that_cannot_be_merged(tmp_path, theirs, own, words):
    for name, text in (("converted", theirs), ("trained", own)):
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "README.md").write_text(text)
    (tmp_path / "converted" / "conversion.json").write_text("{}")
    with pytest.raises(ConversionError, match=words):
        merge_card(tmp_path / "converted", tmp_path / "trained")
    assert not (tmp_path / "trained" / "conversion.json").exists()
    assert own is None or (tmp_path / "trained" / "README.md").read_text() == own


@pytest.mark.full
@pytest.mark.heavy
def test_a_trainer_that_pushes_it(hub, tmp_path):
    """In one commit, by the override that docs/train.md shows; its base model is the repository that was converted."""
    config = BertConfig(vocab_size=30, max_position_embeddings=16, **SIZES)
    hub.run(
        f"""
        import torch
        import transformers
        from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM, TrainingArguments
        import hf_relpos

        BertForMaskedLM(BertConfig(**{config.to_diff_dict()!r})).push_to_hub("user/stock")
        hf_relpos.convert("user/stock", {str(tmp_path / "out")!r}, position_embedding_type="shaw", method="drop")

        class Trainer(transformers.Trainer):
            def create_model_card(self, *args, **kwargs):
                super().create_model_card(*args, **kwargs)
                hf_relpos.merge_card({str(tmp_path / "out")!r}, self.args.output_dir)

        row = torch.arange(1, 9)
        arguments = TrainingArguments(
            {str(tmp_path / "trained")!r}, max_steps=1, report_to="none", use_cpu=True, hub_model_id="user/trained"
        )
        model = AutoModelForMaskedLM.from_pretrained({str(tmp_path / "out")!r})
        trainer = Trainer(model, arguments, train_dataset=[{{"input_ids": row, "labels": row}}])
        trainer.train()
        trainer.push_to_hub()
        """,
        without=(),
    )
    files = hub.files("user/trained")
    card = ModelCard(files["README.md"].decode())
    assert card.data.base_model == "user/stock" and card.data.base_model_relation == "finetune"
    assert HEADING in card.text and "scheme `shaw`" in card.text and "conversion.json" in files
