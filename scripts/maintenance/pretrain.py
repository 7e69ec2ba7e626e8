"""Pre-train the small absolute-position BERT that the demo starts from; for any other model there is run_mlm.py.

A WordPiece tokenizer and a `BertForMaskedLM` are trained from scratch on public-domain English: 94 novels
(from github.com/computationalstylistics/100_english_novels; the authors dead for 70 years or more) and the Python
Enhancement Proposals (github.com/python/peps). `--data` names a folder with three files:

    novels.txt.xz      one paragraph per line, an empty line between novels
    novels.index.tsv   a table with the columns `author` and `title`, one row per novel, in the same order
    peps.jsonl.xz      one JSON object per line with the fields `pep`, `abstract`, `body`

The novels in `HELD_OUT` and the PEPs whose number divides by 20 are never trained on, neither by the tokenizer nor
by the model. Excerpts of two of these novels are the demo's text.

Two stages. A small BERT stays for long at the loss of a bag of words before it learns to use positions; short windows
at random position ids and sinusoidal initial position vectors (trained like all other weights) shorten that to about a
thousand steps:

    python scripts/maintenance/pretrain.py --data DATA --out short --length 32 --batch 128 --steps 3000 --warmup 500
    python scripts/maintenance/pretrain.py --data DATA --out bert --start short --length 128 --batch 32 \\
        --steps 7000 --warmup 200

That is an hour or so on one CPU core. On a GPU make the model larger, as `--hidden 512 --layers 8 --heads 8
--intermediate 2048 --lr 5e-4 --attn sdpa --workers 8`, with more steps in both stages. The demo's text comes from

    python scripts/maintenance/pretrain.py --data DATA --demo-text text

The checkpoint in `--out` is replaced atomically at every save; Trainer's own state is in `<out>.work`.
Every window and its masks depend on `--seed` and the index of the example only. (The tokenizer may differ a little
from run to run: the trainer of the tokenizers library breaks ties at random.)
"""

import argparse
import csv
import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_relpos.conversion.folder import check_target
from hf_relpos.data.masking import IGNORE_INDEX, mask_tokens
from hf_relpos.data.records import iterate_lines
from hf_relpos.files import apply_umask, atomic_folder


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(5)
SINGLE = 0.15  # fraction of the windows that are one paragraph
HELD_OUT = {("Haggard", "She"), ("Stevenson", "Treasure"), ("Trollope", "Warden")}


Novels = dict[tuple[str, str], list[str]]  # (author, title) to paragraphs


def read_novels(data: Path) -> Novels:
    """All novels in the folder `data`."""
    index = csv.DictReader(iterate_lines(data / "novels.index.tsv"), delimiter="\t")
    names = [(row["author"], row["title"]) for row in index]
    novels = [text.split("\n") for text in "\n".join(iterate_lines(data / "novels.txt.xz")).strip().split("\n\n")]
    if len(names) != len(novels):
        raise ValueError(f"{len(names)} rows in the index, {len(novels)} novels in the text")
    return dict(zip(names, novels, strict=True))


def read_peps(data: Path) -> dict[int, list[str]]:
    """{number: [paragraph, ...]} for all PEPs in the folder `data`."""
    peps = [json.loads(line) for line in iterate_lines(data / "peps.jsonl.xz")]
    return {p["pep"]: [s for s in f"{p['abstract']}\n{p['body']}".split("\n") if s.strip()] for p in peps}


def split(data: Path) -> tuple[list[str], Novels, list[str]]:
    """The paragraphs to train on, the held-out novels by (author, title), and the held-out PEPs' paragraphs."""
    novels, peps = read_novels(data), read_peps(data)
    train = [s for name, novel in novels.items() if name not in HELD_OUT for s in novel]
    train += [s for number, pep in peps.items() if number % 20 for s in pep]
    return train, {name: novels[name] for name in HELD_OUT}, [s for n, p in peps.items() if n % 20 == 0 for s in p]


