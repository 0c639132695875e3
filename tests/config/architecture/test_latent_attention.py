"""The widths of latent attention, what follows from them, and what it cannot be combined with."""

from __future__ import annotations

from megatron.config.sections.model import unused_fields
from tests.config.command_lines import small

LATENT = (
    "--multi-latent-attention --position-embedding-type rope --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 "
)
YARN = "--rope-scaling-type yarn --rotary-scaling-factor 4 --mscale 0.5 --mscale-all-dim 2"


def test_fields_without_effect() -> None:
    widths = {"q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"}
    assert widths | {"mscale", "mscale_all_dim", "latent_layernorm_epsilon"} <= unused_fields(small("").model).keys()
    latent = unused_fields(small(LATENT).model).keys()
    assert {"mscale", "qk_layernorm_scope", "latent_layernorm_epsilon"} <= latent and not widths & latent
    stretched = unused_fields(small(LATENT + YARN + " --qk-layernorm").model).keys()
    assert not {"mscale", "latent_layernorm_epsilon"} & stretched
