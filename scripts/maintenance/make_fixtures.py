"""Make the fixtures under tests/fixtures: tiny checkpoints and outputs of the last release that had relative BERT.

Transformers 4.57.6 is the last v4 release; its BERT knew `position_embedding_type` = `relative_key` and
`relative_key_query`, and it still carried Transformer-XL. This script is run there, never under v5:

    python -m venv old && old/bin/pip install torch==2.13.0 transformers==4.57.6
    OMP_NUM_THREADS=1 old/bin/python scripts/maintenance/make_fixtures.py

Sizes: hidden D=24, heads H=3 of d=8, 2 layers, intermediate 32, vocabulary 50, P=12 positions; batch B=2, length L=12.
Every weight is normal noise seeded by its own name, so folders share the tensors that have the same name.

legacy/<kind>/<class>/, for both kinds and nine classes (`HEADS`):
    config.json, model.safetensors
        as `save_pretrained` of 4.57.6 writes them (decoders add generation_config.json). One distance table (2P-1, d)
        per layer, shared by the heads; `position_embeddings` (P, D) is present but dead.
    io.safetensors
        one call, eager attention, eval mode, L=12=P, right padding (lengths 12 and 7):
        input.<argument>             input_ids, attention_mask, token_type_ids (B, L), (B, 3, L) for multiple choice;
                                     cross-attention adds encoder_hidden_states (B, 9, D) and its mask (B, 9)
        label.<argument>             what the class takes to compute a loss; none for BertModel
        output.loss                  ()
        output.<field>               logits, prediction_logits, seq_relationship_logits, start_logits, end_logits,
                                     last_hidden_state, pooler_output: whichever the class returns
        output.hidden_states.<n>     (B, L, D), n = 0 (embeddings), 1, 2; (3B, L, D) for multiple choice
        output.attentions.<n>        (B, H, L, L), n = 0, 1; `DETAILED` classes only
        output.cross_attentions.<n>  (B, H, L, 9), n = 0, 1; cross-attention only
    io_short.safetensors, `DETAILED` classes only
        the same names for L=7 < P (lengths 7 and 4): distance 0 is row P-1 whatever L is, which L=P cannot show.
    Decoders are causal and run without a cache: 4.57.6 with a cache gives every query the last position, a bug.
legacy/relative_key_query/BertLMHeadModel-cross-attention/
    a decoder that also attends to encoder states; there 4.57.6 uses no relative term.
legacy/relative_key_query/BertForMaskedLM-gamma-beta/
    the BertForMaskedLM folder with the `LayerNorm.gamma` and `LayerNorm.beta` of uploads converted from TensorFlow.
transformer_xl/attention.safetensors
    one `RelPartialLearnableMultiHeadAttn` (post-norm); names and shapes stand in `transformer_xl`.

Before anything is replaced, the script checks that the fixtures can fail: each output must move by more than 1e-2 when
the tables are zeroed, reversed or used as the other kind, and when the dead absolute table is added.
"""

import argparse
import copy
import json
import logging
import shutil
import tempfile
import zlib
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file


VERSION = "4.57.6"
KINDS = ("relative_key", "relative_key_query")
SIZES = {
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 12,
    "type_vocab_size": 2,
}
HEADS = {
    "BertModel": {},
    "BertForPreTraining": {},
    "BertForMaskedLM": {},
    "BertLMHeadModel": {"is_decoder": True},
    "BertForNextSentencePrediction": {},
    "BertForSequenceClassification": {"num_labels": 3},
    "BertForMultipleChoice": {},
    "BertForTokenClassification": {"num_labels": 5},
    "BertForQuestionAnswering": {},
}
DETAILED = ("BertModel", "BertLMHeadModel")
FULL, SHORT, ENCODER = (12, 7), (7, 4), (9, 5)  # lengths of the sequences of a batch
MEANINGFUL = 1e-2


