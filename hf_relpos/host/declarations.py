"""What the package needs of other libraries beyond their documented interfaces, as data.

`missing` compares each declaration with the release that is installed. A release that renames or drops something is
then one line that says what is gone; tests walk the list on every release that is tested, and so does
`hf-relpos doctor --check` on a user's machine. Names alone that `host` imports are not listed: without one, the import
says which. Of the package, only the modules of this folder use these names.
"""

import importlib
import importlib.metadata
import inspect
import operator
from dataclasses import dataclass


FLOOR = {"transformers": "5.5", "torch": "2.11", "peft": "0.17"}


@dataclass(frozen=True)
class Need:
    """Something that a library does not document, and that the package uses.

    Attributes:
        path: "module:name", or "module:Class.name".
        parameters: arguments that are passed by name; "cache|past_key_values" is one argument with two names.
        since: the first release with it, if that is later than the oldest supported one.
        without: what is done on releases that lack it; None if the package does not work without it.
    """

    path: str
    parameters: tuple[str, ...] = ()
    since: str | None = None
    without: str | None = None

    @property
    def library(self) -> str:
        """The distribution that has it."""
        return self.path.partition(":")[0].partition(".")[0]

    @property
    def is_released(self) -> bool:
        """Whether the installed release is the first with it, or a later one."""
        try:
            return _numbers(importlib.metadata.version(self.library)) >= _numbers(self.since or FLOOR[self.library])
        except importlib.metadata.PackageNotFoundError:
            return False

    def missing(self) -> str | None:
        """What the installed release lacks of it, in one line.

        None if it lacks nothing, is older than the first release that has it, or is not installed.
        """
        return self.lack(importlib.metadata.version(self.library)) if self.is_released else None

    def lack(self, version: str = "") -> str | None:
        """What is not there, in one line, whatever the release; None if everything is."""
        module, _, name = self.path.partition(":")
        consequence = f"; without it, {self.without}" if self.without else ""
        try:
            found = operator.attrgetter(name)(importlib.import_module(module))
        except (ImportError, AttributeError):
            return f"{self.library} {version} has no {self.path}{consequence}"
        if not self.parameters:
            return None
        known = inspect.signature(found).parameters
        lacking = [each for each in self.parameters if not any(name in known for name in each.split("|"))]
        if not lacking:
            return None
        names = ", ".join(lacking).replace("|", " or ")
        both = f"has no argument {names} (it has {', '.join(known)})"
        return f"{self.library} {version}: {self.path} {both}{consequence}"


def stock(module: str, name: str, parameters: tuple[str, ...] = (), **others: str) -> Need:
    """Something in the module of a stock model, such as `modeling_bert`."""
    return Need(f"transformers.models.{module.removeprefix('modeling_')}.{module}:{name}", parameters, **others)


CACHE = "cache|past_key_values"
MASKS = "transformers.masking_utils"
MODEL = "transformers.modeling_utils:PreTrainedModel"
STATES = "hidden_states"
OUTPUTS = ("output_attentions", "output_hidden_states", "return_dict")

