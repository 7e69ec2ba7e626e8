"""What `import hf_relpos` offers, and what it does to the interpreter."""

import json
import subprocess
import sys
import types

import hf_relpos
from hf_relpos.model.modeling_relpos_bert import HEADS


def test_all_is_what_is_reachable():
    reachable = {
        name
        for name, value in vars(hf_relpos).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert reachable == set(hf_relpos.__all__) - {"__version__", *hf_relpos._LAZY}
    assert all(callable(getattr(hf_relpos, name)) for name in hf_relpos._LAZY)
    assert isinstance(hf_relpos.convert, types.FunctionType)
    assert len(set(hf_relpos.__all__)) == len(hf_relpos.__all__)
    assert isinstance(hf_relpos.__version__, str)


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

from hf_relpos.model.modeling_relpos_bert import HEADS
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


def test_import_registers_and_brings_nothing_else():
    """In a new interpreter: no Triton, no command line libraries, every Auto class filled, stock BERT as it was."""
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "hf_relpos" in found["new"]
    assert not {"triton", "typer", "rich", "accelerate", "datasets", "tokenizers"} & set(found["new"])
    assert found["registered"] == list(HEADS)
    assert found["config"] and found["tokenizer"] and found["bert"]
