"""Text and records from files: every kind and packing, what is refused, and windows that share nothing."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest

from hf_relpos import demo
from hf_relpos.data import TextError, cut_windows, read_texts
from hf_relpos.data.records import iterate_records, read_lines, read_records
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


def test_null_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": null}\n{"text": "two"}\n')
    assert list(read_texts(tmp_path / "a.jsonl")) == ["one", "two"]


def test_a_folder_is_all_its_texts_by_name(tmp_path):
    write(tmp_path, "b.txt", "second")
    write(tmp_path, "a.jsonl.gz", '{"text": "first"}\n')
    write(tmp_path, "c.pdf", "not read")
    assert list(read_texts(tmp_path)) == ["first", "second"]
    assert list(read_texts(tmp_path, limit=1)) == ["first"]


def test_a_quoted_cell_may_hold_line_ends_and_commas(tmp_path):
    path = write(tmp_path, "a.csv", 'id,text\n1,"one,\ntwo"\n\n2,three\n')
    assert read_records(path, ["text", "id"]) == [{"text": "one,\ntwo", "id": "1"}, {"text": "three", "id": "2"}]


def test_nothing_quotes_between_tabs(tmp_path):
    path = write(tmp_path, "a.tsv", 'id\ttext\n1\t"open\n2\tclosed"\n')
    assert [record["text"] for record in read_records(path, ["text"])] == ['"open', 'closed"']


def test_columns_without_a_header(tmp_path):
    path = write(tmp_path, "a.tsv", "0.5\tone\ttwo\n")
    assert read_records(path, ["score", "a", "b"]) == [{"score": "0.5", "a": "one", "b": "two"}]


def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path):
    assert read_records(write(tmp_path, "a.csv", "\ufefftext\none\n"), ["text"]) == [{"text": "one"}]


def test_lines_are_read_as_they_are_asked_for(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"text": "good"}\nnot JSON\n')
    records = iterate_records(path, ["text"])
    assert next(records) == {"text": "good"}
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not JSON"):
        next(records)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            '{"body": "x"}\n',
            r"line 1: no field 'text' \(it has body\); name one of these with field \(--field\)",
        ),
        ("a.jsonl", "[1]\n", "line 1: a list, not an object"),
        (
            "a.tsv",
            "body\tn\nx\t1\n",
            r"line 1: no column 'text' \(it has body, n\); name one of these with field \(--field\)",
        ),
        ("a.csv", "n,text\n1\n", "line 2: 1 columns, and 'text' is column 2"),
        ("a.txt", "zero \0 bytes\n", "holds zero bytes"),
        ("a.pdf", "x", r"ends in '\.pdf'"),
    ],
)
def test_what_is_wrong_with_a_text_is_said(tmp_path, name, content, message):
    with pytest.raises(TextError, match=message):
        list(read_texts(write(tmp_path, name, content)))


def test_a_packed_file_that_is_cut_short(tmp_path):
    path = tmp_path / "a.txt.xz"
    path.write_bytes(lzma.compress(b"a long line of text\n" * 500)[:-20])
    with pytest.raises(ValueError, match="not readable as UTF-8 text"):
        read_lines(path)


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("address", ["https://example.org/a.txt", "https://example.org/corpus", "hf://datasets/a/b"])
def test_addresses_are_not_read(address, kind):
    with pytest.raises(TextError, match=f"text = '{address}': nothing is read from the web; download it and give"):
        list(read_texts(kind(address)))


@pytest.mark.parametrize("name", ["nothing.txt", "./nothing", "/nothing/there", "a/b/c/d", "nothing.txt.gz"])
def test_a_path_is_not_taken_for_a_dataset(name):
    with pytest.raises(TextError, match="there is no such file; check the path"):
        list(read_texts(name))


def test_a_name_with_a_dot_may_be_a_dataset(monkeypatch):
    import sys
    from types import SimpleNamespace

    asked = []

    def load_dataset(name, configuration, split, streaming):
        asked.append((name, configuration, split, streaming))
        return iter([{"text": "a"}, {"text": "b"}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert list(read_texts("user/corpus-1.5:train")) == ["a", "b"]
    assert list(read_texts("user/corpus-1.5/en:test", limit=1)) == ["a"]
    assert asked == [("user/corpus-1.5", None, "train", True), ("user/corpus-1.5", "en", "test", True)]


def test_the_parts_of_a_text_share_no_passage():
    tokenizer = load_tokenizer(demo.CHECKPOINT)
    texts = list(demo.read_text("train"))
    parts = {
        part: cut_windows(tokenizer, texts, 20_000, (64,), short=0.3, seed=3, part=part) for part in ("fit", "check")
    }
    runs = {
        part: {tuple(ids[at : at + 24]) for ids in windows.ids for at in range(len(ids) - 24)}
        for part, windows in parts.items()
    }
    assert all(runs.values()) and not runs["fit"] & runs["check"]
    for windows in parts.values():
        assert all(ids[0] == tokenizer.cls_token_id and ids[-1] == tokenizer.sep_token_id for ids in windows.ids)
