"""The behaviour of a tokenizer, in parts, which identifies equal tokenizers in different file formats.

For example, `vocab.json` with `merges.txt` and the equivalent `tokenizer.json` give the same ids. The stored summary of
a part is a line of numbers that still identifies a single changed entry.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.errors import printable
from megatron.tokenizers.tokenizer_files import canonical

VOCABULARY, MERGES, SPECIAL = "vocabulary", "merges", "special tokens"
_ENTRIES: Mapping[str, str] = {VOCABULARY: "token", MERGES: "merge"}  # name of one entry
_BYTES = 256
# Fields without effect on ids, such as offsets of a pre-tokenizer, and fields compared separately.
_WITHOUT_EFFECT = frozenset({"trim_offsets", "vocab", "merges", "unk_id"})

TokenizerParts = Mapping[str, Sequence[str]]


def parts_of(description: Mapping[str, Any], added: tuple[Sequence[int], Sequence[int]]) -> TokenizerParts:
    """Returns the parts of a `tokenizer.json`, each as its entries.

    Matching of special tokens in texts is excluded: Megatron's types treat them as text.

    Args:
        description: complete, as written by the library.
        added: ids before and after every text.
    """
    model = description["model"]
    known = model["vocab"]
    if isinstance(known, list):  # Unigram: texts with scores in the order of their ids
        ids = {text: number for number, (text, _) in enumerate(known)}
        scores = {text: f" {score!r}" for text, score in known}
    else:
        ids, scores = dict(known), {}
    marks = {entry["content"]: entry["id"] for entry in description.get("added_tokens") or ()}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or ()]
    apart = set(marks.values())
    if model.get("type", "BPE") == "BPE":
        made = {merge.replace(" ", "", 1) for merge in merges}
        apart |= {number for text, number in ids.items() if len(text) > 1 and text not in made}
    ids |= marks
    texts = {number: text for text, number in ids.items()}
    cutting = _normal(description.get("pre_tokenizer"))
    options = {name: value for name, value in model.items() if name not in _WITHOUT_EFFECT and value}
    if "ByteLevel" in canonical(cutting) and sum(len(text) == 1 for text in ids) >= _BYTES:
        options.pop("unk_token", None)  # every byte is in the vocabulary
    return {
        "algorithm": [canonical({"type": "BPE", **options})],
        VOCABULARY: [
            texts.get(number, "") + scores.get(texts.get(number, ""), "")
            for number in range(max(texts, default=-1) + 1)
        ],
        MERGES: merges,
        SPECIAL: [str(number) for number in sorted(apart)],
        "normalization": [canonical(_normal(description.get("normalizer")))],
        "pre-tokenization": [canonical(cutting)],
        "ids around a text": [" ".join(map(str, ids)) for ids in added],
    }


def summaries(parts: TokenizerParts) -> dict[str, str]:
    """Returns the stored form of the parts: number of entries, digest, and two sums of checksums of each.

    The sums identify a single differing entry: they are the sums of the checksums c[i] and of i c[i], so their
    differences have the ratio i.
    """
    by_name = {}
    for name, entries in parts.items():
        checks = [zlib.crc32(entry.encode("utf-8", "surrogatepass")) for entry in entries]
        digest = hashlib.sha256("\0".join(entries).encode("utf-8", "surrogatepass")).hexdigest()[:32]
        weighted = sum(index * check for index, check in enumerate(checks))
        by_name[name] = f"{len(entries)} {digest} {sum(checks)} {weighted}"
    return by_name


def differences(before: Mapping[str, str], now: Mapping[str, str], parts: TokenizerParts) -> Iterator[str]:
    """Describes the differences between two tokenizers.

    Args:
        before, now: their `summaries`.
        parts: the entries of the second; empty if only its summaries are known.
    """
    differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    for name in differing:
        if name == SPECIAL and MERGES in differing:
            continue  # a token that no merge makes any more counts as special
        entry = _ENTRIES.get(name)
        numbers = [_numbers(stored.get(name, "")) for stored in (before, now)]
        if entry is None or None in numbers:
            yield f"the {name} differ{'' if name.endswith('s') else 's'}"
            continue
        (count, first, second), (now_count, now_first, now_second) = numbers  # type: ignore[misc]
        change = now_first - first
        index, rest = divmod(now_second - second, change) if change else (-1, 1)
        if count != now_count:
            yield f"it has {now_count} {entry}s, not {count}"
        elif rest or not 0 <= index < count:
            yield f"several {entry}s differ, or their order"
        else:
            text = f" ({printable(parts[name][index], 80)} here)" if index < len(parts.get(name, ())) else ""
            yield f"{entry} {index}{text} differs"


def _numbers(summary: str) -> tuple[int, int, int] | None:
    """Returns count and sums of a summary; None if malformed."""
    fields = summary.split()
    if len(fields) != 4 or not all(fields[index].isdecimal() for index in (0, 2, 3)):
        return None
    return int(fields[0]), int(fields[2]), int(fields[3])


def _normal(stage: Any) -> Any:
    """Returns a normalizer or pre-tokenizer in normal form, without sequences of one and fields that affect no id."""
    if not isinstance(stage, Mapping):
        return stage
    inner = next((stage[name] for name in ("normalizers", "pretokenizers") if name in stage), None)
    if inner is None:
        return {name: value for name, value in stage.items() if name not in _WITHOUT_EFFECT}
    stages = [inner_stage for inner_stage in map(_normal, inner) if inner_stage is not None]
    if len(stages) < 2:
        return stages[0] if stages else None
    return {"type": "Sequence", "stages": stages}
