"""Mistral: Llama without biases, with a sliding window in all layers."""

from __future__ import annotations

from megatron.convert.hugging_face.families.llama import IGNORED_TENSORS, LLAMA, SHARED_FIELDS
from megatron.convert.hugging_face.table.family import Family
from megatron.convert.hugging_face.table.fields import Constant, tied_head
from megatron.convert.hugging_face.table.rope import rope_fields
from megatron.convert.hugging_face.table.windows import window_of_all_layers

# Source: transformers `models/mistral/configuration_mistral.py` and `modeling_mistral.py`.
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=(
        *SHARED_FIELDS,
        Constant({"add_bias_linear": False}),
        rope_fields(),
        window_of_all_layers(default=4096),
        tied_head(default=False),
    ),
    tensors=LLAMA.tensors,
    ignored_tensors=IGNORED_TENSORS,
)
