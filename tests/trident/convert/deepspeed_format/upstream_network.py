"""A GPT-2 in plain torch with upstream's parameter names, trained by the real DeepSpeed."""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.nn.functional as F
from deepspeed.checkpoint.ds_to_universal import main as to_universal
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from megatron.config import parse
from megatron.data.build import build_split_datasets
from megatron.data.sources.source import DataRequest
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.trident.convert.foreign.foreign_files import gpt2_arguments

WIDTH, HEADS, LAYERS, POSITIONS, ROWS = 32, 4, 2, 32, 640
STEPS_BEFORE, STEPS_AFTER, BATCH, MICRO_BATCH = 3, 3, 4, 2
RATE = 5e-3


class Attention(nn.Module):
    """Upstream's attention: rows [heads, 3, head width]."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        fused = self.query_key_value(hidden).view(batch, length, HEADS, 3, WIDTH // HEADS)
        query, key, value = (part.transpose(1, 2) for part in fused.unbind(3))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dense(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class FeedForward(nn.Module):
    """Upstream's feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(WIDTH, 4 * WIDTH)
        self.dense_4h_to_h = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(hidden), approximate="tanh"))


class Block(nn.Module):
    """Upstream's block."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.self_attention = Attention()
        self.post_attention_layernorm = nn.LayerNorm(WIDTH)
        self.mlp = FeedForward()

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attention(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Embedding(nn.Module):
    """Upstream's embedding; its weight is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(ROWS, WIDTH)
        self.position_embeddings = nn.Embedding(POSITIONS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.word_embeddings(tokens) + self.position_embeddings.weight[: tokens.shape[1]]

    @property
    def word_embeddings_weight(self) -> Tensor:
        """What the first and the last stage share."""
        return self.word_embeddings.weight


def head(embedding: Embedding, hidden: Tensor) -> Tensor:
    """Logits of the true vocabulary."""
    return F.linear(hidden, embedding.word_embeddings.weight)[..., :600].float()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of all tokens."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


class Decoder(nn.Module):
    """Upstream's `encoder`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.final_layernorm = nn.LayerNorm(WIDTH)


class LanguageModel(nn.Module):
    """Upstream's `language_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.encoder = Decoder()


class Whole(nn.Module):
    """The network without a pipeline, with the names of upstream's."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = LanguageModel()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        decoder, embedding = self.language_model.encoder, self.language_model.embedding
        hidden = embedding(tokens)
        for layer in decoder.layers:
            hidden = layer(hidden)
        return loss_of(head(embedding, decoder.final_layernorm(hidden)), labels)


def same(hidden: Tensor) -> Tensor:
    """Stands for upstream's layers without parameters, which count."""
    return hidden


def pipeline() -> PipelineModule:
    """The network with upstream's numbers of layers: embedding 1, blocks from 3, norm after two more."""
    tied: dict[str, Any] = {"tied_weight_attr": "word_embeddings_weight"}
    layers = [
        same,
        TiedLayerSpec("embed", Embedding, **tied),
        same,
        *(LayerSpec(Block) for _ in range(LAYERS)),
        same,
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embed", Embedding, forward_fn=head, **tied),
    ]
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=1)
    return PipelineModule(layers, topology=topology, loss_fn=loss_of, partition_method="type:Block")


def start(kind: str, stage: int, dtype: str, seed: int, universal: bool = False) -> Any:
    """An engine with seeded random weights."""
    torch.manual_seed(seed)
    module = pipeline() if kind == "pipeline" else Whole()
    matrices = [weight for weight in module.parameters() if weight.dim() > 1]
    vectors = [weight for weight in module.parameters() if weight.dim() == 1]
    with torch.no_grad():
        for weight in matrices:
            weight.mul_(0.5)
        for weight in vectors:
            weight.add_(torch.randn_like(weight), alpha=0.1)
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    settings: dict[str, Any] = {
        "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": MICRO_BATCH, "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage}, "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
    }  # fmt: skip
    if dtype == "bf16":
        settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    return deepspeed.initialize(model=module, optimizer=optimizer, config=settings, dist_init_required=False)[0]


def run_steps(engine: Any, kind: str, samples: np.ndarray, first: int, count: int, rank: int) -> list[float]:
    """Trains, and returns the mean loss of each global batch."""
    losses = []
    for step in range(first, first + count):
        batch = torch.from_numpy(samples[step * BATCH : (step + 1) * BATCH])
        if kind == "pipeline":
            micro = [(part[:, :-1], part[:, 1:]) for part in batch.split(MICRO_BATCH)]
            losses.append(float(engine.train_batch(iter(micro))))
        else:
            part = batch[rank * MICRO_BATCH : (rank + 1) * MICRO_BATCH]
            loss = engine(part[:, :-1], part[:, 1:])
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone().float()
            torch.distributed.all_reduce(mean)
            losses.append(float(mean) / 2)
    return losses


def samples_of(flags: list[str], count: int) -> np.ndarray:
    """The first samples of a run with these flags, in its order."""
    request = parse(flags)
    choice = TokenizerChoice.of(request.data)
    datasets, _ = build_split_datasets(
        DataRequest(request.data, POSITIONS, 1234, (count, 0, 0), tokenizer=build_tokenizer(choice))
    )
    assert datasets.train is not None
    return np.stack([datasets.train[number] for number in range(count)]).astype(np.int64)


def train_with_deepspeed(
    rank: int, folder: str, flags: list[str], cases: list[tuple[str, int, str]]
) -> list[list[float]]:
    """Trains each case, saves it, resumes it in a new engine of DeepSpeed; returns the losses after the resume."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    os.environ["LOCAL_RANK"] = str(rank)
    samples = samples_of(flags, BATCH * 8)
    found = []
    for kind, stage, dtype in cases:
        target = str(Path(folder) / f"{kind}-{stage}-{dtype}")
        engine = start(kind, stage, dtype, seed=5)
        run_steps(engine, kind, samples, 0, STEPS_BEFORE, rank)
        stored = gpt2_arguments(
            num_layers=LAYERS, consumed_train_samples=STEPS_BEFORE * BATCH, bf16=dtype == "bf16", lr=RATE
        )
        state: dict[str, Any] = {"args": copy.copy(vars(stored)), "iteration": STEPS_BEFORE, "checkpoint_version": 3.0}
        state["args"]["position_embedding_type"] = "absolute"
        state["universal_checkpoint_info"] = {
            "universal_checkpoint_version": 0.2,
            "tp_replicated_parameter_patterns": [".*"],
            "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed.*"],
            "original_vocab_size": 600,
        }
        engine.save_checkpoint(target, tag=f"global_step{STEPS_BEFORE}", client_state=state)
        resumed = start(kind, stage, dtype, seed=99)
        resumed.load_checkpoint(target)
        found.append(run_steps(resumed, kind, samples, STEPS_BEFORE, STEPS_AFTER, rank))
        if rank == 0 and (kind, dtype) == ("pipeline", "fp32"):
            make_universal(Path(target))
    return found


def make_universal(folder: Path) -> None:
    """Runs DeepSpeed's own converter."""
    choices = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    source = folder / f"global_step{STEPS_BEFORE}"
    target = folder / "universal" / source.name
    to_universal(
        argparse.Namespace(input_folder=str(source), output_folder=str(target), inject_missing_state=False, **choices)
    )
