"""Checkpoints of ours with random tensors and moments, of networks that other programs know."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from megatron.checkpoint import read_tensors
from megatron.checkpoint.recovery import OpenCheckpoint
from megatron.config import Machine, RunConfig, TokenizerFacts, parse, resolve
from megatron.parallel.pieces import Kind
from megatron.tokenizers.record import TokenizerRecord
from megatron.tokenizers.tokenizer import build_tokenizer
from tests.checkpoint.made.stored import save_checkpoint
from tests.helpers.vocabulary import write_vocabulary
from trident.convert.foreign import open_foreign
from trident.convert.megatron_format.foreign_model import ForeignPieces
from trident.convert.megatron_format.sharding_rules import tensor_rules
from trident.convert.megatron_format.torch_files import ImportOptions
from trident.convert.megatron_output.output_tensors import OutputRequest

GPT2 = "--num-layers 2 --hidden-size 32 --num-attention-heads 4"
LLAMA = (
    f"{GPT2} --num-query-groups 2 --swiglu --ffn-hidden-size 48 --normalization RMSNorm --no-add-bias-linear "
    "--position-embedding-type rope --rotary-base 500000 --untie-embeddings-and-output-weights --qk-layernorm"
)
BLOOM = f"{GPT2} --position-embedding-type alibi --embed-layernorm"
ROTARY = f"{GPT2} --num-query-groups 2 --normalization RMSNorm --position-embedding-type rope --rotary-percent 0.5"
VOCABULARY = 600


@dataclasses.dataclass(frozen=True)
class Written:
    """A checkpoint of ours, its configuration, and the flags of its tokenizer."""

    checkpoint: OpenCheckpoint
    config: RunConfig
    tokenizer: list[str]

    def request(self, target: Path, naming: str, ranks: int = 1, stages: int = 1) -> OutputRequest:
        """A request to write it."""
        layout = dataclasses.replace(self.config.parallel, tensor_model_parallel_size=ranks)
        rows = layout.padded_vocab_size(VOCABULARY)
        model = dataclasses.replace(self.config.model, padded_vocab_size=rows)
        return OutputRequest(self.checkpoint, target, model, self.config.flat(), naming, ranks, stages)


def check_comes_back(written: Written, folder: Path, *, moments: bool) -> None:
    """Opens what was written and compares the network, every tensor, and with moments the progress."""
    opened = open_foreign(folder, ImportOptions(VOCABULARY, rotary_is_sound=True))
    opened.check()
    assert opened.has_moments is moments
    expected = dataclasses.replace(written.config.model, padded_vocab_size=opened.model.padded_vocab_size)
    assert {name for name in vars(expected) if getattr(expected, name) != getattr(opened.model, name)} == set()
    pieces = ForeignPieces(opened)
    kinds: tuple[Kind, ...] = ("weight", "exp_avg", "exp_avg_sq") if moments else ("weight",)
    for kind in kinds:
        for name, tensor in read_tensors(written.checkpoint.folder, kind=kind):
            rule = tensor_rules(expected)[name]
            assert torch.equal(pieces.tensor(rule, kind), tensor), (name, kind)
    if moments:
        assert (opened.state.progress, opened.state.updates) == (written.checkpoint.record.progress, 4)


def write_network(folder: Path, flags: str, *, moments: bool = True, step: int = 4) -> Written:
    """Saves the checkpoint of a run that trained a number of steps of 8 samples of 10 tokens."""
    choice = write_vocabulary(folder, VOCABULARY)
    tokenizer = build_tokenizer(choice)
    files = ["--vocab-file", str(choice.vocab_file), "--merge-file", str(choice.merge_file)]
    words = [
        *flags.split(),
        *("--seq-length", "16", "--max-position-embeddings", "16", "--micro-batch-size", "2", "--data-path", "none"),
        *("--global-batch-size", "8", "--train-iters", "20", "--lr", "0.001", "--adam-beta2", "0.95", *files),
        *(() if moments else ("--no-save-optim",)),
    ]
    facts = TokenizerFacts(tokenizer.vocab_size, tokenizer.eod_id, tokenizer.fingerprint)
    config = resolve(parse(words), Machine("cpu", 1, False, True), facts)
    generator = torch.Generator().manual_seed(1)
    weight: Kind = "master" if config.precision.bf16 else "weight"
    kinds: tuple[Kind, ...] = (weight, "exp_avg", "exp_avg_sq") if moments else (weight,)
    state = {
        (name, kind): torch.randn(rule.shape, generator=generator)
        for name, rule in tensor_rules(config.model).items()
        for kind in kinds
    }
    record = {"config": config.to_json(), "loss_scale": {}, "tokenizer": TokenizerRecord.of(tokenizer)}
    checkpoint = save_checkpoint(folder / "checkpoints", state, step, chunk_bytes=2**20, **record)
    return Written(checkpoint, config, ["--tokenizer-type", "GPT2BPETokenizer", *files])
