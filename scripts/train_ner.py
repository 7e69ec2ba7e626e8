"""Train small taggers from nothing, one for each position scheme and seed, and compare them: TENER's experiment.

    python scripts/train_ner.py --name wnut17 --train wnut17.train.conll --dev wnut17.dev.conll
    python scripts/train_ner.py --name weibo --train weibo.train --dev weibo.dev --unit character    # Chinese
    python scripts/train_ner.py --name … --train … --dev … --schemes tener alibi deberta --seeds 5
    python scripts/train_ner.py --name … --train … --dev … --tokenizer CHECKPOINT --vectors

Needs the extra `ner`. Files are CoNLL-like, in IOB1, IOB2, BIOES, BMES or BILOU; columns are found, or named by
`--columns`. Every scheme gets the same model, budget and seeds. Measured once, at the end of training, on the
development file: precision, recall and F1 of entities by seqeval. OUT/results.json and OUT/README.md are written after
every run; a run that is in the JSON already is not repeated, and a data set that is there with other settings is
refused unless `--again`. What stands below the line `<!-- notes -->` of README.md is left as it is.

What a word looks like is known in two ways. It is cut into WordPieces, learnt from the training file (cased), and
tagged at its first one; `--unit word` and `--unit character` take it whole, or letter by letter, and know what occurs
twice in the training file. And its shape (capitals, digits, other scripts) is its token type. TENER has a network over
characters instead, and GloVe's word vectors: `--tokenizer CHECKPOINT --vectors` takes a BERT's word vectors for them,
which stay as they are, and its tokenizer. Without `--vectors` only the tokenizer is taken.

There is no CRF, which TENER puts on top: no well-kept library for PyTorch has one (pytorch-crf was last released in
2019, TorchCRF in 2020; pyt-crf began in 2026). Tags are chosen one by one, and I- without a B- begins an entity.
"""

import argparse
import hashlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarking import environment, markdown_table, write
from experiments import (
    QUIETLY,
    add_options,
    circumstances,
    command,
    count,
    fingerprint,
    save,
    settings_of,
    share,
    spread,
    stored_in,
)
from seqeval.metrics import f1_score, precision_score, recall_score
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    DataCollatorForTokenClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    logging,
    set_seed,
)

from hf_relpos import SCHEMES, RelPosBertConfig, RelPosBertForTokenClassification
from hf_relpos.data.conll import Sentence, read_conll, tag_names
from hf_relpos.evaluation.loading import load_model, load_tokenizer


IGNORE = -100
SPECIAL = ["[PAD]", "[UNK]"]
SHAPES = ("other", "lower", "capitalised", "upper", "mixed", "number", "letters and digits", "caseless")
# Variants of schemes by name; `{init}` is the size of the word vectors. A sinusoid of amplitude 1 beside word vectors
# of standard deviation 1 is the balance of Vaswani et al.; both are as much smaller here.
VARIANTS = {
    "none": ("t5", {}),  # with its table frozen at zero
    "absolute": ("absolute", {}),
    "sinusoidal": ("sinusoidal", {"amplitude": "{init}"}),
    "shaw": ("shaw", {}),
    "transformer_xl": ("transformer_xl", {}),
    "tener": ("tener", {}),
    "tener-scaled": ("tener", {"scale": True}),
}
LABELS = {
    "none": "`none`: no positions at all",
    "absolute": "`absolute`, learnt",
    "tener": "`tener`, un-scaled",
    "tener-scaled": "`tener`, scaled by 1/√d",
}
# Pairs of which the first is to be better: what TENER's paper says, and last what follows from Shaw et al.
CLAIMS = [
    ("tener", "sinusoidal", "TENER tags better than the Transformer with sinusoids at its input"),
    ("tener", "tener-scaled", "scores without 1/√d serve better than with it"),
    ("tener-scaled", "sinusoidal", "direction and distance help even with it"),
    ("transformer_xl", "sinusoidal", "so do the relative positions that TENER starts from"),
    ("shaw", "absolute", "relative positions serve better than learnt absolute ones"),
]


# Data ---------------------------------------------------------------------------------------------------------------


def shape_of(word: str) -> int:
    """Index in SHAPES."""
    letters = [character for character in word if character.isalpha()]
    digits = any(character.isdigit() for character in word)
    cased = [character for character in letters if character.lower() != character.upper()]
    if not letters:
        name = "number" if digits else "other"
    elif digits:
        name = "letters and digits"
    elif not cased:
        name = "caseless"
    elif all(character.islower() for character in cased):
        name = "lower"
    elif cased[0].isupper() and all(character.islower() for character in cased[1:]):
        name = "capitalised"
    else:
        name = "upper" if all(character.isupper() for character in cased) else "mixed"
    return SHAPES.index(name)


