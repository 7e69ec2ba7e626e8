"""Pass keys in long texts: by one vector of a converted encoder, and by windows of its source.

    python scripts/benchmarks/bench_passkeys.py --source all-MiniLM-L6-v2 --converted minilm --text novels.txt.xz

A sentence with a person's pass key is hidden in a filler, at depths evenly from the beginning to the end, and a
question about the person has to find its document among 50 (Zhu et al. 2024, arXiv 2404.12096). The filler is the same
for all documents: sentences that repeat, or a text; the key takes the place of as many tokens. A window without a key
is thus in all documents but a few; where it is the closest to the question, the best window finds none, which is
counted, too. Without training, both are also read by the state of [CLS]: of each window, and of landmarks between
chunks of the converted model's text, whose mean is the vector (arXiv 2601.21525). Beside them: BM25 (bm25s with its
defaults), and late interaction as in ColBERT (arXiv 2004.12832) by the source's token states, untrained. Writes
OUT/passkeys.json and .md; `--converted` is a result of `hf-relpos convert`. Without it only those beside are measured.
"""

import argparse
import functools
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bm25s
import torch
from shared.arguments import RESULTS, positive_int
from shared.measuring import environment
from shared.process import start_quietly
from shared.reports import Table, describe, machine_and_versions, markdown_sections, print_tables, stored, write_report
from torch import nn

from hf_relpos import optimize
from hf_relpos.data import read_texts
from hf_relpos.evaluation import Encoder, hidden_states, load_encoder, pool


REPEATED = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
KEY = "{name}'s pass key is {key}. Remember it. {key} is the pass key for {name}. "
QUESTION = "What is the pass key for {name}?"
NAMES = (
    "Abigail Ahmed Alice Anders Boris Carmen Charlotte Chen Daniel Diana Edward Elena Felix Fiona George Grace Hanna "
    "Henry Ingrid Ivan Jack Julia Karl Kenji Laura Leo Maria Martin Nadia Noah Olga Oscar Paul Petra Quentin Rachel "
    "Robert Sara Simon Tanya Thomas Ursula Victor Vera Walter Wendy Xavier Yusuf Yvonne Zoe"
).split()
LENGTHS = (512, 1024, 2048, 4096, 8192)
PASSAGE = 256  # tokens of a passage of the converted model
CHUNK = 128  # tokens between landmarks


def filler(tokenizer: Any, text: str, tokens: int) -> tuple[list[int], list[int]]:
    """Token ids of a text, at least `tokens`, and the places between them where a sentence ends; 0 is one."""
    ids: list[int] = []
    ends = [0]
    for sentence in itertools.cycle(part.strip() + "." for part in text.split(". ") if part.strip()):
        ids += tokenizer(sentence, add_special_tokens=False, verbose=False).input_ids
        ends.append(len(ids))
        if len(ids) >= tokens:
            return ids, ends
    raise ValueError("the text of the filler is empty")


def documents(tokenizer: Any, text: str, length: int, count: int) -> list[list[int]]:
    """Bodies of `length` − 2 tokens, without special tokens, each with a key at its own depth."""
    ids, ends = filler(tokenizer, text, length)
    generator = torch.Generator().manual_seed(length)
    depths = torch.randperm(count, generator=generator).tolist()
    bodies = []
    for number, depth in enumerate(depths):
        key = int(torch.randint(10_000, 100_000, (), generator=generator))
        sentence = KEY.format(name=NAMES[number % len(NAMES)], key=key)
        hidden = tokenizer(sentence, add_special_tokens=False, verbose=False).input_ids
        room = length - 2 - len(hidden)
        place = max(end for end in ends if end <= room * depth / max(1, count - 1))
        bodies.append([*ids[:place], *hidden, *ids[place + len(hidden) : length - 2]])
    return bodies


def row_of(tokenizer: Any, body: Sequence[int]) -> list[int]:
    """A row with special tokens."""
    return [tokenizer.cls_token_id, *body, tokenizer.sep_token_id]


