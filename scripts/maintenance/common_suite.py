"""Run Transformers' common model suite on all heads of `relpos_bert`, one position scheme at a time.

    pip install parameterized
    pip download transformers==5.23.0 --no-binary :all: --no-deps
    python scripts/maintenance/common_suite.py transformers-5.23.0.tar.gz shaw tables

The sdist has `tests/test_modeling_common.py` and `tests/test_configuration_common.py`, but not all that they import.
The files below replace what it lacks with our tests: export by `transformers.exporters`, run at another length, and
generation. Nothing else of the suite is changed: the heads' names are added to the tables that tell which labels a
class takes, and `test_can_init_all_missing_weights_before_2023` is set, as for a new model.

With Transformers 5.23.0 and PyTorch 2.13.0 on the CPU, `shaw`, `tables`, `relative_key_query`, `transformer_xl`, `t5`
and `deberta` each pass 108 of 163 tests; the suite skips 54, and one fails:
`test_sdpa_can_dispatch_non_composite_models` expects "sdpa" as the default attention. Here it is "relpos", which
chooses a backend for each call, since SDPA would compute each relative term as a dense bias. Two tests load
checkpoints without encoder weights on purpose, and pass: an empty `state_dict` means a new model, and
`output_loading_info=True` returns the missing names. Any other such load raises an error.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree
from collections import Counter
from pathlib import Path


FROM_SDIST = ("test_modeling_common.py", "test_configuration_common.py", "test_memory_cleanup_mixin.py")
STAND_INS = {
    "__init__.py": "",
    "exporters/__init__.py": "",
    "exporters/test_export.py": '''
import torch
from parameterized import parameterized


class ExportTesterMixin:
    """Programs and ONNX graphs of every head give what the model gives, at the length exported and at another."""

    def check_export(self, backend, exporter, settings):
        for model_class in self.all_model_classes:
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            inputs = self._prepare_for_class(inputs, model_class)
            model = model_class(config).eval()
            model.set_attn_implementation(backend)
            for parameter in model.parameters():  # larger than at initialisation, for the outputs to tell
                torch.nn.init.normal_(parameter, std=0.1)
            longer = {name: torch.cat([value, value], dim=-1) for name, value in inputs.items()}
            with self.subTest(model_class.__name__), torch.no_grad():
                exported = exporter.export(model, inputs, config=settings)
                for case in (inputs, longer):
                    torch.testing.assert_close(exported(**case)[0], model(**case)[0], atol=1e-4, rtol=1e-4)

    @parameterized.expand(["relpos", "sdpa", "eager"])
    def test_torch_export(self, backend):
        from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter

        self.check_export(backend, DynamoExporter(), DynamoConfig(dynamic=True))

    def test_onnx_export(self):
        from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

        self.check_export("sdpa", OnnxExporter(), OnnxConfig(dynamic=True))
''',
    "generation/__init__.py": "",
    "generation/test_utils.py": '''
import torch


class GenerationTesterMixin:
    """Greedy and beam search give the same with a cache and without."""

    def test_generation_with_and_without_cache(self):
        for model_class in self.all_generative_model_classes:
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            config.is_decoder = True
            model = model_class(config).eval()
            for beams in (1, 2):
                arguments = {"max_new_tokens": 4, "do_sample": False, "num_beams": beams, "eos_token_id": -1}
                cached = model.generate(inputs["input_ids"], use_cache=True, **arguments)
                again = model.generate(inputs["input_ids"], use_cache=False, **arguments)
                assert torch.equal(cached, again)
''',
    "utils/__init__.py": "",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
    "test_relpos_bert.py": """
import os
import unittest

import torch
from transformers.models.auto import modeling_auto

from hf_relpos import RelPosBertConfig
from hf_relpos.models.modeling_relpos_bert import HEADS

from .generation.test_utils import GenerationTesterMixin
from .test_configuration_common import ConfigTester
from .test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask

