"""BERT with absolute or relative positions, checkpoints of this package, and copies of BERT.

Stock BERT had `relative_key` and `relative_key_query` up to Transformers 4.57. NEZHA (Wei et al., arXiv
1909.00204) has the layout of Transformers ≤ 4.57 or its original one. ELECTRA (Clark et al., arXiv 2003.10555) has
generators and discriminators. ERNIE (Sun et al., arXiv 1904.09223) is BERT with another prefix; later versions also
have task types.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.errors import ConversionError, conversion_errors
from ..checkpoints.privacy import without_local_paths
from ..models.checks import integer
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..schemes.registry import STOCK_SCHEME
from .family import ALL, FIELD_ERRORS, LEGACY_TYPES, Family, Layout, Positions


class Own(Family):
    """A checkpoint of this package, whose configuration names its positions."""

    class_prefixes = ("RelPosBert",)
    suffixes = (*ALL, "LMHeadModel")
    title = "hf_relpos"
    stock = "bert"
    legacy_terms = None  # our classes compute its positions

    def __init__(self, config: Mapping[str, Any], folder: Path = Path()) -> None:
        """
        Raises:
            ConversionError: for an invalid configuration, positions that need other inputs than tokens, and absolute
                position embeddings that are combined with other schemes.
        """
        kept = {key: value for key, value in without_local_paths(config).items() if key != "auto_map"}
        super().__init__(kept, folder)
        with conversion_errors(f"{folder / 'config.json'}: ", FIELD_ERRORS):
            own: RelPosBertConfig = RelPosBertConfig.from_dict(kept)
        name, options = own.position_embedding_type, dict(own.position_options or {})
        self.positions = Positions(own.has_absolute_table, None if name == STOCK_SCHEME else name, options)
        self.evidence = f"position_embedding_type = {name!r}"
        if inputs := ", ".join(sorted(own.required_inputs)):
            needs = f"{self.evidence} needs inputs besides the tokens ({inputs})"
            raise ConversionError(f"{folder}: {needs}; only a scheme that needs none can be converted")
        if isinstance(name, list) and STOCK_SCHEME in name:
            raise ConversionError(f"{folder}: {self.evidence}: combined with {STOCK_SCHEME!r}, it cannot be converted")

    @classmethod
    def ignored_fields(cls, config: Iterable[str]) -> set[str]:
        """None: all its fields are ours."""
        return set()


class Bert(Family, name="bert"):
    """BERT."""

    class_prefixes = ("Bert",)
    suffixes = (*ALL, "LMHeadModel")
    title = "BERT"
    legacy_types = LEGACY_TYPES


class Nezha(Family, name="nezha"):
    """NEZHA."""

    class_prefixes = ("Nezha", "Bert")
    suffixes = ALL
    title = "NEZHA"
    parts = {"nezha": "bert"}
    stock = "bert"
    defaults = {"vocab_size": 21128, "classifier_dropout": 0.1, "max_relative_position": 64}
    defaults |= {"bos_token_id": 2, "eos_token_id": 3}
    dropped_fields = ("use_relative_position", "max_relative_position")
    only = {"add_cross_attention": ([False, None], "NEZHA's cross-attention is relative, too, and ours absolute")}
    computes_positions = True
    marker = "use_relative_position"  # in the original layout
    layout = Layout("NEZHA", (r"(^|\.)nezha\.|\.relative_positions_encoding\.",))

    def find_positions(self) -> Positions:
        """Sinusoids of distances."""
        options = {"max_relative_position": self.config["max_relative_position"]}
        return Positions(absolute=False, scheme="nezha", options=options)


class Electra(Family, name="electra"):
    """ELECTRA."""

    class_prefixes = ("Electra",)
    suffixes = ("Model", "ForMaskedLM", "ForCausalLM", "ForTokenClassification", "ForQuestionAnswering")
    title = "ELECTRA"
    parts = {
        "electra": "bert",
        "embeddings_project": "embeddings.embeddings_project",
        "generator_predictions": "cls.predictions.transform",
        "generator_lm_head.weight": "cls.predictions.decoder.weight",
        "generator_lm_head.bias": "cls.predictions.bias",
    }
    legacy_types = LEGACY_TYPES
    always_gelu = True
    layout = Layout("ELECTRA", (r"(^|\.)(electra|generator_\w+|discriminator_\w+)\.",))


class Ernie(Family, name="ernie"):
    """ERNIE."""

    class_prefixes = ("Ernie",)
    suffixes = (*ALL, "ForCausalLM")
    title = "ERNIE"
    parts = {"ernie": "bert"}
    types = {"task_type_vocab_size": integer(0)}
    legacy_types = LEGACY_TYPES
    layout = Layout("ERNIE", (r"(^|\.)(ernie\.|embeddings\.task_type_embeddings\.)",))
