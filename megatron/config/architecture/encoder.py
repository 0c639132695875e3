"""Encoders: attention in both directions, token types, and the heads of masked language models."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import network_flag
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class EncoderFields(ConfigSection):
    """What BERT and RoBERTa have and GPT does not.

    Source: Devlin et al., "BERT", 2019, section 3 and appendix A; NVIDIA Megatron-LM
    `megatron/core/models/bert/bert_model.py` and `pretrain_bert.py` (token types only with the sentence-order head).
    """

    bidirectional: bool = network_flag(
        False, "every token attends to all tokens of its segment, later ones included (BERT)"
    )
    token_types: int = network_flag(
        help="rows of the token-type embedding (BERT 2, RoBERTa 1); 2 if unset with --sentence-order-head, else none",
        computed=lambda model: 2 if model.sentence_order_head else 0,
        at_least=0,
        at_most=2**16,
        follows=("sentence_order_head",),
        spelled=("--num-token-types",),
    )
    masked_lm_head: bool = network_flag(
        False, "a dense layer, an activation and a norm before the output matrix, and a bias for every vocabulary entry"
    )
    sentence_order_head: bool = network_flag(
        False,
        "a pooler over the first token that tells whether the two segments of a sample were swapped",
        spelled=("--bert-no-binary-head",),
    )