def write_demo_text(novels: Novels, out: Path) -> None:
    """Write `train.txt.xz` and `eval.txt.xz` to the folder `out`: excerpts of two held-out novels.

    Title pages are left out, and so are paragraphs in another script (one of the novels quotes Greek).
    """
    out.mkdir(parents=True, exist_ok=True)
    excerpts = {
        "train": (("Haggard", "She"), "In giving to the world", 600_000),
        "eval": (("Stevenson", "Treasure"), "SQUIRE TRELAWNEY", 150_000),
    }
    for part, (name, first, size) in excerpts.items():
        novel = novels[name]
        start = next(i for i, s in enumerate(novel) if s.startswith(first))
        novel = [s for s in novel[start:] if all(ord(c) < 0x250 for c in s)]
        ends = np.cumsum([len(s) + 1 for s in novel])
        text = "".join(f"{s}\n" for s in novel[: np.searchsorted(ends, size, side="right")])
        with lzma.open(out / f"{part}.txt.xz", "wb", preset=9) as f:
            f.write(text.encode())


def train_tokenizer(paragraphs: Sequence[str], vocab_size: int) -> Tokenizer:
    """An uncased WordPiece tokenizer like BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, limit_alphabet=120, show_progress=False
    )
    tokenizer.train_from_iterator(paragraphs, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    return tokenizer


def encode(tokenizer: Tokenizer, paragraphs: Sequence[str], chunk: int = 5000) -> tuple[np.ndarray, np.ndarray]:
    """All tokens in one array (no special tokens), and where each paragraph starts (one more entry at the end)."""
    ids, starts = [], [0]
    for at in range(0, len(paragraphs), chunk):
        for e in tokenizer.encode_batch_fast(paragraphs[at : at + chunk], add_special_tokens=False):
            ids.append(np.array(e.ids, dtype=np.uint16))
            starts.append(starts[-1] + len(ids[-1]))
    return np.concatenate(ids), np.array(starts)


class Windows(torch.utils.data.Dataset):
    """`count` masked examples `[CLS] ... [SEP]`, each a function of (seed, index).

    Most start anywhere in the text and are full; the fraction SINGLE are one paragraph, cut or padded to `length`.
    Position ids start at a random number such that the window ends within `positions`. 15 % of the tokens are to be
    predicted: 80 % of those are replaced by [MASK], 10 % by any token, 10 % are kept. This is not left to
    `DataCollatorForLanguageModeling`, whose masks depend on the batch.
    """

    def __init__(
        self,
        ids: np.ndarray,
        starts: np.ndarray,
        count: int,
        length: int,
        positions: int,
        vocab_size: int,
        seed: int,
    ):
        self.ids, self.count, self.length, self.positions = ids, count, length, positions
        self.vocab_size, self.seed = vocab_size, seed
        long = np.flatnonzero(np.diff(starts) >= 8)
        self.bounds = np.stack([starts[long], starts[long + 1]], 1)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng((self.seed, index))
        inner = self.length - 2
        if rng.random() < SINGLE:
            start, end = self.bounds[rng.integers(len(self.bounds))]
            end = min(end, start + inner)
        else:
            start = rng.integers(len(self.ids) - inner + 1)
            end = start + inner
        n = int(end - start)
        ids = np.full(self.length, PAD, dtype=np.int64)
        labels = np.full(self.length, IGNORE_INDEX, dtype=np.int64)
        text = self.ids[start:end].astype(np.int64)
        ids[0], ids[n + 1] = CLS, SEP
        ids[1 : n + 1], labels[1 : n + 1] = mask_tokens(text, MASK, rng)
        masked, draws = labels != IGNORE_INDEX, rng.random(self.length)
        kept, replaced = masked & (draws >= 0.8) & (draws < 0.9), masked & (draws >= 0.9)
        ids[kept] = labels[kept]
        ids[replaced] = rng.integers(len(SPECIAL), self.vocab_size, replaced.sum())
        indices = np.arange(self.length)
        return {
            "input_ids": ids,
            "attention_mask": (indices < n + 2).astype(np.int64),
            "position_ids": indices + rng.integers(self.positions - self.length + 1),
            "labels": labels,
        }


class MaskedOnly(BertForMaskedLM):
    """BERT whose head is applied to masked tokens only: the same loss at a sixth of the head's cost."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        labels: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        hidden = self.bert(**inputs).last_hidden_state
        masked = labels != IGNORE_INDEX
        logits = self.cls(hidden[masked])
        return {"loss": torch.nn.functional.cross_entropy(logits.float(), labels[masked])}


