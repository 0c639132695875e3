"""Special tokens of masked language models, by what vocabularies write them as.

BERT's vocabularies name their own; RoBERTa's begin and end a sample with the tokens that begin and end a text.
"""

from __future__ import annotations

import types
from collections.abc import Mapping

CLS = "cls"
SEP = "sep"
MASK = "mask"
PAD = "pad"

_WRITTEN: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        CLS: ("[CLS]", "<CLS>", "<cls>", "<s>"),
        SEP: ("[SEP]", "<SEP>", "<sep>", "</s>"),
        MASK: ("[MASK]", "<MASK>", "<mask>"),
        PAD: ("[PAD]", "<PAD>", "<pad>"),
    }
)
ROLES = tuple(_WRITTEN)


def role_ids(special_ids: Mapping[str, int]) -> dict[str, int]:
    """The id of each role that one of the special tokens is known for."""
    ids = {}
    for role, texts in _WRITTEN.items():
        known = [special_ids[text] for text in texts if text in special_ids]
        if known:
            ids[role] = known[0]
    return ids
