"""XLM-RoBERTa in the layout of flash-attention: jina-embeddings-v3, jina-colbert-v2, jina-reranker-v2.

The original code is named in `auto_map` (jinaai/xlm-roberta-flash-implementation), model_type is XLM-RoBERTa's.
Transformers saves jina-embeddings-v3 in the same layout. Positions are rotations, or, in the reranker, absolute.

jina-embeddings-v3 has LoRA weights for each of its tasks as parametrizations. They are merged for the task that the
field `lora_task` of config.json names, as its code does while it computes; without one they are left out, as its code
does without a task.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..checkpoints.errors import ConversionError
from .family import MOST, Family, Layout, Positions
from .joints import Joint, Tensors, projections
from .roberta import HEADS
from .rotary import BASE, other_scaling, rope_options


ORIGINAL, LORA_A, LORA_B = (f".parametrizations.weight.{part}" for part in ("original", "0.lora_A", "0.lora_B"))


class _Flash(Family):
    """What checkpoints of the original code and of Transformers have in common."""

    suffixes = MOST
    parts = {
        "roberta": "bert",
        "emb_ln": "embeddings.LayerNorm",
        "layers": "layer",
        **HEADS,
        "*.mixer.out_proj": "*.attention.output.dense",
        "*.mlp.fc1": "*.intermediate.dense",
        "*.mlp.fc2": "*.output.dense",
        "*.norm1": "*.attention.output.LayerNorm",
        "*.norm2": "*.output.LayerNorm",
    }
    stock = None
    types = {"rope_theta": BASE, "rotary_emb_base": BASE}
    only = {"position_embedding_type": (["absolute", "rotary"], "other positions are not read here")}
    always_gelu = True
    read_directly = True
    layout = Layout("XLM-RoBERTa for flash attention", (r"\.mixer\.Wqkv\.", r"\.mlp\.fc1\."))
    kind = "rotary"  # of positions, where no field says it

    def joints(self) -> Iterable[Joint]:
        """One projection of queries, keys and values."""
        return [projections(".mixer.Wqkv.")]

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Tensors with the LoRA weights of the field `lora_task` in them, or without any.

        Each is W + α / r · B A, with the matrices of the task; for embeddings with A and B exchanged. It is computed,
        and returned, in float32 or the wider dtype of the file.

        Raises:
            ConversionError: for a task that `lora_adaptations` does not list.
        """
        config = self.config
        task, tasks = config.get("lora_task"), config.get("lora_adaptations") or []
        if task is not None and task not in tasks:
            raise ConversionError(f"lora_task = {task!r} is not in lora_adaptations: {', '.join(map(repr, tasks))}")
        found = {}
        for name, tensor in tensors.items():
            if name.endswith((LORA_A, LORA_B)):
                continue
            stem = name.removesuffix(ORIGINAL)
            if stem == name:
                found[name] = tensor
                continue
            if task is not None:
                wide = torch.promote_types(tensor.dtype, torch.float32)
                left, right = (tensors[f"{stem}{part}"][tasks.index(task)].to(wide) for part in (LORA_B, LORA_A))
                change = left @ right if "embeddings" not in stem else right @ left
                scale = config.get("lora_alpha", 1) / config.get("lora_rank", 4)
                tensor = tensor.to(wide) + scale * change.view(tensor.shape)
            found[f"{stem}.weight"] = tensor
        return super().unpack(found)

    def pack(self, tensors: Tensors) -> Tensors:
        """The inverse of `unpack` for a model without such weights.

        Raises:
            ConversionError: for others.
        """
        if self.config.get("lora_adaptations"):
            tasks = f"lora_adaptations = {self.config['lora_adaptations']!r}"
            merged = "the LoRA weights of its tasks are merged or left out, and cannot be written back"
            raise ConversionError(f"{tasks}: {merged}; keep the original")
        return super().pack(tensors)

    def written(self) -> dict[str, str]:
        """The bias of predictions once, as the decoder's; a dense layer is of a classifier or of the encoder."""
        is_classifier = self.head.endswith("ForSequenceClassification")
        return {
            "cls.predictions.bias": "",
            "cls.predictions.decoder.bias": "lm_head.bias",
            "classifier": "classifier.out_proj" if is_classifier else "classifier",
            "bert.pooler.dense": "classifier.dense" if is_classifier else "bert.pooler.dense",
        }

    def find_positions(self) -> Positions:
        """Rotations, or absolute ones."""
        if self.config.get("position_embedding_type", self.kind) != "rotary":
            return Positions()
        options = rope_options(self.config, self.config.get("rotary_emb_base", 20000.0))
        return Positions(absolute=False, scheme="rope", options=options)

    def unsupported_reason(self) -> str:
        """Unknown scalings are not supported."""
        return other_scaling(self.config)


class XLMRobertaFlash(_Flash, name="xlm_roberta_flash"):
    """Checkpoints of the original code."""

    class_prefixes = ("XLMRoberta",)
    title = "jina-embeddings-v3, jina-colbert-v2; jina-reranker-v2"
    defaults = {"vocab_size": 250002, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    only = {
        **_Flash.only,
        "hidden_act": (
            ["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"],
            "its code has GELU; correct config.json",
        ),
    }
    marks = "xlm-roberta"
    marker = "use_flash_attn"
    told_by_tensors = True
    published = {"use_flash_attn": True, "position_embedding_type": "rotary", "rotary_emb_base": 20000.0}
    kind = "absolute"

    def padding(self) -> Any:
        """`pad_token_id`, after which absolute positions begin."""
        return self.config["pad_token_id"]


class JinaEmbeddingsV3(_Flash, name="jina_embeddings_v3"):
    """jina-embeddings-v3, as Transformers has it."""

    class_prefixes = ("JinaEmbeddingsV3",)
    title = "jina-embeddings-v3 of Transformers"
