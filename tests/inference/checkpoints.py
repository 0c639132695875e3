"""A checkpoint of an untrained network, made on the spot: its text is noise, but the same noise everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoint import save
from megatron.config import Machine, RunConfig, TokenizerFacts, parse, resolve
from megatron.model.interface.step_state import states_of
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pieces import filling_weights
from megatron.tokenizers.record import TokenizerRecord
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.checkpoint.made.records import make_record
from tests.helpers.networks import build_gpt
from tests.helpers.vocabulary import write_vocabulary
from tests.tokenizers.chat.tokenizers_with_tokens import gpt2_with

POSITIONS = 48


def make_checkpoint(
    folder: Path,
    *extra_flags: str,
    more_tokens: Sequence[str] = (),
    positions: int = POSITIONS,
    choice: TokenizerChoice | None = None,
    mean_ratio: float | None = None,
) -> Path:
    """Writes a vocabulary and a checkpoint of step 3 under a folder; returns the folder of checkpoints.

    Args:
        more_tokens: of the vocabulary, such as those of a chat template.
        choice: another tokenizer, which is there.
        mean_ratio: what the means of weights in it are, times the weights; None for a checkpoint without them.
    """
    if choice is None:
        choice = write_vocabulary(folder)
        gpt2_with(folder, more_tokens)
    named = [("--tokenizer-type", choice.tokenizer_type), ("--vocab-file", choice.vocab_file)]
    named += [("--merge-file", choice.merge_file), ("--tokenizer-name-or-path", choice.tokenizer_name_or_path)]
    flags = [
        *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"),
        *("--max-position-embeddings", str(positions), "--micro-batch-size", "1", "--global-batch-size", "1"),
        *("--train-iters", "3", "--lr", "0.001", "--data-path", "nowhere", "--init-method-std", "0.4"),
        *(word for flag, value in named if value is not None for word in (flag, value)),
        *extra_flags,
    ]
    tokenizer = build_tokenizer(choice)
    facts = TokenizerFacts(tokenizer.vocab_size, tokenizer.eod_id, tokenizer.fingerprint)
    config: RunConfig = resolve(parse(flags), Machine("cpu", 1, False, True), facts)
    mesh = ParallelMesh.single()
    model = build_gpt(config.model, mesh)
    weights = dict(model.named_parameters())
    states = {state.global_name: state for state in states_of(model)}  # type: ignore[attr-defined]
    pieces = [(key, states[key.name]) for key, _ in filling_weights(states.values())]
    for key, _ in filling_weights(model.parameters()):
        pieces.append((key, weights[key.name].detach().view(-1)[: key.numel]))
        if mean_ratio is not None:
            pieces.append((key.of_kind("average"), pieces[-1][1] * mean_ratio))
    made_with = TokenizerRecord(tokenizer.name, tokenizer.fingerprint, tokenizer.vocab_size)
    record = make_record(3, config=config.to_json(), tokenizer=made_with).to_json()
    checkpoints = folder / "checkpoints"
    save(checkpoints, 3, pieces, record, mesh)
    return checkpoints
