"""DistilBERT (Sanh et al., arXiv 1910.01108): no token types, and other names."""

from .family import OF_DECODERS, Family, Layout, renamed
from .names import Rule


FAMILIES: dict[str, Family] = {
    "distilbert": Family(
        class_prefixes=("DistilBert",),
        suffixes=("Model", "ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering"),
        rules=(
            Rule("distilbert.*", "bert.*"),
            Rule("transformer.*", "bert.transformer.*"),
            Rule("bert.transformer.*", "bert.encoder.*"),
            *renamed(
                {
                    "attention.q_lin": "attention.self.query",
                    "attention.k_lin": "attention.self.key",
                    "attention.v_lin": "attention.self.value",
                    "attention.out_lin": "attention.output.dense",
                    "sa_layer_norm": "attention.output.LayerNorm",
                    "ffn.lin1": "intermediate.dense",
                    "ffn.lin2": "output.dense",
                    "output_layer_norm": "output.LayerNorm",
                }
            ),
            Rule("vocab_transform.*", "cls.predictions.transform.dense.*"),
            Rule("vocab_layer_norm.*", "cls.predictions.transform.LayerNorm.*"),
            Rule("vocab_projector.w*", "cls.predictions.decoder.w*"),
            Rule("vocab_projector.b*", "cls.predictions.b*"),
        ),
        stock="distilbert",
        dropped_fields=(
            "sinusoidal_pos_embds",
            "qa_dropout",
            "seq_classif_dropout",
            "tie_weights_",
            "embedding_size",
            *OF_DECODERS,
        ),
        renamed_fields={
            "dim": "hidden_size",
            "hidden_dim": "intermediate_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "activation": "hidden_act",
            "dropout": "hidden_dropout_prob",
            "attention_dropout": "attention_probs_dropout_prob",
        },
        token_types=False,
        title="DistilBERT",
        layout=Layout("DistilBERT", (r"\btransformer\.layer\.\d+\.attention\.q_lin\.",)),
    )
}