@torch.no_grad()
def init_positions(model: BertForMaskedLM, base: float = 100.0) -> None:
    """Sinusoids as the initial position vectors, as large as the other embeddings."""
    table = model.bert.embeddings.position_embeddings.weight
    count, size = table.shape
    angle = torch.arange(count)[:, None] / base ** (torch.arange(0, size, 2) / size)
    table.copy_(torch.cat([angle.sin(), angle.cos()], 1) * model.config.initializer_range * 2**0.5)


def export(model: BertForMaskedLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write a plain `BertForMaskedLM` checkpoint with its tokenizer, atomically."""
    plain = BertForMaskedLM(model.config)
    plain.load_state_dict({k: v.cpu().float() for k, v in model.state_dict().items()})
    length = model.config.max_position_embeddings
    fast = BertTokenizerFast(tokenizer_object=tokenizer, do_lower_case=True, model_max_length=length)
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    with atomic_folder(out, overwrite=True) as folder:
        plain.save_pretrained(folder)
        fast.save_pretrained(folder)
        (folder / "vocab.txt").write_text("".join(f"{token}\n" for token, _ in vocab), encoding="utf-8")
        apply_umask([folder / "model.safetensors"])


class Export(TrainerCallback):
    """Export the model whenever Trainer saves."""

    def __init__(self, tokenizer: Tokenizer, out: Path):
        self.tokenizer, self.out = tokenizer, out

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            export(model, self.tokenizer, self.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the text")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, help="folder for the checkpoint")
    target.add_argument("--demo-text", type=Path, help="folder for the demo's text; nothing is trained")
    parser.add_argument("--start", type=Path, help="checkpoint whose weights and tokenizer to start from")
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument("--batch", type=int, default=32, help="windows per step and device")
    parser.add_argument("--length", type=int, default=128, help="tokens per window")
    parser.add_argument("--positions", type=int, default=128, help="the model's longest input")
    parser.add_argument("--vocab", type=int, default=5000)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--init", type=float, default=0.05, help="standard deviation of the initial weights")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--attn", default="eager", choices=["eager", "sdpa"], help="eager is faster on a CPU in bf16")
    parser.add_argument("--fp32", action="store_true", help="no bf16 autocast (weights are float32 in any case)")
    parser.add_argument("--cpu", action="store_true", help="use no accelerator")
    parser.add_argument("--workers", type=int, default=0, help="data-loading processes")
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--resume", action="store_true", help="resume from the last save")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.out:
        check_target(args.out, overwrite=True)

    set_seed(args.seed)
    train, held_out, _ = split(args.data)
    if args.demo_text:
        write_demo_text(held_out, args.demo_text)
        return
    if args.start:
        tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(train, args.vocab)
    vocab_size = tokenizer.get_vocab_size()
    ids, starts = encode(tokenizer, train)
    test_ids, test_starts = encode(tokenizer, held_out["Trollope", "Warden"])
    print(f"{len(train)} paragraphs, {len(ids)} tokens, vocabulary {vocab_size}", flush=True)
    shape = {"length": args.length, "positions": args.positions, "vocab_size": vocab_size}
    train_set = Windows(ids, starts, args.steps * args.batch, seed=args.seed, **shape)
    test_set = Windows(test_ids, test_starts, 512, seed=args.seed + 1, **shape)

    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=args.intermediate,
        max_position_embeddings=args.positions,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
        initializer_range=args.init,
        pad_token_id=PAD,
    )
    if args.start:
        model = MaskedOnly.from_pretrained(args.start, dtype=torch.float32, attn_implementation=args.attn)
    else:
        model = MaskedOnly._from_config(config, attn_implementation=args.attn)
        init_positions(model)
    print(f"{model.num_parameters()} parameters", flush=True)
    settings = TrainingArguments(
        output_dir=f"{args.out}.work",
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        learning_rate=args.lr,
        warmup_steps=args.warmup,
        lr_scheduler_type="linear",
        adam_beta2=0.98,
        weight_decay=0.01,
        bf16=not args.fp32,
        use_cpu=args.cpu,
        seed=args.seed,
        dataloader_num_workers=args.workers,
        prediction_loss_only=True,
        logging_steps=100,
        eval_strategy="steps",
        eval_steps=args.save_every,
        save_steps=args.save_every,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=train_set,
        eval_dataset=test_set,
        data_collator=default_data_collator,
        callbacks=[Export(tokenizer, args.out)],
    )
    result = trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_state()
    export(model, tokenizer, args.out)
    print(json.dumps(result.metrics), flush=True)


if __name__ == "__main__":
    main()
