"""What a tokenizer does to a text, in parts: by them two forms of one tokenizer are the same, whatever their files are.

`vocab.json` with `merges.txt` and the `tokenizer.json` of the same differ in their files and give the same ids. What is
stored of a part is a line of numbers, from which a single changed entry can still be named.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.errors import printable
from megatron.tokenizers.tokenizer_files import canonical

VOCABULARY, MERGES, SPECIAL = "vocabulary", "merges", "special tokens"
_ENTRIES: Mapping[str, str] = {VOCABULARY: "token", MERGES: "merge"}  # what one entry of a part is called
_BYTES = 256
# Fields that change no id: of a pre-tokenizer the offsets, of a model what is only drawn in its own training.
_WITHOUT_EFFECT = frozenset({"trim_offsets", "vocab", "merges", "unk_id"})

TokenizerParts = Mapping[str, Sequence[str]]


def parts_of(description: Mapping[str, Any], added: tuple[Sequence[int], Sequence[int]]) -> TokenizerParts:
    """The parts of a `tokenizer.json`, each as its entries.

    How it finds its special tokens inside of a text is not among them: the types of Megatron take them for text.

    Args:
        description: as the library writes it, with nothing left out.
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
    """What is stored of the parts: of each the number of its entries, a digest, and two sums of checksums.

    The sums tell which entry it is if only one differs: with the checksums c of n entries they are the sums of c[i] and
    of i c[i], so their differences have the ratio i.
    """
    by_name = {}
    for name, entries in parts.items():
        checks = [zlib.crc32(entry.encode("utf-8", "surrogatepass")) for entry in entries]
        digest = hashlib.sha256("\0".join(entries).encode("utf-8", "surrogatepass")).hexdigest()[:32]
        by_name[name] = f"{len(entries)} {digest} {sum(checks)} {sum(place * one for place, one in enumerate(checks))}"
    return by_name


def differences(then: Mapping[str, str], now: Mapping[str, str], parts: TokenizerParts) -> Iterator[str]:
    """In words, what two tokenizers do differently.

    Args:
        then, now: what `summaries` gave of them.
        parts: the entries of the second; empty where only its summaries are known.
    """
    differing = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    for name in differing:
        if name == SPECIAL and MERGES in differing:
            continue  # a token that no merge makes any more counts as special
        entry = _ENTRIES.get(name)
        numbers = [_numbers(stored.get(name, "")) for stored in (then, now)]
        if entry is None or None in numbers:
            yield f"the {name} differ{'' if name.endswith('s') else 's'}"
            continue
        (count, first, second), (now_count, now_first, now_second) = numbers  # type: ignore[misc]
        change = now_first - first
        place, rest = divmod(now_second - second, change) if change else (-1, 1)
        if count != now_count:
            yield f"there are {now_count} {entry}s, not {count}"
        elif rest or not 0 <= place < count:
            yield f"several {entry}s differ, or their order"
        else:
            written = f" ({printable(parts[name][place], 80)} here)" if place < len(parts.get(name, ())) else ""
            yield f"{entry} {place}{written} is another"


def _numbers(summary: str) -> tuple[int, int, int] | None:
    """Count and sums of a summary; None where it is none."""
    words = summary.split()
    if len(words) != 4 or not all(words[place].isdecimal() for place in (0, 2, 3)):
        return None
    return int(words[0]), int(words[2]), int(words[3])


def _normal(stage: Any) -> Any:
    """A normalizer or pre-tokenizer without what has no effect: sequences of one, and fields that change no id."""
    if not isinstance(stage, Mapping):
        return stage
    inner = next((stage[name] for name in ("normalizers", "pretokenizers") if name in stage), None)
    if inner is None:
        return {name: value for name, value in stage.items() if name not in _WITHOUT_EFFECT}
    stages = [inner_stage for inner_stage in map(_normal, inner) if inner_stage is not None]
    if len(stages) < 2:
        return stages[0] if stages else None
    return {"type": "Sequence", "stages": stages}