def learn_tokenizer(words: Sequence[str], unit: str, size: int) -> Tokenizer:
    """A tokenizer for single words.

    Args:
        words: of the training file, each as often as it occurs.
        unit: `wordpiece`, `word` or `character`.
        size: of the vocabulary at most; words and characters that occur once are unknown, so that [UNK] is learnt.
    """
    if unit == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL[1]))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, handle_chinese_chars=False)
        trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False)
        tokenizer.train_from_iterator(words, trainer)
    else:
        counts = Counter(words if unit == "word" else (character for word in words for character in word))
        known = [item for item, count in counts.most_common(size - len(SPECIAL)) if count > 1]
        vocabulary = {item: number for number, item in enumerate([*SPECIAL, *known])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[1]))
        if unit == "character":
            tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return tokenizer


class Tagged(torch.utils.data.Dataset):
    """Sentences as rows of tokens.

    A word's tag is at its first token; the others have none. A sentence of more than `length` tokens goes on in
    another row, between words. No special tokens are added.

    Attributes:
        rows: what the Trainer takes; longer rows first.
        places: for each row its (sentence, word, token) triples of first tokens.
    """

    def __init__(self, sentences: Sequence[Sentence], tokenizer, names: Sequence[str], length: int, pieces: int):
        """
        Args:
            names: tags by number.
            length: tokens of a row at most.
            pieces: tokens of a word at most: its first ones, and its last.
        """
        number = {name: n for n, name in enumerate(names)}
        known: dict[str, list[int]] = {}
        found: list[tuple[dict, list]] = []
        for sentence, (words, tags) in enumerate(sentences):
            row, places = None, None
            for at, (word, tag) in enumerate(zip(words, tags, strict=True)):
                if word not in known:
                    # some words are nothing but letters that tokenizers drop
                    ids = tokenizer(word, add_special_tokens=False)["input_ids"] or [tokenizer.unk_token_id]
                    known[word] = ids if len(ids) <= pieces else [*ids[: pieces - 1], *ids[-1:]][:pieces]
                ids = known[word]
                if row is None or len(row["input_ids"]) + len(ids) > length:
                    row, places = {"input_ids": [], "token_type_ids": [], "labels": []}, []
                    found.append((row, places))
                places.append((sentence, at, len(row["input_ids"])))
                row["input_ids"] += ids
                row["token_type_ids"] += [shape_of(word)] * len(ids)
                row["labels"] += [number[tag], *[IGNORE] * (len(ids) - 1)]
        found.sort(key=lambda pair: -len(pair[0]["input_ids"]))
        self.rows, self.places = [row for row, _ in found], [places for _, places in found]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return self.rows[index]

    def tags(self, predicted: Sequence[Sequence[int]], names: Sequence[str], sentences: Sequence[Sentence]):
        """The tags of each sentence, from the numbers of the tags at each token of each row."""
        found = [["O"] * len(words) for words, _ in sentences]
        for guess, places in zip(predicted, self.places, strict=True):
            for sentence, at, token in places:
                found[sentence][at] = names[guess[token]]
        return found


class Collator(DataCollatorForTokenClassification):
    """Pads, and replaces tokens by [UNK] with probability `unknown`."""

    unknown = 0.0

    def torch_call(self, features):
        batch = super().torch_call(features)
        if self.unknown:
            chosen = torch.rand(batch["input_ids"].shape) < self.unknown
            batch["input_ids"][chosen & batch["attention_mask"].bool()] = self.tokenizer.unk_token_id
        return batch


