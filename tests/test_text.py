"""Text and records from files: every kind and packing, what is refused, and windows that share nothing."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest
from launching import import_script

from hf_relpos import demo
from hf_relpos.data import TextError, cut_windows, read_texts
from hf_relpos.data.records import iterate_records
from hf_relpos.data.text import paths_or_documents
from hf_relpos.data.windows import pieces, sentences
from hf_relpos.evaluation.loading import load_tokenizer


DOCUMENTS = ["One, two.", 'A "quoted" word\tand a tab', "Ende – fürwahr ☃"]


def write(folder, name, content):
    path = folder / name
    packed = {".xz": lzma.compress, ".gz": gzip.compress, ".bz2": bz2.compress}.get(path.suffix, bytes)
    path.write_bytes(packed(content.encode()))
    return path


@pytest.mark.parametrize("packing", ["", ".xz", ".gz", ".bz2"])
def test_all_kinds_hold_the_same(tmp_path, packing):
    lines = [" ".join(document.split()) for document in DOCUMENTS]
    kinds = {
        "a.txt": "\n\n \n".join(lines) + "\n",
        "a.jsonl": "".join(json.dumps({"n": 1, "text": line}) + "\n\n" for line in lines),
        "a.tsv": "text\tn\n" + "".join(f"{line}\t1\n" for line in lines),
        "a.csv": "n,text\r\n" + "".join('1,"' + line.replace('"', '""') + '"\r\n' for line in lines),
    }
    for name, content in kinds.items():
        assert list(read_texts(write(tmp_path, name + packing, content))) == lines, name


def test_a_folder_is_all_its_texts_by_name(tmp_path):
    write(tmp_path, "b.txt", "second")
    write(tmp_path, "a.jsonl.gz", '{"text": "first"}\n')
    write(tmp_path, "c.pdf", "not read")
    assert list(read_texts(tmp_path)) == ["first", "second"]


RECORDS = [
    ("a.jsonl", '{"text": "one"}\n{"text": null}\n{"text": "two"}\n', ["one", "two"]),
    ("a.csv", 'id,text\n1,"one,\ntwo"\n\n2,three\n', ["one,\ntwo", "three"]),  # a quoted cell
    ("a.tsv", 'id\ttext\n1\t"open\n2\tclosed"\n', ['"open', 'closed"']),  # nothing quotes between tabs
    ("a.csv", "\ufefftext\none\n", ["one"]),  # a byte order mark is no part of the header
]


@pytest.mark.parametrize("name, content, texts", RECORDS)
def test_texts_are_those_of_the_records(tmp_path, name, content, texts):
    assert list(read_texts(write(tmp_path, name, content))) == texts


def test_lines_are_read_as_they_are_asked_for(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"text": "good"}\nnot JSON\n')
    records = iterate_records(path, ["text"])
    assert next(records) == {"text": "good"}
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not JSON"):
        next(records)


WRONG = [
    ("a.jsonl", '{"body": "x"}\n', r"record 1: no field 'text' \(it has body\); name one .*field \(--field\)"),
    ("a.jsonl", "[1]\n", "line 1: a list, not an object"),
    ("a.tsv", "body\tn\nx\t1\n", r"record 1: no field 'text' \(it has body, n\); name one .*field \(--field\)"),
    ("a.csv", "n,text\n1\n", "record 1: ends before 'text'; correct it, or name one of these"),
    ("a.txt", "zero \0 bytes\n", "record 1: 'paragraph' holds a zero character"),
    ("a.jsonl", "[" * 200_000, "line 1: not JSON .*(recursion|Stack overflow).*; put one object on each line"),
    ("a.jsonl", '{"text": "a"}\n{"text": ["b", "c"]}\n', r"record 2: 'text' is a list, not text \(\['b', 'c'\]\)"),
    ("a.jsonl", '{"text": 5}\n', "record 1: 'text' is a int, not text"),
    ("a.jsonl", '{"text": "half \\ud83d"}\n', r"record 1: 'text' holds '\\ud83d', a lone surrogate.*remove it"),
    ("a.jsonl", '{"text": "a\\u0000b"}\n', "record 1: 'text' holds a zero character; remove it"),
    ("a.csv", 'text\n"never closed\nand the rest\n', "record 1: unexpected end of data; correct it"),
    ("a.pdf", "x", r"ends in '\.pdf'"),
]


@pytest.mark.parametrize(("name", "content", "message"), WRONG)
def test_what_is_wrong_with_a_text_is_said(tmp_path, name, content, message):
    with pytest.raises(TextError, match=message):
        list(read_texts(write(tmp_path, name, content)))


NO_TEXT = [
    *(("a.txt", "Grüße\n".encode(encoding)) for encoding in ("latin-1", "utf-16")),
    ("a.txt.xz", lzma.compress(b"a long line of text\n" * 500)[:-20]),
    *((f"a.txt{packing}", b"plain text") for packing in (".xz", ".gz", ".bz2")),
    ("a.txt.gz", b"\x1f\x8b\x08 and more"),
    ("a.txt.bz2", b"BZh9 and more"),
]


@pytest.mark.parametrize("name, content", NO_TEXT)
def test_bytes_that_are_no_text(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TextError, match=rf"{name}: not readable as UTF-8 text .*; restore or re-encode the file"):
        list(read_texts(tmp_path / name))


@pytest.mark.parametrize("source", [b"a.txt", 5, None, [5], [b"a.txt"], "", " ", "~nobody-of-this-name/a", "a" * 300])
def test_what_is_no_path_is_said(source):
    with pytest.raises(TextError, match=r"texts = .*; (give|check)"):
        list(read_texts(source))


def test_an_error_shows_the_beginning_of_a_long_line(tmp_path):
    with pytest.raises(ValueError, match="has 1 columns") as caught:
        import_script("recipes.conll").read_conll(write(tmp_path, "a.conll", "x" * 100_000))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["z.txt", "./nothing", "/nothing/there", "user/dataset", "https://example.org/a.txt"])
def test_read_texts_of_a_missing_file(name):
    with pytest.raises(TextError, match=r"there is no such file; check the path\..*load_dataset"):
        list(read_texts(name))


NEITHER = [
    (b"a.txt", "texts is a bytes; give a path"),
    ({"a.txt": 1}, "texts is a dict; give a path"),
    ({"one", "two"}, "texts is a set; give a path"),
    (5, "texts is a int; give a path"),
    ("", "texts = '' is empty"),
    ([], "texts is empty; give a path"),
    (["one", b"two"], r"texts\[1\] is a bytes, not text"),
    ([["one"]], r"texts\[0\] is a list, not text"),
    (["one", None], r"texts\[1\] is a NoneType, not text"),
    (["one", "\ud83d"], r"texts\[1\] holds '\\ud83d', a lone surrogate"),
    ([Path("a.txt"), "one"], r"texts\[1\] is a document, and texts\[0\] is a path"),
    (["one", Path("a.txt")], r"texts\[1\] is a path \('a.txt'\), and texts\[0\] is a document"),
]


@pytest.mark.parametrize("texts, words", NEITHER)
def test_texts_are_paths_or_documents(texts, words):
    with pytest.raises(TextError, match=words):
        paths_or_documents(texts)


def test_strings_that_are_files_are_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl.xz").write_text("two")
    (tmp_path / "word").write_text("three")
    names = ["a.txt", str(tmp_path / "b.jsonl.xz"), str(tmp_path)]
    assert paths_or_documents(names) == paths_or_documents(iter(names)) == [Path(name) for name in names]
    documents = ["word", "none.txt", "a.txt\n", "1/2", "x" * 5000]
    assert paths_or_documents(documents) == documents
    with pytest.raises(TextError, match=r"texts\[1\] is a path \('a.txt'\), and texts\[0\] is a document"):
        paths_or_documents(["a document", "a.txt"])


def test_an_iterator_is_read_once_and_not_to_its_end(monkeypatch):
    assert paths_or_documents(document for document in DOCUMENTS) == DOCUMENTS
    monkeypatch.setattr("hf_relpos.data.text.MAX_CHARACTERS", 10)
    assert paths_or_documents(iter(lambda: "four", "end")) == ["four"] * 3


LONG = {"words": "word " * 2_000_000, "dots": "." * 10_000_000, "Chinese": "这" * 3_000_000}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_a_line_of_ten_megabytes_is_cut_into_pieces(text):
    parts = pieces(text, 448)
    assert "".join(parts) == text.strip() and max(map(len, parts)) <= 448
    windows = cut_windows(load_tokenizer(demo.CHECKPOINT), [text], 2000, (64,))
    assert 1000 < windows.tokens < 3000


def test_sentences_that_are_not_too_long_are_not_cut():
    text = " ".join(f"{'word ' * count}end." for count in (3, 200, 500))
    assert pieces(text, 448) == sentences(text)


@pytest.mark.parametrize("text", ["word " * 40, "C1=CC(O)=CC=C1" * 30], ids=["words", "SMILES"])
def test_texts_without_full_stops_fill_the_budget(text):
    """Each document is a sentence, and one that is longer than a window is not lost."""
    tokenizer = load_tokenizer(demo.CHECKPOINT)
    for texts in ([text] * 600, [" ".join([text] * 600)]):
        windows = cut_windows(tokenizer, texts, 8000, (32, 64, 128))
        lengths = [len(row) for row in windows.ids]
        assert windows.tokens > 7600 and {32, 64, 128} <= set(lengths)
        assert sum(length for length in lengths if length == 128) > 1000


@pytest.mark.parametrize("seed", [-1, 2**32, 2**63, 1.5, "1", True, None])
def test_a_seed_that_no_generator_takes(seed):
    with pytest.raises(ValueError, match=r"seed = .*"):
        cut_windows(load_tokenizer(demo.CHECKPOINT), DOCUMENTS, 100, (16,), seed=seed)


@pytest.mark.parametrize("texts", ["a document", [b"bytes"], [5], ["\ud800"]])
def test_windows_of_what_is_no_document(texts):
    with pytest.raises(TextError, match="texts"):
        cut_windows(load_tokenizer(demo.CHECKPOINT), texts, 100, (16,))
