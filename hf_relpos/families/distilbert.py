"""DistilBERT (Sanh et al., arXiv 1910.01108): no token types, and other names."""

from .family import Family, Layout
from .names import of_attention


class DistilBert(Family, name="distilbert"):
    """DistilBERT."""

    class_prefixes = ("DistilBert",)
    suffixes = ("Model", "ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering")
    title = "DistilBERT"
    parts = {
        "distilbert": "bert",
        "transformer": "encoder",
        "vocab_transform": "cls.predictions.transform.dense",
        "vocab_layer_norm": "cls.predictions.transform.LayerNorm",
        "vocab_projector.weight": "cls.predictions.decoder.weight",
        "vocab_projector.bias": "cls.predictions.bias",
        **of_attention("*.attention.{}_lin", "q", "k", "v", "out"),
        "*.sa_layer_norm": "*.attention.output.LayerNorm",
        "*.ffn.lin1": "*.intermediate.dense",
        "*.ffn.lin2": "*.output.dense",
        "*.output_layer_norm": "*.output.LayerNorm",
    }
    dropped_fields = ("tie_weights_",)
    renamed_fields = {
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "activation": "hidden_act",
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
    }
    token_types = False
    layout = Layout("DistilBERT", (r"\btransformer\.layer\.\d+\.attention\.q_lin\.",))