def noise(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> torch.Tensor:
    """Normal noise of the given shape that depends on the name alone."""
    return mean + std * torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def integers(name: str, shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
    """Integers in [low, high) that depend on the name alone."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """Give every parameter noise large enough to matter; the base prefix is dropped so that all heads share a body."""
    for name, parameter in model.named_parameters():
        std, mean = 0.2, 0.0
        if "distance_embedding" in name or name in ("r_w_bias", "r_r_bias"):
            std = 0.7
        elif "LayerNorm.weight" in name or "layer_norm.weight" in name:
            std, mean = 0.2, 1.0
        parameter.copy_(noise(name.removeprefix("bert."), tuple(parameter.shape), std, mean))


def padding_mask(lengths: tuple[int, ...]) -> torch.Tensor:
    """(B, max(lengths)): 1 for a token, 0 for right padding."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def inputs_and_labels(head: str, config, lengths: tuple[int, ...]) -> tuple[dict, dict]:
    """Keyword arguments of forward: the inputs, and the labels that make the class return a loss."""
    choices = 3 if head == "BertForMultipleChoice" else 1
    rows = choices * len(lengths)
    mask = padding_mask(lengths * choices)
    shape, length = tuple(mask.shape), mask.shape[1]
    inputs = {
        "input_ids": integers("input_ids", shape, 1, config.vocab_size) * mask,
        "attention_mask": mask,
        "token_type_ids": (torch.arange(length) >= length // 3).long().expand(rows, -1) * mask,
    }
    if choices > 1:
        inputs = {name: tensor.view(-1, choices, length) for name, tensor in inputs.items()}
    if config.add_cross_attention:
        inputs["encoder_attention_mask"] = padding_mask(ENCODER)
        inputs["encoder_hidden_states"] = noise("encoder", (len(ENCODER), max(ENCODER), config.hidden_size), 1.0)

    one_in_two = mask.bool() & (torch.arange(length) % 2 == 1)
    tokens = integers("labels", shape, 1, config.vocab_size).masked_fill(~one_in_two, -100)
    labels = {
        "BertModel": {},
        "BertForPreTraining": {"labels": tokens, "next_sentence_label": torch.tensor([0, 1])},
        "BertForMaskedLM": {"labels": tokens},
        "BertLMHeadModel": {"labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)},
        "BertForNextSentencePrediction": {"labels": torch.tensor([1, 0])},
        "BertForSequenceClassification": {"labels": torch.tensor([2, 0])},
        "BertForMultipleChoice": {"labels": torch.tensor([1, 2])},
        "BertForTokenClassification": {"labels": (tokens % config.num_labels).masked_fill(tokens < 0, -100)},
        "BertForQuestionAnswering": {"start_positions": torch.tensor([3, 1]), "end_positions": torch.tensor([9, 4])},
    }
    return inputs, labels[head]


@torch.no_grad()
def outputs_of(model, arguments: dict, detailed: bool) -> dict[str, torch.Tensor]:
    """Every output as a flat dictionary; tuples become `<field>.<n>`."""
    if model.config.is_decoder:
        arguments = {**arguments, "use_cache": False}
    flat = {}
    for field, value in model(**arguments, output_hidden_states=True, output_attentions=detailed).items():
        parts = {f"{field}.{n}": part for n, part in enumerate(value)} if isinstance(value, tuple) else {field: value}
        flat.update({name: part.contiguous().clone() for name, part in parts.items()})
    return flat


def load(folder: Path, head: str):
    """The model as 4.57.6 loads it from the folder; a key that does not fit is an error."""
    model, info = getattr(transformers, head).from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    problems = {name: keys for name, keys in info.items() if keys}
    if problems:
        raise RuntimeError(f"{folder}: {problems}")
    return model.eval()


def self_attentions(model) -> list:
    """The modules that own a distance table."""
    return [module for module in model.modules() if hasattr(module, "distance_embedding")]


def break_model(model, how: str):
    """A copy of the model with one mistake that a faulty loader could make."""
    model = copy.deepcopy(model)
    for attention in self_attentions(model):
        table = attention.distance_embedding.weight.data
        if how == "tables zeroed":
            table.zero_()
        elif how == "tables reversed":
            table.copy_(table.flip(0))
        elif how == "other kind":
            attention.position_embedding_type = KINDS[1 - KINDS.index(attention.position_embedding_type)]
    if how == "absolute table added":
        model.base_model.embeddings.position_embedding_type = "absolute"
    return model


def check_meaningful(where: str, model, arguments: dict) -> float:
    """Smallest change of any final output under any mistake; too small a change is an error."""
    right = outputs_of(model, arguments, detailed=False)
    smallest = float("inf")
    for how in ("tables zeroed", "tables reversed", "other kind", "absolute table added"):
        wrong = outputs_of(break_model(model, how), arguments, detailed=False)
        for name in right:
            if name == "loss" or name.startswith("hidden_states"):
                continue
            change = (right[name] - wrong[name]).abs().max().item()
            if change <= MEANINGFUL:
                raise RuntimeError(f"{where}: {how} changes {name} by {change:.1e} only")
            smallest = min(smallest, change)
    return smallest


def write_io(folder: Path, model, head: str, detailed: bool) -> None:
    """Run the model and write io.safetensors, and io_short.safetensors for a detailed folder."""
    for name, lengths in (("io", FULL), ("io_short", SHORT))[: 2 if detailed else 1]:
        inputs, labels = inputs_and_labels(head, model.config, lengths)
        outputs = outputs_of(model, {**inputs, **labels}, detailed)
        parts = {"input": inputs, "label": labels, "output": outputs}
        tensors = {f"{part}.{key}": tensor for part, group in parts.items() for key, tensor in group.items()}
        save_file(tensors, folder / f"{name}.safetensors")
        change = check_meaningful(f"{folder.name}/{name}", model, {**inputs, **labels})
        print(f"{folder.parent.name}/{folder.name}/{name}: smallest change under a mistake {change:.2g}")


def bert_folder(folder: Path, head: str, kind: str, **extra) -> None:
    """Save a filled model, load it again, and record what it returns."""
    config = transformers.BertConfig(**SIZES, position_embedding_type=kind, **extra)
    model = getattr(transformers, head)(config)
    fill(model)
    model.save_pretrained(folder)
    write_io(folder, load(folder, head), head, detailed=head in DETAILED)


def gamma_beta_folder(folder: Path, source: Path) -> None:
    """The source folder with the LayerNorm names of TensorFlow; 4.57.6 must read both alike."""
    folder.mkdir()
    shutil.copyfile(source / "config.json", folder / "config.json")
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_io(folder, load(folder, "BertForMaskedLM"), "BertForMaskedLM", detailed=False)
    if (folder / "io.safetensors").read_bytes() != (source / "io.safetensors").read_bytes():
        raise RuntimeError("renaming LayerNorm changed the outputs")


def legacy(root: Path) -> None:
    """All BERT folders."""
    for kind in KINDS:
        for head, extra in HEADS.items():
            bert_folder(root / kind / head, head, kind, **extra)
    last = root / "relative_key_query"
    cross = {"is_decoder": True, "add_cross_attention": True}
    bert_folder(last / "BertLMHeadModel-cross-attention", "BertLMHeadModel", "relative_key_query", **cross)
    gamma_beta_folder(last / "BertForMaskedLM-gamma-beta", last / "BertForMaskedLM")


@torch.no_grad()
def transformer_xl(root: Path) -> None:
    """Parity data of one Transformer-XL attention layer, time first as in the original.

    Sizes: D=24, H=3, d=8, B=2, Q=10 queries, M memory slots, K=M+Q keys. Weights (shared by the cases):
    qkv_net.weight (3Hd, D), r_net.weight (Hd, D), o_net.weight (D, Hd), r_w_bias and r_r_bias (H, d),
    layer_norm.weight and layer_norm.bias (D,). Cases `plain`, `clamped`, `memory`, `memory_clamped`, each with
        <case>.hidden_states (Q, B, D)      <case>.mems (M, B, D), with memory only
        <case>.pos_seq (K,)                 distance of each row of pos_emb: K-1 ... 0, at most clamp_len
        <case>.pos_emb (K, 1, D)            sin | cos of the distance, from `PositionalEmbedding`
        <case>.attn_mask (Q, K, 1)          True where a key is hidden (causal)
        <case>.attn_prob (Q, K, B, H)       <case>.context (Q, B, Hd), input of o_net
        <case>.attn_out (Q, B, D), output of o_net     <case>.output (Q, B, D) = layer_norm(hidden_states + attn_out)
    The metadata entry `config` is JSON: sizes, and `cases` with mlen and clamp_len (-1: not clamped).
    """
    from transformers.models.deprecated.transfo_xl.modeling_transfo_xl import (
        PositionalEmbedding,
        RelPartialLearnableMultiHeadAttn,
    )

    sizes = {"n_head": 3, "d_model": 24, "d_head": 8, "dropout": 0.0, "dropatt": 0.0, "pre_lnorm": False}
    epsilon, qlen, batch = 1e-5, 10, 2
    cases = {
        "plain": {"mlen": 0, "clamp_len": -1},
        "clamped": {"mlen": 0, "clamp_len": 4},
        "memory": {"mlen": 5, "clamp_len": -1},
        "memory_clamped": {"mlen": 5, "clamp_len": 4},
    }
    layer = RelPartialLearnableMultiHeadAttn(**sizes, layer_norm_epsilon=epsilon).eval()
    fill(layer)
    position = PositionalEmbedding(sizes["d_model"])
    seen = {}
    layer.o_net.register_forward_hook(lambda _, args, out: seen.update(context=args[0].clone(), attn_out=out.clone()))

    tensors = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    for case, settings in cases.items():
        klen = settings["mlen"] + qlen
        hidden_states = noise("hidden_states", (qlen, batch, sizes["d_model"]), 1.0)
        mems = noise("mems", (settings["mlen"], batch, sizes["d_model"]), 1.0) if settings["mlen"] else None
        pos_seq = torch.arange(klen - 1, -1, -1.0)
        if settings["clamp_len"] > 0:
            pos_seq.clamp_(max=settings["clamp_len"])
        pos_emb = position(pos_seq)
        attn_mask = torch.ones(qlen, klen, dtype=torch.bool).triu(1 + settings["mlen"])[:, :, None]
        arguments = {"w": hidden_states, "r": pos_emb, "attn_mask": attn_mask, "mems": mems, "output_attentions": True}

        for name in ("r_net.weight", "r_w_bias", "r_r_bias"):
            broken = copy.deepcopy(layer)
            broken.get_parameter(name).zero_()
            change = (layer(**arguments)[0] - broken(**arguments)[0]).abs().max().item()
            if change <= MEANINGFUL:
                raise RuntimeError(f"transformer_xl {case}: zeroing {name} changes the output by {change:.1e} only")
        output, attn_prob = layer(**arguments)
        found = {"hidden_states": hidden_states, "pos_seq": pos_seq, "pos_emb": pos_emb, "attn_mask": attn_mask}
        found.update(seen, attn_prob=attn_prob, output=output, **({} if mems is None else {"mems": mems}))
        tensors.update({f"{case}.{name}": tensor.contiguous().clone() for name, tensor in found.items()})
    for one, other in (("plain", "clamped"), ("memory", "memory_clamped"), ("plain", "memory")):
        if (tensors[f"{one}.output"] - tensors[f"{other}.output"]).abs().max() <= MEANINGFUL:
            raise RuntimeError(f"transformer_xl: {one} and {other} are alike")

    config = {**sizes, "layer_norm_epsilon": epsilon, "qlen": qlen, "batch_size": batch, "cases": cases}
    root.mkdir(parents=True)
    save_file(tensors, root / "attention.safetensors", metadata={"config": json.dumps(config)})


def replace(new: Path, old: Path) -> None:
    """Put the folder `new` where `old` may be; both lie on one disk, so each step is a rename."""
    if old.exists():
        old.rename(new.with_name(old.name + ".old"))
    new.rename(old)


def main() -> None:
    """Check the version, make everything in a temporary folder, then swap it in."""
    parser = argparse.ArgumentParser(description="Make the fixtures; needs transformers==" + VERSION)
    default = Path(__file__).resolve().parents[2] / "tests" / "fixtures"
    parser.add_argument("--out", type=Path, default=default, help="folder to write to (default: tests/fixtures)")
    out = parser.parse_args().out
    if transformers.__version__ != VERSION:
        raise SystemExit(
            f"needs transformers=={VERSION}, not {transformers.__version__}; see above for an environment"
        )
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".making-") as staging:
        parts = {"legacy": legacy, "transformer_xl": transformer_xl}
        for name, make in parts.items():
            make(Path(staging) / name)
        for file in Path(staging).rglob("*.safetensors"):
            file.chmod(0o644)
        for name in parts:
            replace(Path(staging) / name, out / name)


if __name__ == "__main__":
    main()
