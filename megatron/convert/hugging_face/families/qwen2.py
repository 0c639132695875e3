"""Qwen 2 and 2.5: Llama with biases of queries, keys and values, and a sliding window from some layer on."""

from __future__ import annotations

from megatron.convert.hugging_face.families.llama import IGNORED_TENSORS, LLAMA, SHARED_FIELDS
from megatron.convert.hugging_face.table.family import Family
from megatron.convert.hugging_face.table.fields import Constant, Only, tied_head
from megatron.convert.hugging_face.table.rope import rope_fields
from megatron.convert.hugging_face.table.windows import switched_window

# Source: transformers `models/qwen2/configuration_qwen2.py` and `modeling_qwen2.py`.
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=(
        *SHARED_FIELDS,
        Constant({"add_bias_linear": False, "add_qkv_bias": True}),  # no field says so
        rope_fields(),
        switched_window(),
        tied_head(default=False),
        Only("use_mrope", (False,), is_written=False),
    ),
    tensors=LLAMA.tensors,
    ignored_tensors=IGNORED_TENSORS,
)
