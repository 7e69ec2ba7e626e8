"""Files of text with random content, or valid ones with random damage: read as they are, or refused by name."""

import bz2
import gzip
import json
import lzma

import pytest
from fuzzing import attempt, examples
from hypothesis import given, strategies as st
from launching import import_script

from hf_relpos import demo
from hf_relpos.data import TextError, cut_windows, read_texts
from hf_relpos.data.records import iterate_records
from hf_relpos.data.text import paths_or_documents
from hf_relpos.evaluation.loading import load_tokenizer


CONLL = import_script("recipes.conll")
PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
CHARACTERS = st.characters(codec="utf-8")
LINES = st.text(st.one_of(CHARACTERS, st.sampled_from('\t",;\n\r \ufeff\u2028')), max_size=60)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(), max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=5,
)
TOKENS = st.text(st.sampled_from("aB-IOES \t\n#x1\u3000"), max_size=80)
PAIRS = ("score", "sentence1", "sentence2")
DEEP = st.integers(0, 3000).map(lambda depth: "[" * depth + "]" * depth)


def records(*fields):
    """Lines of JSON: objects with these fields and any values, other values, and what is no JSON."""
    objects = st.fixed_dictionaries({field: st.one_of(st.text(CHARACTERS, max_size=9), JSON) for field in fields})
    whole = st.one_of(objects, objects, JSON).map(lambda value: json.dumps(value))
    return st.lists(st.one_of(whole, whole, LINES, DEEP), max_size=6).map("\n".join)


def tables(*fields):
    """Tab- or comma-separated text under a header that names these fields, in most cases."""
    header = st.one_of(st.sampled_from(["\t".join(fields), ",".join(fields)]), LINES)
    cells = st.lists(st.text(st.sampled_from('a1.,\t"\n '), max_size=30), max_size=6)
    return st.tuples(header, cells).map(lambda parts: "\n".join([parts[0], *parts[1]]))


@st.composite
def damaged(draw, contents):
    """A file's name and bytes: content in UTF-8 or not, packed or not, cut, overwritten or put before other bytes."""
    packing = draw(st.sampled_from([*PACK]))
    encoding = draw(st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1"]))
    content = PACK[packing](draw(contents).encode(encoding, "replace"))
    if draw(st.booleans()):
        at = draw(st.integers(0, len(content)))
        content = content[:at] + draw(st.binary(max_size=8)) + content[at + draw(st.integers(0, 40)) :]
    return packing, content


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("texts")


def is_text(value):
    return isinstance(value, str) and value.encode() is not None and "\0" not in value


def has_texts(path):
    return all(is_text(text) and text.strip() for text in read_texts(path))


def has_pairs(path):
    return all(record.keys() == {*PAIRS} for record in iterate_records(path, PAIRS))


def has_tags(path):
    for words, tags in CONLL.read_conll(path):
        assert len(words) == len(tags) > 0 and all(map(CONLL.TAG.fullmatch, tags))
    return True


# Files, what is damaged in them, what is right of what is read, and the error that they may end in.
FILES = {
    "a.txt": (LINES, has_texts, TextError),
    "a.jsonl": (records("text"), has_texts, TextError),
    "a.tsv": (tables("text"), has_texts, TextError),
    "a.csv": (tables("text", "n"), has_texts, TextError),
    "pairs.jsonl": (records(*PAIRS), has_pairs, ValueError),
    "pairs.tsv": (tables(*PAIRS), has_pairs, ValueError),
    "pairs.csv": (tables(*PAIRS), has_pairs, ValueError),
    "a.conll": (TOKENS, has_tags, ValueError),
}


@pytest.mark.parametrize("name", FILES)
def test_read_any_file(folder, name):
    contents, is_right, error = FILES[name]

    @examples(few=30, share=0.75)
    @given(damaged(contents))
    def run(file):
        path = folder / f"{name}{file[0]}"
        path.write_bytes(file[1])
        with attempt("text files" if error is TextError else "data sets", error, names=str(path)):
            assert is_right(path)

    run()


@examples(few=30)
@given(st.one_of(JSON, st.binary(), st.lists(st.one_of(st.text(st.characters()), st.binary(), JSON), max_size=4)))
def test_texts_given_by_the_caller(texts):
    with attempt("texts given by the caller", TextError, names="texts"):
        assert all(is_text(str(text)) for text in paths_or_documents(texts))


@examples(few=30)
@given(
    st.lists(st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" .\n")), max_size=300), max_size=8),
    st.integers(1, 300),
    st.sampled_from([(8,), (16, 64), (3, 5)]),
    st.floats(0, 1),
    st.sampled_from(["all", "fit", "check"]),
    st.one_of(st.integers(0, 2**32 - 1), st.integers()),
)
def test_windows_of_any_text(texts, tokens, lengths, short, part, seed):
    tokenizer = load_tokenizer(demo.CHECKPOINT)
    with attempt("windows of text", ValueError):
        windows = cut_windows(tokenizer, texts, tokens, lengths, short, seed, part)
        assert windows.ids and 0 <= windows.unknown_rate <= 1
        for ids in windows.ids:
            assert 3 <= len(ids) <= max(lengths) and ids[0] == tokenizer.cls_token_id
            assert ids[-1] == tokenizer.sep_token_id and max(ids) < len(tokenizer)
