"""Every code block of README.md, docs/ and ways_in/ runs, offline: small models stand in for those of the Hub.

The names in the pages are real ones. Here they are repositories of a Hub on this machine (`hub_server`), which hold
the packaged BERT, or tiny models of the architecture; pages may push there.
"""

import json
import lzma
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from doc_blocks import blocks
from folders import contents, edit, write_modules
from hub_fixtures import ROOT, running_hub
from oracles import tiny_sizes
from selection import with_full
from transformers import BertTokenizer, DebertaV2Config, DebertaV2ForSequenceClassification

from hf_relpos.demo import CHECKPOINT


# what three new users do, from the wheel on: the owners of an absolute and of a relative checkpoint, a researcher
WAYS_IN = sorted((ROOT / "tests" / "ways_in").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")), *WAYS_IN]
WITH_CODE = {str(page.relative_to(ROOT)): found for page in PAGES if (found := blocks(page))}
RUNS = {name for name, found in WITH_CODE.items() if any(not each.reason for each in found)}
# they convert with text, train, or run commands that start processes
SLOW = {"README.md", "tests/ways_in/absolute.md"}
SLOW |= {f"docs/{name}.md" for name in ("convert", "evaluate", "long_inputs", "serve")}
# blocks that the tests do not run, each with its reason in the page
NOT_RUN_COUNT = 15


def relative_bert():
    """Weights that Transformers 4.57 wrote."""
    folder = ROOT / "tests" / "fixtures" / "legacy" / "relative_key_query" / "BertForMaskedLM"
    return {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")}


def deberta(folder):
    tokenizer = BertTokenizer.from_pretrained(CHECKPOINT)
    labels = {"contradiction": 0, "entailment": 1, "neutral": 2}
    sizes = tiny_sizes(vocab_size=len(tokenizer), hidden_size=32, num_attention_heads=2, max_position_embeddings=512)
    relative = {"relative_attention": True, "position_buckets": 16, "pos_att_type": ["p2c", "c2p"]}
    relative |= {"norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False}
    names = dict(zip(labels.values(), labels, strict=True))
    config = DebertaV2Config(**sizes, **relative, num_labels=3, id2label=names, label2id=labels)
    DebertaV2ForSequenceClassification(config).save_pretrained(folder)
    files = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
    return contents(folder) | {name: (CHECKPOINT / name).read_bytes() for name in files}


def sentence_encoder(folder):
    """The packaged BERT with mean pooling."""
    shutil.copytree(CHECKPOINT, folder)
    edit(folder, architectures=["BertModel"])
    write_modules(folder, "Pooling", "Normalize", word_embedding_dimension=128, pooling_mode_mean_tokens=True)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 128}))
    return contents(folder)


def write_texts(folder):
    """The files of a reader: texts, sentence pairs with scores, documents with questions about them."""
    paths = {name: CHECKPOINT.parent / "text" / f"{name}.txt.xz" for name in ("train", "eval")}
    text = {name: lzma.decompress(path.read_bytes()).decode() for name, path in paths.items()}
    (folder / "texts.txt").write_text(text["train"], "utf-8")
    (folder / "held-out.txt").write_text(text["eval"][:40_000], "utf-8")
    sentences = [line.strip() for line in text["eval"].split(". ") if 20 < len(line) < 120 and "\n" not in line][:60]
    pairs = enumerate(zip(sentences[::2], sentences[1::2], strict=False))
    rows = ["score\tsentence1\tsentence2\n", *(f"{i % 6}\t{a}\t{b}\n" for i, (a, b) in pairs)]
    (folder / "pairs.tsv").write_text("".join(rows), "utf-8")
    paragraphs = [part for part in text["eval"].split("\n\n") if len(part) > 300][:8]
    documents = [{"id": str(number), "text": part} for number, part in enumerate(paragraphs)]
    queries = [{"query": each["text"][:80], "doc": each["id"]} for each in documents]
    for name, records in (("docs", documents), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records), "utf-8")


def check_elsewhere(interpreter, env, folder):
    """What is imported there is not the checkout."""
    code = "import hf_relpos; print(hf_relpos.__file__)"
    done = subprocess.run([interpreter, "-c", code], env=env, cwd=folder, capture_output=True, text=True, check=True)
    package = Path(done.stdout.strip())
    assert package.is_relative_to(Path(interpreter).parents[1]), f"{interpreter} imports {package}"


@pytest.fixture(scope="module")
def process(tmp_path_factory, request):
    """Runs pages, with a Hub that has the models they name; in the environment of `--interpreter`, if given."""
    folder = tmp_path_factory.mktemp("pages")
    torch.manual_seed(0)
    with running_hub(folder / "hub") as hub:
        for name in ("google-bert/bert-base-uncased", "user/my-bert"):
            hub.put(name, contents(CHECKPOINT))
        hub.put("sentence-transformers/all-MiniLM-L6-v2", sentence_encoder(folder / "sentences"))
        hub.put("zhiheng-huang/bert-base-uncased-embedding-relative-key-query", relative_bert())
        hub.put("cross-encoder/nli-deberta-v3-base", deberta(folder / "deberta"))
        given = request.config.getoption("--interpreter")
        interpreter = str(Path(given).absolute()) if given else sys.executable
        if given:
            del hub.env["PYTHONPATH"]
            check_elsewhere(interpreter, hub.env, folder)
        path = f"{Path(interpreter).parent}:{hub.env['PATH']}"
        env = hub.env | {"HF_HOME": str(folder / "home"), "PATH": path, "MPLBACKEND": "agg"}
        command = [interpreter, str(ROOT / "tests" / "doc_blocks.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=env, cwd=folder, **pipes) as running:
            yield running
            running.stdin.close()


@pytest.mark.parametrize("name", with_full(sorted(RUNS - SLOW), sorted(RUNS)))
def test_the_code_of_a_page_runs(process, tmp_path, name):
    folder = tmp_path / "page"
    folder.mkdir()
    write_texts(folder)
    found = [block for block in WITH_CODE[name] if not block.reason and block.language in ("python", "bash")]
    process.stdin.write(json.dumps({"folder": str(folder), "blocks": found}) + "\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    assert answer["status"] == 0, answer["log"]


def test_blocks_that_are_not_run_are_few_and_say_why():
    found = Counter(block.reason for page in WITH_CODE.values() for block in page if block.reason)
    assert found.total() == NOT_RUN_COUNT, found


def test_every_fence_has_a_language():
    languages = {block.language for page in WITH_CODE.values() for block in page}
    assert languages <= {"python", "bash", "text", "json"}
