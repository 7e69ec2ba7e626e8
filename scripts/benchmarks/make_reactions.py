"""Make two small language models of chemistry, text to convert them with, and a task for bench_finetuning.py.

    pip download --no-deps rxnfp==0.1.0 rxnmapper==0.4.3
    git clone https://github.com/reymond-group/drfp
    git clone https://github.com/connorcoley/retrosim
    python scripts/benchmarks/make_reactions.py --wheels . --drfp drfp --retrosim retrosim --out chemistry

Writes `rxn-bert` and `rxn-albert`, the models of both wheels (MIT) as Transformers folders; `text.jsonl`, reactions
as SMILES without atom numbers; and `reactions/train.tsv` and `dev.tsv`, reactions of nine classes that fingerprints
of Probst et al. (2022, doi 10.1039/D1DD00006C) took for others.
"""

import argparse
import csv
import io
import json
import random
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


# Atoms and bonds, after Schwaller et al. (2019, doi 10.1021/acscentsci.9b00576).
TOKEN = r"\[[^\]]+\]|Br|Cl|%[0-9]{2}|>>|[A-Za-z0-9()=#+\\/:~@?>*$.-]"
SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "cls", "sep", "mask", "pad")}
# The folder inside each wheel, and what Transformers calls the model.
MODELS = {
    "rxn-bert": ("rxnfp/models/transformers/bert_pretrained", "bert", "BertForMaskedLM"),
    "rxn-albert": ("rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k", "albert", "AlbertForMaskedLM"),
}
TRAINING = 1200  # of the labelled reactions; the others are to measure on


def write_model(wheel: zipfile.ZipFile, inside: str, kind: str, architecture: str, out: Path) -> None:
    """A folder with config.json, model.safetensors and a tokenizer."""
    out.mkdir(parents=True)
    config: dict[str, Any] = json.loads(wheel.read(f"{inside}/config.json"))
    for name in ("bos_token_id", "eos_token_ids"):  # [PAD] there
        config.pop(name, None)
    config |= {"model_type": kind, "architectures": [architecture], "pad_token_id": 0}
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    with wheel.open(f"{inside}/pytorch_model.bin") as file:
        tensors = torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    words = wheel.read(f"{inside}/vocab.txt").decode().splitlines()
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(word, words.index(word)) for word in ("[CLS]", "[SEP]")],
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **SPECIAL).save_pretrained(out)


def without_numbers(smiles: str) -> str:
    """A reaction without atom numbers, and without the brackets that only they needed."""
    smiles = re.sub(r":\d+\]", "]", smiles)
    return re.sub(r"\[(B|C|N|O|P|S|F|Cl|Br|I|[bcnops])(H\d?)?\]", lambda m: m[0] if m[0] == "[nH]" else m[1], smiles)


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("wheels", "drfp", "retrosim", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    for name, (inside, kind, architecture) in MODELS.items():
        package = inside.partition("/")[0]
        with zipfile.ZipFile(next(args.wheels.glob(f"{package}-*.whl"))) as wheel:
            write_model(wheel, inside, kind, architecture, args.out / name)
    labelled = [(row["smiles"], row["class_gt"]) for row in rows(args.drfp / "notebooks/drfp-schneider-errors.csv")]
    random.Random(0).shuffle(labelled)
    folder = args.out / "reactions"
    folder.mkdir()
    for name, part in (("train", labelled[:TRAINING]), ("dev", labelled[TRAINING:])):
        lines = ["text\tlabel", *(f"{text}\tc{label.partition('.')[0]}" for text, label in part)]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    schneider = args.retrosim / "retrosim/data/from_schneider"
    texts = [without_numbers(row["rxn_Smiles"]) for row in rows(schneider / "dataSetA.csv")]
    texts += [without_numbers(row["smiles"]) for row in rows(schneider / "incompleteIndigoMappings_dataSetB.csv")]
    texts += [
        f"{row['reactant_smiles']}>>{row['product_smiles']}" for row in rows(args.drfp / "data/az/az_no_rdkit.csv")
    ]
    seen = {text for text, _ in labelled}
    texts = [text for text in dict.fromkeys(texts) if text not in seen]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (args.out / "text.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
