"""OLMo 2 and 3: norms after the branches instead of before, queries and keys normalized over all heads.

OLMo 3 has windows in three of four layers, whose rotary embedding is not scaled.
"""

from __future__ import annotations

from trident.convert.hugging_face.families.llama import (
    ATTENTION_TENSORS,
    FEED_FORWARD_TENSORS,
    OUTER_TENSORS,
    QUERY_KEY_NORM_TENSORS,
    SHARED_FIELDS,
    THEIR_LAYER,
)
from trident.convert.hugging_face.table.config_fields import FieldRule, attention_biases, constant, same, tied_head
from trident.convert.hugging_face.table.family import Family
from trident.convert.hugging_face.table.rope import rope_fields
from trident.convert.hugging_face.table.tensors import OUR_LAYER, norm
from trident.convert.hugging_face.table.windows import layered_window, rotations_by_window

# Fields of both.
_FIELDS: tuple[FieldRule, ...] = (
    *SHARED_FIELDS,
    same("layernorm_epsilon", "rms_norm_eps", 1e-5),
    constant(norm_placement="post_branch", qk_layernorm=True, qk_layernorm_scope="all"),
    attention_biases(),
    tied_head(default=False),
)

# Source: transformers `models/olmo2/configuration_olmo2.py` and `modeling_olmo2.py`.
OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    fields=(*_FIELDS, rope_fields()),
    tensors=(
        *OUTER_TENSORS,
        *ATTENTION_TENSORS,
        *QUERY_KEY_NORM_TENSORS,
        *FEED_FORWARD_TENSORS,
        *norm(OUR_LAYER + "post_self_attn_layernorm", THEIR_LAYER + "post_attention_layernorm"),
        *norm(OUR_LAYER + "post_mlp_layernorm", THEIR_LAYER + "post_feedforward_layernorm"),
    ),
)

# Source: transformers `models/olmo3/configuration_olmo3.py` and `modeling_olmo3.py`.
OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    fields=(*_FIELDS, rotations_by_window(500_000.0), layered_window(period=4)),
    tensors=OLMO2.tensors,
)