MAPPINGS = {
    "AutoModel": "MODEL_MAPPING_NAMES",
    "AutoModelForPreTraining": "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForNextSentencePrediction": "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForMultipleChoice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
}
for auto, head in HEADS.items():
    getattr(modeling_auto, MAPPINGS[auto])["relpos_bert"] = head.__name__


class RelPosBertTester:
    batch_size = 3
    seq_length = 7
    is_training = True
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4
    num_choices = 4
    vocab_size = 99
    pad_token_id = 0

    def get_config(self):
        return RelPosBertConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=37,
            hidden_act="gelu",
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            max_position_embeddings=32,
            position_embedding_type=os.environ["SCHEME"],
        )

    def prepare_config_and_inputs_for_common(self):
        shape = [self.batch_size, self.seq_length]
        return self.get_config(), {
            "input_ids": ids_tensor(shape, self.vocab_size),
            "token_type_ids": ids_tensor(shape, 2),
            "attention_mask": random_attention_mask(shape),
        }


class RelPosBertModelTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = tuple(HEADS.values())
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = RelPosBertTester()
        self.config_tester = ConfigTester(self, config_class=RelPosBertConfig, hidden_size=32, num_attention_heads=4)

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        if return_labels and model_class.__name__ == HEADS["AutoModelForPreTraining"].__name__:
            rows = (self.model_tester.batch_size, self.model_tester.seq_length)
            inputs["labels"] = torch.zeros(rows, dtype=torch.long)
            inputs["next_sentence_label"] = torch.zeros(rows[0], dtype=torch.long)
        return inputs

    def test_config(self):
        self.config_tester.run_common_tests()
""",
}


def lay_out(sdist: Path, folder: Path) -> None:
    """The suite's package `tests` in that folder."""
    files = {f"tests/{name}": text.encode() for name, text in STAND_INS.items()}
    with tarfile.open(sdist) as archive:
        for member in archive:
            inner = member.name.partition("/")[2]
            if inner.removeprefix("tests/") in FROM_SDIST and (opened := archive.extractfile(member)) is not None:
                files[inner] = opened.read()
    missing = [name for name in FROM_SDIST if f"tests/{name}" not in files]
    if missing:
        raise SystemExit(f"{sdist} has no {', '.join(missing)}: give the sdist of Transformers, not the wheel")
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def run(folder: Path, scheme: str, arguments: list[str]) -> tuple[Counter, list[str]]:
    """How many tests ended in which way, and the first line of every failure."""
    report = folder / f"{scheme}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["tests/test_relpos_bert.py", *arguments]
    places = [str(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "SCHEME": scheme, "PYTHONPATH": os.pathsep.join(places)}
    subprocess.run(command, cwd=folder, env=environment, check=False)
    counts: Counter = Counter()
    failures = []
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        failed = [each for each in case if each.tag in ("failure", "error")]
        skipped = any(each.tag == "skipped" for each in case)
        counts["failed" if failed else "skipped" if skipped else "passed"] += 1
        failures += [f"{case.get('name')}: {(each.get('message') or '').splitlines()[0]}" for each in failed[:1]]
    return counts, failures


def main() -> None:
    """Run the schemes one after the other and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sdist", type=Path, help="transformers-5.23.0.tar.gz")
    parser.add_argument("schemes", nargs="+", help="values of position_embedding_type")
    options, arguments = parser.parse_known_args()
    rows, lines, failed = ["| scheme | tests | passed | skipped | failed |", "| --- | --- | --- | --- | --- |"], [], 0
    with tempfile.TemporaryDirectory() as folder:
        lay_out(options.sdist, Path(folder))
        for scheme in options.schemes:
            counts, failures = run(Path(folder), scheme, arguments)
            shown = " | ".join(str(counts[word]) for word in ("passed", "skipped", "failed"))
            rows.append(f"| {scheme} | {sum(counts.values())} | {shown} |")
            lines += [f"- {scheme}: {line}" for line in failures]
            failed += counts["failed"]
            print("\n".join([*rows, "", *lines]), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