class Task:
    """Both files, the tags, and the tokenizer.

    Raises:
        ValueError: for files that cannot be read or hold no entities, and a development file with types of entities
            that the training file does not have.
    """

    def __init__(self, args: argparse.Namespace):
        self.sentences = [
            read_conll(path, args.columns)[:limit]
            for path, limit in ((args.train, args.train_sentences), (args.dev, args.dev_sentences))
        ]
        self.names = tag_names(self.sentences[0])
        for path, sentences in zip((args.train, args.dev), self.sentences, strict=True):
            own = tag_names(sentences)
            if own == ["O"]:
                raise ValueError(f"{path}: {len(sentences)} sentences and no entity; give a file with some")
            strange = sorted(set(own) - set(self.names))
            if strange:
                kinds = ", ".join(name[2:] for name in self.names[1::2])
                raise ValueError(
                    f"{path}: type {strange[0][2:]!r} is none of {args.train}, which has {kinds}; rename or drop it"
                )
        self.vectors, self.kept_at = None, None
        if args.tokenizer:
            self.tokenizer = load_tokenizer(args.tokenizer)
            if self.tokenizer.pad_token_id is None or self.tokenizer.unk_token_id is None:
                raise ValueError(
                    f"--tokenizer {args.tokenizer}: lacks a token for padding or for what it does not know"
                )
            if args.vectors:
                table = load_model(args.tokenizer, masked=False).get_input_embeddings().weight.detach()
                self.vectors = table * (args.init / table.std())
        else:
            words = [word for words, _ in self.sentences[0] for word in words]
            said = json.dumps([args.unit, args.vocab, words])
            self.kept_at = args.work / f"{hashlib.sha256(said.encode()).hexdigest()[:12]}.json"
            if self.kept_at.is_file():  # another would differ: the tokenizers library breaks ties at random
                backend = Tokenizer.from_file(str(self.kept_at))
            else:
                backend = learn_tokenizer(words, args.unit, args.vocab)
            self.tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=backend, pad_token=SPECIAL[0], unk_token=SPECIAL[1]
            )
        self.train, self.dev = (
            Tagged(sentences, self.tokenizer, self.names, args.max_length, args.pieces) for sentences in self.sentences
        )

    def keep(self) -> None:
        """Write the tokenizer down, for runs that are added later."""
        if self.kept_at:
            write(self.kept_at, self.tokenizer.backend_tokenizer.to_str())


# Runs ---------------------------------------------------------------------------------------------------------------


def build(task: Task, args: argparse.Namespace, variant: str) -> RelPosBertForTokenClassification:
    """A new model of that variant.

    Raises:
        ValueError: for sizes that the configuration refuses.
    """
    scheme, options = VARIANTS.get(variant, (variant, {}))
    options = {key: args.init if value == "{init}" else value for key, value in options.items()}
    config = RelPosBertConfig(
        vocab_size=len(task.tokenizer),
        embedding_size=None if task.vectors is None else task.vectors.shape[1],
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=args.intermediate,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.attention_dropout,
        initializer_range=args.init,
        max_position_embeddings=args.max_length,
        type_vocab_size=len(SHAPES),
        pad_token_id=task.tokenizer.pad_token_id,
        position_embedding_type=scheme,
        position_options=options,
        id2label=dict(enumerate(task.names)),
        label2id={name: number for number, name in enumerate(task.names)},
    )
    model = RelPosBertForTokenClassification(config)
    if task.vectors is not None:
        table = model.get_input_embeddings().weight
        table.data.copy_(task.vectors)
        table.requires_grad_(False)
    if variant == "none":
        for name, parameter in model.named_parameters():
            if ".distance_embedding." in name:
                parameter.data.zero_()
                parameter.requires_grad_(False)
    return model


def train(task: Task, args: argparse.Namespace, variant: str, seed: int) -> dict[str, float]:
    """Train one model and measure it: percentages, the training loss of the last epoch, sizes and seconds."""
    began, clock = time.process_time(), time.perf_counter()
    set_seed(seed)
    model = build(task, args, variant)
    steps = math.ceil(len(task.train) / args.batch) * args.epochs
    collator = Collator(task.tokenizer)
    collator.unknown = args.unknown
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                num_train_epochs=args.epochs,
                per_device_train_batch_size=args.batch,
                per_device_eval_batch_size=2 * args.batch,
                train_sampling_strategy="group_by_length",
                learning_rate=args.lr,
                warmup_steps=round(args.warmup * steps),
                weight_decay=args.weight_decay,
                seed=seed,
                **QUIETLY,
            ),
            train_dataset=task.train,
            data_collator=collator,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        )
        trainer.train()
        collator.unknown = 0.0
        trainer.args.train_sampling_strategy = "random"  # else rows to predict are shuffled, too
        predicted = trainer.predict(task.dev).predictions
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    truth = [tags for _, tags in task.sentences[1]]
    guess = task.dev.tags(predicted.tolist(), task.names, task.sentences[1])
    measures = {"f1": f1_score, "precision": precision_score, "recall": recall_score}
    return {
        **{name: 100 * float(measure(truth, guess, zero_division=0)) for name, measure in measures.items()},
        "train_loss": losses[-1],
        "parameters": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        "steps": trainer.state.global_step,
        "cpu_seconds": round(time.process_time() - began, 1),
        "seconds": round(time.perf_counter() - clock, 1),
    }


