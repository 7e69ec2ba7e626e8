"""What `import hf_relpos` offers, and what it does to the interpreter."""

import ast
import json
import os
import types
from pathlib import Path

import pytest
from launching import run_code
from selection import with_full

import hf_relpos
from hf_relpos.models.modeling_relpos_bert import HEADS


def test_every_name_is_reachable_and_known_to_type_checkers():
    assert len(set(hf_relpos.__all__)) == len(hf_relpos.__all__)
    assert all(callable(getattr(hf_relpos, name)) or name == "SCHEMES" for name in hf_relpos._MODULES)
    assert isinstance(hf_relpos.convert, types.FunctionType) and isinstance(hf_relpos.__version__, str)
    assert set(hf_relpos.__all__) <= set(dir(hf_relpos))
    stub = ast.parse(Path(hf_relpos.__file__).with_suffix(".pyi").read_text("utf-8"))
    declared = {name.asname: f".{node.module}" for node in stub.body[:-1] for name in node.names}
    assert declared == hf_relpos._MODULES


def test_names_that_are_not_there():
    assert hf_relpos.files.__name__ == "hf_relpos.files"
    for name in ("convrt", "_convert"):
        with pytest.raises(AttributeError, match=f"module 'hf_relpos' has no attribute '{name}'"):
            getattr(hf_relpos, name)


def test_every_head_is_public():
    assert {head.__name__ for head in HEADS.values()} <= set(hf_relpos.__all__)


FRESH = """
import json, sys
import transformers
from transformers import AutoConfig, AutoModel, BertConfig, BertModel, BertTokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

before = {name.split(".")[0] for name in sys.modules}
import hf_relpos
after = {name.split(".")[0] for name in sys.modules}

from hf_relpos.models.modeling_relpos_bert import HEADS
from hf_relpos.registration import register

register()  # a second time must do no harm
config = hf_relpos.RelPosBertConfig
print(json.dumps({
    "new": sorted(after - before),
    "registered": [auto for auto, head in HEADS.items() if getattr(transformers, auto)._model_mapping[config] is head],
    "config": type(AutoConfig.for_model("relpos_bert")) is config,
    "tokenizer": TOKENIZER_MAPPING[config] is BertTokenizer,
    "bert": AutoModel._model_mapping[BertConfig] is BertModel and type(AutoConfig.for_model("bert")) is BertConfig,
}))
"""


@pytest.mark.slow
def test_import_registers_and_brings_nothing_else():
    """In a new interpreter: no command line libraries, every Auto class filled, stock BERT as it was.

    A wrong setting of ours does not break the imports of another library.
    """
    settings = {**os.environ, "HF_RELPOS_ONEDNN": "maybe"}
    found = json.loads(run_code(FRESH, env=settings).stdout.splitlines()[-1])
    assert "hf_relpos" in found["new"]
    assert not {"typer", "rich", "accelerate", "datasets", "tokenizers"} & set(found["new"])
    assert found["registered"] == list(HEADS)
    assert found["config"] and found["tokenizer"] and found["bert"]


LATER = """
import sys
{before}
import hf_relpos

if {lazy}:
    assert not {{"torch", "transformers"}} & set(sys.modules)
    hf_relpos.__version__
    assert "hf_relpos.registration" not in sys.modules
{use}
assert "hf_relpos.registration" in sys.modules
assert not any("_Watcher" in str(finder) for finder in sys.meta_path)
from transformers import AutoConfig, AutoModelForMaskedLM
from hf_relpos.attention.dispatch import BACKENDS

model = AutoModelForMaskedLM.from_config(AutoConfig.for_model("relpos_bert", hidden_size=24))
assert type(model) is hf_relpos.RelPosBertForMaskedLM and BACKENDS[0].name == "flex_attention"
assert type(sys.modules["transformers.modeling_utils"].__spec__.loader).__name__ == "SourceFileLoader"
"""
WAYS = {
    "the Auto classes, before": ("from transformers import AutoModel", "pass"),
    "the Auto classes, after": ("", "from transformers import AutoModel"),
    "another model, after": ("import transformers.utils", "from transformers import BertModel"),
    "a name of ours": ("", "hf_relpos.RelPosBertModel"),
    "a module of ours": ("", "import hf_relpos.attention.formula, hf_relpos.attention.dispatch"),
    "the module that registers": ("", "import hf_relpos.registration"),
    "a tokenizer, in a thread": (
        "",
        "import threading\n"
        "import_it = lambda: __import__('transformers').AutoTokenizer\n"
        "threads = [threading.Thread(target=import_it) for _ in range(3)]\n"
        "[thread.start() for thread in threads], [thread.join() for thread in threads]",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", with_full(["the Auto classes, after"], WAYS))
def test_import_registers_when_the_auto_classes_are_imported(way):
    """And imports neither torch nor Transformers before."""
    before, use = WAYS[way]
    run_code(LATER.format(before=before, use=use, lazy=not before))