def read(encoder: Encoder, rows: Sequence[Sequence[int]], batch: int = 8) -> Iterator[torch.Tensor]:
    """The last hidden states of rows, (L, D) each, of which neighbours of one length share a batch."""
    for _, group in itertools.groupby(rows, key=len):
        same = list(map(list, group))
        for start in range(0, len(same), batch):
            ids = torch.tensor(same[start : start + batch])
            yield from hidden_states(encoder.model, ids, torch.ones_like(ids, dtype=torch.bool))


def vectors(encoder: Encoder, states: torch.Tensor) -> torch.Tensor:
    """The normalised vector of a row, and its state of [CLS], (2, D), from its states (L, D)."""
    mask = torch.ones(1, len(states), dtype=torch.bool)
    return nn.functional.normalize(torch.stack([pool(states[None], mask, encoder.pooling)[0], states[0]]), dim=-1)


class Windows:
    """The source's vectors of windows; each distinct one is read once, since documents share their filler."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def of(self, body: Sequence[int], size: int, stride: int) -> torch.Tensor:
        """The `vectors` of windows of `size` tokens, special tokens included, (windows, 2, D).

        The last one ends with the text and is as long as the others: a short one with a key, which little dilutes,
        would be the closest to most questions, also to those about other keys.
        """
        inner = size - 2
        last = max(0, len(body) - inner)
        starts = [*range(0, last, stride), last]
        windows = [tuple(row_of(self.encoder.tokenizer, body[start : start + inner])) for start in starts]
        unknown = sorted({each for each in windows if each not in self.known}, key=len)
        for window, states in zip(unknown, read(self.encoder, unknown), strict=True):
            self.known[window] = vectors(self.encoder, states)
        return torch.stack([self.known[window] for window in windows])


def found(scores: torch.Tensor) -> list[bool]:
    """Whether each question has its own document first among the `len(NAMES)` of its group; ties are no finds.

    Args:
        scores: (questions, documents), where question n asks for document n.
    """
    right = []
    for start in range(0, len(scores), len(NAMES)):
        block = scores[start : start + len(NAMES), start : start + len(NAMES)]
        own = block.diagonal()
        others = block.masked_fill(torch.eye(len(block), dtype=torch.bool), -math.inf).amax(1)
        right += (own > others).tolist()
    return right


def lost_to_filler(scores: torch.Tensor) -> list[bool]:
    """Whether the best window of each question is one that most of the documents have; as `found`."""
    best = scores.amax(1, keepdim=True)
    return ((scores > best - 1e-6).sum(1) > len(NAMES) // 2).tolist()


def interval(hits: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, z = hits / count, 1.96
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return centre - half, centre + half


def by_windows(source: Encoder, bodies: Sequence[Sequence[int]], questions: list[str]) -> dict[str, list[bool]]:
    """For each way of reading documents in windows whether it finds each key, and whether it finds filler instead."""
    (asked, by_cls), windows = question_vectors(source, questions), Windows(source)
    ways: dict[str, list[bool]] = {}
    for size, stride in ((512, 510), (512, 255), (256, 254)):
        each = [windows.of(body, size, stride) for body in bodies]
        name = f"windows of {size}" + (", half overlapping" if stride < size - 2 else "")
        best = torch.stack([(asked @ own[:, 0].T).amax(1) for own in each], 1)
        mean = torch.stack([nn.functional.normalize(own[:, 0].mean(0), dim=-1) for own in each])
        if size == 512 and stride == 510:
            ways["source, first 512 tokens"] = found(asked @ torch.stack([own[0, 0] for own in each]).T)
        ways[f"source, best of {name}"] = found(best)
        by_states = found(torch.stack([(by_cls @ own[:, 1].T).amax(1) for own in each], 1))
        ways[f"source, best of {name}, by [CLS]"] = by_states
        ways[f"source, mean of {name}"] = found(asked @ mean.T)
        ways[f"– lost to filler: best of {name}"] = lost_to_filler(best)
    return ways


def by_conversion(converted: Encoder, bodies: Sequence[Sequence[int]], questions: list[str]) -> dict[str, list[bool]]:
    """The same for documents that the converted model reads as a whole."""
    asked, by_cls = question_vectors(converted, questions)
    whole, passages, marked = [], [], []
    cls, sep = converted.tokenizer.cls_token_id, converted.tokenizer.sep_token_id
    for body in bodies:
        chunks = [[cls, *body[start : start + CHUNK]] for start in range(0, len(body), CHUNK)]
        marked.append([*itertools.chain(*chunks), sep])
    marks = [states[: -1 : CHUNK + 1].mean(0) for states in read(converted, marked, batch=2)]
    for states in read(converted, [row_of(converted.tokenizer, body) for body in bodies], batch=2):
        whole.append(vectors(converted, states)[0])
        parts = states[1:-1].split(PASSAGE)
        passages.append(nn.functional.normalize(torch.stack([part.mean(0) for part in parts]), dim=-1))
    best = torch.stack([(asked @ own.T).amax(1) for own in passages], 1)
    return {
        "converted, one vector": found(asked @ torch.stack(whole).T),
        f"converted, best passage of {PASSAGE} tokens": found(best),
        f"converted, mean of [CLS] each {CHUNK} tokens": found(by_cls @ nn.functional.normalize(torch.stack(marks)).T),
    }


def by_words(source: Encoder, bodies: Sequence[Sequence[int]], questions: list[str]) -> torch.Tensor:
    """Scores (questions, documents) by BM25, from the words that both hold."""
    texts = [source.tokenizer.decode(body) for body in bodies]
    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    asked = bm25s.tokenize(questions, return_ids=False, show_progress=False)
    return torch.stack([torch.from_numpy(index.get_scores(words)) for words in asked])


def by_token_states(source: Encoder, bodies: Sequence[Sequence[int]], questions: list[str]) -> torch.Tensor:
    """Scores (questions, documents): over a question's tokens, the sum of each one's closest token of a document.

    Documents are read in windows of `PASSAGE` tokens, of which those that several share are read once.
    """
    inner, tokenizer = min(PASSAGE, source.model.config.max_position_embeddings) - 2, source.tokenizer
    unit = functools.partial(nn.functional.normalize, dim=-1)
    rows = tokenizer(questions).input_ids
    asked = torch.cat([unit(states) for states in read(source, rows)]).bfloat16()
    owner = torch.arange(len(rows)).repeat_interleave(torch.tensor(list(map(len, rows))))
    known: dict[tuple[int, ...], torch.Tensor] = {}  # window to the closeness of its closest token to each of `asked`
    scores = []
    for body in bodies:
        windows = [tuple(row_of(tokenizer, body[start : start + inner])) for start in range(0, len(body), inner)]
        unknown = [each for each in dict.fromkeys(windows) if each not in known]
        for window, states in zip(unknown, read(source, unknown), strict=True):
            closest = [(part @ unit(states).bfloat16().T).amax(1) for part in asked.split(4096)]
            known[window] = torch.cat(closest).float()
        closest = torch.stack([known[window] for window in windows]).amax(0)
        scores.append(torch.zeros(len(rows)).index_add_(0, owner, closest))
    return torch.stack(scores, 1)


BESIDE = {"BM25": by_words, "late interaction of the source's token states, untrained": by_token_states}


def question_vectors(encoder: Encoder, questions: list[str]) -> torch.Tensor:
    """The `vectors` of questions, (2, questions, D)."""
    rows = encoder.tokenizer(questions).input_ids
    return torch.stack([vectors(encoder, states) for states in read(encoder, rows)], 1)


def tables(content: dict[str, Any]) -> list[Table]:
    """A table of the means of both fillers, and one of each, with intervals."""
    beside = content["beside"]
    rows = {
        kind: {length: found | beside[kind].get(length, {}) for length, found in row.items()}
        for kind, row in content["rows"].items()
    }
    lengths = list(next(iter(rows.values())))
    known = dict.fromkeys(way for lengths_of in rows.values() for row in lengths_of.values() for way in row)
    ways = [way for way in known if not way.startswith("–")]  # how often filler was found is in the JSON file

    def mean(way: str, length: str) -> str:
        pairs = [row[length][way] for row in rows.values() if way in row.get(length, ())]
        return f"{sum(hits / count for hits, count in pairs) / len(pairs):.3f}" if pairs else "–"

    def share(hits: int, count: int) -> str:
        low, high = interval(hits, count) if count else (0.0, 0.0)
        return f"{hits / count:.3f} ({low:.2f}–{high:.2f})" if count else "–"

    means = [[way, *(mean(way, n) for n in lengths)] for way in ways]
    made = [("Share of keys found, mean of both fillers, by tokens", means)]
    for kind, row in rows.items():
        lines = [[way, *(share(*row.get(length, {}).get(way, (0, 0))) for length in lengths)] for way in ways]
        made.append((f"Filler: {kind}: share of keys found, 95 % interval, by tokens", lines))
    return [(title, ["", *lengths], lines) for title, lines in made]


def card(content: dict[str, Any]) -> str:
    """passkeys.md."""
    beside = content["beside_environment"]
    return (
        f"# Pass keys in long texts\n\n{describe(content['environment'])}\n"
        f"{content['keys']} keys for each length and filler; {content['source']} and its conversion with "
        f"`attention_window={content['window']}`. Chance is {1 / len(NAMES):.2f}.\n\n"
        f"BM25 and late interaction: {machine_and_versions(beside)}\n\n`{beside['command']}`\n"
        f"{markdown_sections(tables(content))}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="sentence encoder with absolute positions")
    parser.add_argument("--converted", help="its conversion; without it the other rows of OUT stay")
    parser.add_argument("--text", required=True, type=Path, help="text of the second filler")
    parser.add_argument("--window", type=positive_int, help="attention_window of the conversion, if not its own")
    parser.add_argument("--keys", type=positive_int, default=200, help="for each length and filler; a multiple of 50")
    parser.add_argument("--lengths", type=positive_int, nargs="+", default=LENGTHS)
    parser.add_argument("--threads", type=positive_int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmarks")
    args = parser.parse_args(arguments)
    if args.keys % len(NAMES):
        parser.error(f"--keys {args.keys}: give a multiple of {len(NAMES)}")
    start_quietly(args.threads)
    encoders = [load_encoder(each) for each in (args.source, args.converted) if each]
    source, about = encoders[0], environment()
    window = args.window or getattr(encoders[-1].model.config, "attention_window", None)
    for encoder in encoders:
        optimize(encoder.model)
    texts = {"sentences that repeat": REPEATED, "a text": " ".join(itertools.islice(read_texts(args.text), 1000))}
    content: dict[str, Any] = stored(args.out / "passkeys")
    if args.converted:
        encoders[1].model.config.attention_window = window
        content = {"source": Path(args.source).name, "environment": about, "keys": args.keys, "window": window}
        content["rows"] = {kind: {} for kind in texts}
    elif not content:
        parser.error(f"--out {args.out}: there are no results to add to; give --converted")
    content |= {"beside": {kind: {} for kind in texts}, "beside_environment": about}
    for length, (kind, text) in itertools.product(args.lengths, texts.items()):
        started = time.monotonic()
        questions = [QUESTION.format(name=NAMES[number % len(NAMES)]) for number in range(args.keys)]
        bodies = documents(source.tokenizer, text, length, args.keys)
        ways = {"beside": {name: found(scored(source, bodies, questions)) for name, scored in BESIDE.items()}}
        if args.converted:
            ways["rows"] = by_windows(source, bodies, questions) | by_conversion(encoders[1], bodies, questions)
        for part, rows in ways.items():
            content[part][kind][str(length)] = {way: [sum(hits), len(hits)] for way, hits in rows.items()}
        print(f"{kind}, {length} tokens: {time.monotonic() - started:.0f} s", flush=True)
        write_report(args.out / "passkeys", content, card(content))
    print_tables(tables(content))


if __name__ == "__main__":
    main()