# Card ---------------------------------------------------------------------------------------------------------------


def label_of(variant: str) -> str:
    return LABELS.get(variant, f"`{variant}`")


def by_variant(runs: dict[str, dict], figure: str) -> dict[str, list[float]]:
    """Values of all seeds; variants in the order of VARIANTS, then others as they were run."""
    names = [key.rpartition("/")[0] for key in runs]
    ordered = dict.fromkeys([*(name for name in VARIANTS if name in names), *names])
    return {name: [runs[key]["result"][figure] for key in runs if key.rpartition("/")[0] == name] for name in ordered}


def comparison(better: Sequence[float], worse: Sequence[float]) -> str:
    """The difference of two means in standard errors, put into words."""
    difference = statistics.mean(better) - statistics.mean(worse)
    if min(len(better), len(worse)) < 2:
        return f"{difference:+.1f}, one seed"
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in (better, worse)))
    word = "too small to tell" if abs(difference) < 2 * error else "**yes**" if difference > 0 else "**no**"
    return f"{word}: {difference:+.1f} (standard error {error:.1f})"


def section(name: str, found: dict) -> str:
    """What the card says of one data set."""
    runs, about = found["runs"], found["about"]
    f1 = by_variant(runs, "f1")
    figures = {figure: by_variant(runs, figure) for figure in ("precision", "recall", "train_loss", "cpu_seconds")}
    base = statistics.mean(f1["absolute"]) if "absolute" in f1 else None
    rows = [
        [
            label_of(variant),
            spread(values),
            "" if base is None else f"{statistics.mean(values) - base:+.1f}",
            *(f"{statistics.mean(figures[figure][variant]):.1f}" for figure in ("precision", "recall")),
            f"{statistics.mean(figures['train_loss'][variant]):.4f}",
            f"{next(run['result']['parameters'] for key, run in runs.items() if key.startswith(variant + '/')):,}",
            f"{statistics.mean(figures['cpu_seconds'][variant]):.0f}",
            str(len(values)),
        ]
        for variant, values in f1.items()
    ]
    head = ["scheme", "F1", "− absolute", "precision", "recall", "training loss", "parameters", "CPU s", "seeds"]
    claims = [
        f"- {words}: `{one}` over `{other}`: {comparison(f1[one], f1[other])}"
        for one, other, words in CLAIMS
        if one in f1 and other in f1
    ]
    total = sum(run["result"]["cpu_seconds"] for run in runs.values()) / 60
    described = [f"- {key}: {value}" for key, value in about.items()]
    return "\n".join(
        [f"## {name}\n", *described, f"- all runs: {total:.1f} CPU minutes\n", markdown_table(head, rows), *claims, ""]
    )


def card(content: dict) -> str:
    """README.md: every data set."""
    intro = (
        "# Named entities, trained from nothing: TENER's experiment\n\n"
        "Written by `scripts/train_ner.py`; every run is in [results.json](results.json). F1, precision and recall of "
        "entities by seqeval (as the CoNLL-2000 scorer counts), in percent, mean ± standard deviation over seeds, on "
        "the development file, measured once after a fixed number of epochs. All schemes have the same budget. "
        "`− absolute`: difference of the means. Training loss: of the last epoch, with dropout. A difference under "
        "two of its standard errors is called too small to tell.\n\n"
    )
    return intro + "\n".join(section(name, found) for name, found in content.items())


# Command line -------------------------------------------------------------------------------------------------------


