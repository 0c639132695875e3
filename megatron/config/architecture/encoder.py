"""Encoders: attention in both directions, token types, and the heads of masked language models."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import network_flag
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class EncoderFields(ConfigSection):
    """Parts of BERT and RoBERTa that GPT lacks.

    Source: Devlin et al., "BERT", 2019, section 3 and appendix A; NVIDIA Megatron-LM
    `megatron/core/models/bert/bert_model.py` and `pretrain_bert.py` (token types only with the sentence-order head).
    """

    bidirectional: bool = network_flag(False, "bidirectional attention, as in BERT, instead of causal")
    token_types: int = network_flag(
        help="rows of the token-type embedding (BERT 2, RoBERTa 1); 2 with --sentence-order-head, else 0 if unset",
        computed=lambda model: 2 if model.sentence_order_head else 0,
        at_least=0,
        at_most=2**16,
        follows=("sentence_order_head",),
        spelled=("--num-token-types",),
    )
    masked_lm_head: bool = network_flag(
        False, "masked-LM head: dense layer, activation and norm before the output matrix, and an output bias"
    )
    sentence_order_head: bool = network_flag(
        False,
        "pooler over the first token that predicts if the two segments of a sample were swapped",
        spelled=("--bert-no-binary-head",),
    )