# BERT's own classes, which ours inherit from, and what their calls pass on.
MODELS = (
    *(
        stock("modeling_bert", f"{name}.forward", (STATES, "attention_mask", CACHE))
        for name in ("BertSelfAttention", "BertAttention", "BertLayer", "BertEncoder")
    ),
    stock("modeling_bert", "BertSelfOutput.forward", (STATES, "input_tensor")),
    stock("modeling_bert", "BertModel.forward", ("input_ids", "attention_mask", "inputs_embeds", CACHE, "use_cache")),
    stock("modeling_bert", "BertLMHeadModel.forward", ("input_ids", "labels", CACHE, "logits_to_keep")),
    Need(f"{MASKS}:create_causal_mask", ("config", "inputs_embeds", "attention_mask", CACHE, "and_mask_function")),
    Need(f"{MASKS}:create_bidirectional_mask", ("config", "inputs_embeds", "attention_mask", "and_mask_function")),
    Need(f"{MASKS}:ALL_MASK_ATTENTION_FUNCTIONS.register"),
    Need(f"{MODEL}._init_weights", ("module",)),
    Need(f"{MODEL}._initialize_weights", ("module", "is_custom_code|is_remote_code")),
    Need(f"{MODEL}.get_correct_attn_implementation", ("requested_attention", "is_init_check")),
    Need(f"{MODEL}.tie_weights", ("missing_keys",)),
    Need(f"{MODEL}._get_files_timestamps", ("working_dir",)),
    Need("transformers.generation.utils:GenerationMixin._expand_inputs_for_generation", ("expand_size",)),
)
# Classes of stock encoders that `optimize` replaces by subclasses.
BIAS = ("query_length", "key_length", "past_seen_tokens")
ROTARY = (STATES, "attention_mask", "sinusoidal_pos", "encoder_hidden_states", CACHE, "output_attentions")
DISENTANGLED = (STATES, "attention_mask", "output_attentions", "query_states", "relative_pos", "rel_embeddings")
DISENTANGLED_STACK = (STATES, "attention_mask", "output_hidden_states", "output_attentions", "query_states")
TWO_STREAMS = ("h", "g", "attn_mask_h", "attn_mask_g", "r", "seg_mat", "mems", "target_mapping", "output_attentions")
# In earlier releases T5 and its relatives attend otherwise than by the attention interface.
T5_BIAS = stock("modeling_t5", "T5Attention.compute_bias", BIAS, since="5.15")
LIVE = (
    T5_BIAS,
    stock("modeling_mt5", "MT5Attention.compute_bias", BIAS, since="5.15"),
    stock("modeling_umt5", "UMT5Attention.compute_bias", BIAS, since="5.15"),
    stock("modeling_mpnet", "MPNetEncoder.forward", (STATES, "attention_mask", *OUTPUTS)),
    stock("modeling_mpnet", "MPNetSelfAttention.forward", (STATES, "attention_mask", "position_bias")),
    stock("modeling_roformer", "RoFormerEncoder.forward", (STATES, "attention_mask", CACHE, *OUTPUTS)),
    stock("modeling_roformer", "RoFormerSelfAttention.forward", ROTARY),
    stock("modeling_roformer", "RoFormerSinusoidalPositionalEmbedding.forward", ("input_ids_shape",)),
    stock("modeling_xlnet", "XLNetModel.forward", ("input_ids", "attention_mask", "mems", "use_mems", *OUTPUTS)),
    stock("modeling_xlnet", "XLNetRelativeAttention.forward", TWO_STREAMS),
    stock("modeling_xlnet", "XLNetModelOutput"),
    stock("modeling_deberta", "DebertaEncoder.forward", DISENTANGLED_STACK),
    stock("modeling_deberta", "DisentangledSelfAttention.forward", DISENTANGLED),
    stock("modeling_deberta_v2", "DebertaV2Encoder.forward", DISENTANGLED_STACK),
    stock("modeling_deberta_v2", "DisentangledSelfAttention.forward", DISENTANGLED),
    stock("modeling_deberta_v2", "make_log_bucket_position"),
    stock("modeling_wav2vec2_bert", "Wav2Vec2BertSelfAttention.forward", (STATES, "attention_mask")),
    stock("modeling_seamless_m4t_v2", "SeamlessM4Tv2ConformerSelfAttention.forward", (STATES, "attention_mask")),
)
# RoFormer's decoders had no causal mask.
ROFORMER_CAUSAL_MASK = stock(
    "modeling_roformer", "create_causal_mask", since="5.18", without="checkpoints of its decoders are rejected"
)
# What else `optimize`, the registration and the products of matrices use.
TOOLS = (
    ROFORMER_CAUSAL_MASK,
    Need("transformers.utils.loading_report:log_state_dict_report", without="no warning of tables that are left out"),
    Need(
        "transformers.modeling_utils:_load_parameter_into_model",
        ("model", "param_name"),
        without="no warning of uninitialised buffers, which initialize_buffers does not fill unless forced",
    ),
    Need("transformers.conversion_mapping:get_model_conversion_mapping", ("model",)),
    Need("transformers.core_model_loading:rename_source_key", ("source_key", "weight_renamings", "weight_converters")),
    Need("transformers.core_model_loading:WeightConverter.convert", ("layer_name", "model", "config")),
    Need("transformers.core_model_loading:WeightConverter.add_tensor", ("target_key", "source_key", "source_pattern")),
    Need("transformers.utils.output_capturing:_active_collector"),
    Need("peft.utils.constants:TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING", without="LoRA needs targets"),
    Need("torch:ops.mkldnn._linear_pointwise", without="linear layers use PyTorch's own product"),
    Need("torch:ops.mkldnn._reorder_linear_weight", without="weights are not packed"),
    Need("torch:ops.onednn.qlinear_pointwise", without="int8 multiplies by torch._int_mm"),
    Need("torch:ops.onednn.qlinear_prepack", without="int8 multiplies by torch._int_mm"),
    Need("torch:backends.mkldnn.matmul.fp32_precision", without="batched products use PyTorch's own"),
    Need("torch:_int_mm", without="optimize(dtype='int8') raises an error"),
    Need("torch.ao.quantization.quantize:propagate_qconfig_", without="quantize_dynamic finds no optimized layers"),
    Need("torch:_assert_async"),
    Need("torch:Tensor._make_wrapper_subclass"),
    Need("torch.utils._pytree:tree_map_only"),
    Need("torch.utils._python_dispatch:TorchDispatchMode"),
    Need("torch._C:_functorch.peek_interpreter_stack"),
    Need("torch._C:_len_torch_dispatch_stack"),
    Need("torch._C:_len_torch_function_stack"),
    Need("torch.autograd.forward_ad:_current_level"),
    *(
        Need(f"torch.nn.modules.module:_global_{kind}_hooks")
        for kind in ("forward", "forward_pre", "backward", "backward_pre")
    ),
)
NEEDS = (*MODELS, *LIVE, *TOOLS)


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor number of a release."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def missing() -> list[str]:
    """What the installed releases lack, a line each; empty if nothing."""
    return [line for need in NEEDS if (line := need.missing()) is not None]