def about(args: argparse.Namespace, task: Task, arguments: Sequence[str]) -> dict[str, str]:
    """Where, when and how this was measured."""

    def size(sentences: Sequence[Sentence]) -> str:
        entities = sum(tag.startswith("B-") for _, tags in sentences for tag in tags)
        return f"{len(sentences):,} sentences, {entities:,} entities"

    words = sum(len(words) for words, _ in task.sentences[0])
    tokens = sum(len(row["input_ids"]) for row in task.train.rows)
    unit = f"tokenizer of {Path(args.tokenizer).name}" if args.tokenizer else f"unit {args.unit}"
    vectors = f"; its word vectors ({task.vectors.shape[1]} wide), frozen" if task.vectors is not None else ""
    return {
        "command": f"`{command('train_ner.py', arguments)}`",
        "training": f"{args.train.name}, {size(task.sentences[0])}"
        + (" (the first ones of the file)" if args.train_sentences else ""),
        "measured on": f"{args.dev.name}, {size(task.sentences[1])}"
        + (" (the first ones of the file)" if args.dev_sentences else ""),
        "tokens": f"{unit}, vocabulary {len(task.tokenizer):,}, {tokens / words:.2f} tokens a word{vectors}; "
        "shapes of words as token types",
        "model": f"{args.layers} layers, {args.hidden} wide, {args.heads} heads, feed-forward {args.intermediate}, "
        f"LayerNorm after the residual sum; dropout {args.dropout}, of attention {args.attention_dropout}, "
        f"tokens to [UNK] {args.unknown}; initial weights N(0, {args.init}²)",
        "budget": f"{args.epochs} epochs of batches of {args.batch} sentences, AdamW, rate {args.lr} after a warm-up "
        f"of {args.warmup:.0%}, falling to 0, weight decay {args.weight_decay}",
        **circumstances(),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "train_ner", "ner", 3, "for the tokenizers")
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--dev", type=Path, required=True)
    parser.add_argument("--columns", type=count, nargs=2, metavar=("TOKEN", "TAG"), help="from 1 on; found by default")
    parser.add_argument("--train-sentences", type=count, help="only the first ones")
    parser.add_argument("--dev-sentences", type=count, help="only the first ones")
    parser.add_argument("--unit", choices=("wordpiece", "word", "character"), default="wordpiece")
    parser.add_argument("--vocab", type=count, default=4000, help="size of the vocabulary at most")
    parser.add_argument("--tokenizer", help="folder or Hub repository of a BERT whose tokenizer to take instead")
    parser.add_argument("--vectors", action="store_true", help="with its word vectors, frozen")
    parser.add_argument("--schemes", nargs="+", default=list(VARIANTS), help=f"{', '.join(VARIANTS)}, or any scheme")
    parser.add_argument("--layers", type=count, default=2)
    parser.add_argument("--hidden", type=count, default=128)
    parser.add_argument("--heads", type=count, default=4)
    parser.add_argument("--intermediate", type=count, default=256)
    parser.add_argument("--dropout", type=share, default=0.2)
    parser.add_argument("--attention-dropout", type=share, default=0.1)
    parser.add_argument("--unknown", type=share, default=0.0, help="of the training tokens, replaced by [UNK]")
    parser.add_argument("--init", type=float, default=0.05, help="standard deviation of the initial weights")
    parser.add_argument("--max-length", type=count, default=128, help="tokens of a row; longer sentences are split")
    parser.add_argument("--pieces", type=count, default=8, help="tokens of a word at most")
    parser.add_argument("--epochs", type=count, default=10)
    parser.add_argument("--batch", type=count, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=share, default=0.1, help="share of the steps")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    args = parser.parse_args(arguments)
    args.schemes = list(dict.fromkeys(args.schemes))
    unknown = [name for name in args.schemes if name not in VARIANTS and name not in SCHEMES]
    if unknown:
        known = ", ".join(dict.fromkeys([*VARIANTS, *SCHEMES]))
        parser.error(f"--schemes {unknown[0]}: no such scheme; known: {known}")
    if args.vectors and not args.tokenizer:
        parser.error("--vectors: whose? Name the checkpoint with --tokenizer")
    if args.pieces > args.max_length:
        parser.error(f"--pieces {args.pieces}: a word does not fit into a row of --max-length {args.max_length}")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    path = args.out / "results.json"
    try:
        # all that can be wrong, before anything is written
        task = Task(args)
        for variant in args.schemes:
            with torch.device("meta"):
                build(task, args, variant)
        files = {"train": fingerprint(args.train), "dev": fingerprint(args.dev)}
        files["tokenizer"] = args.tokenizer and Path(args.tokenizer).name
        settings = settings_of(args, ["schemes"], **files)
        content = stored_in(path, args.name, settings, args.again)
    except ValueError as error:
        sys.exit(f"Error: {error}")
    task.keep()
    found = content.setdefault(args.name, {"settings": settings, "about": {}, "runs": {}})
    found["about"] = about(args, task, given)
    for seed in range(args.seeds):
        for variant in args.schemes:
            key = f"{variant}/{seed}"
            if key in found["runs"]:
                print(f"{key}: there already")
                continue
            result = train(task, args, variant, seed)
            found["runs"][key] = {"date": environment()["date"], "result": result}
            save(args.out, content, card(content))
            shown = {name: round(value, 3) for name, value in result.items()}
            print(f"{key}: {shown}", flush=True)
    save(args.out, content, card(content))
    print(section(args.name, found))


if __name__ == "__main__":
    main()
