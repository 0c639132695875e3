"""The widths of latent attention, what follows from them, and what it does not go with."""

from __future__ import annotations

import math

import pytest

from megatron.config.sections.model import unused_fields
from tests.config.command_lines import small

LATENT = (
    "--multi-latent-attention --position-embedding-type rope --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 "
)
YARN = "--rope-scaling-type yarn --rotary-scaling-factor 4 --mscale 0.5 --mscale-all-dim 2"


def test_the_width_of_heads_and_what_is_cached_follow() -> None:
    model = small(LATENT + "--kv-lora-rank 10").model
    assert (model.kv_channels, model.value_channels, model.latent_width) == (12, 6, 14)
    assert model.softmax_scale is None and model.latent_layernorm_epsilon == model.layernorm_epsilon
    assert small("--kv-channels 10").model.value_channels == 10


def test_a_stretched_context_changes_cosines_and_scores() -> None:
    model = small(LATENT + YARN).model
    of_scores = 1 + 0.1 * 2 * math.log(4)
    assert model.rope_scaling_factor == 4
    assert model.softmax_scale == pytest.approx(of_scores**2 / math.sqrt(12))
    assert model.yarn_factor == pytest.approx((1 + 0.1 * 0.5 * math.log(4)) / of_scores)
    muted = small(LATENT + YARN + " --softmax-scale 0.3").model
    assert muted.softmax_scale == 0.3
    assert small(f"--position-embedding-type rope {YARN}").model.yarn_factor == pytest.approx(1 + 0.1 * math.log(4))


def test_with_mup_the_scores_are_stretched_as_well() -> None:
    mup = "--use-mup --mup-base-hidden-size 16 "
    plain, stretched = (small(LATENT + mup + more).model.softmax_scale for more in ("", YARN))
    assert plain == pytest.approx(1 / 12) and stretched == pytest.approx((1 + 0.2 * math.log(4)) ** 2 / 12)


def test_fields_without_effect() -> None:
    widths = {"q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"}
    assert widths | {"mscale", "mscale_all_dim", "latent_layernorm_epsilon"} <= unused_fields(small("").model).keys()
    latent = unused_fields(small(LATENT).model).keys()
    assert {"mscale", "qk_layernorm_scope", "latent_layernorm_epsilon"} <= latent and not widths & latent
    stretched = unused_fields(small(LATENT + YARN + " --qk-layernorm").model).keys()
    assert not {"mscale", "latent_layernorm_epsilon"} & stretched
