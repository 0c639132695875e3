"""GPT: the list of layers that every engine builds from, the same layers as one module, and the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.config import ModelConfig
from megatron.errors import ConfigError
from megatron.model.attention import KeyValueCache
from megatron.model.embedding import FinalLayerNorm, PositionEmbedding, WordEmbedding, word_logits
from megatron.model.transformer import TransformerBlock
from megatron.parallel.collectives import gather_from
from megatron.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.parallel.mesh import Axis, ParallelMesh
from megatron.parallel.rng import normal_

WORD_EMBEDDINGS = "embedding.word_embeddings"
POSITION_EMBEDDINGS = "embedding.position_embeddings"
BLOCK_PREFIX = "decoder.layers."
FINAL_LAYERNORM = "decoder.final_layernorm"
OUTPUT_LAYER = "output_layer"
# The weights that write into the residual stream; there are two a block, so their sum keeps its size.
_RESIDUAL_PROJECTIONS = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")


@dataclass(frozen=True)
class LayerSpec:
    """A layer that is built only by the rank that owns it.

    Args:
        name: global name; a parameter's is this, a dot, and its name inside the module.
        build: makes the module with its initial values.
        tied_to: the layer whose weight this one uses; applied with `word_logits`.
    """

    name: str
    build: Callable[[], nn.Module]
    tied_to: str | None = None


def gpt_layers(
    config: ModelConfig,
    mesh: ParallelMesh,
    *,
    seed: int = 1234,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    recompute_blocks: bool = False,
    recompute_attention: bool = False,
) -> list[LayerSpec]:
    """The network as a list: word table, positions, blocks, final norm, tied head.

    The first layer takes `(tokens [b, s], sample_ids [b][, segment_ids [b, s]])`, each maps one tuple to the next, and
    the head returns `logits [b, s, v/t]`.

    Args:
        seed: of initial weights and dropout.
        reset_position_ids: number positions from 0 in every segment.
        reset_attention_mask: let tokens see only their own segment.
        recompute_blocks: run each block again in the backward pass.
        recompute_attention: run the core of attention again in the backward pass.
    """
    makers: dict[str, Callable[[], nn.Module]] = {
        WORD_EMBEDDINGS: partial(WordEmbedding, config, mesh),
        POSITION_EMBEDDINGS: partial(PositionEmbedding, config, mesh, seed=seed, restart=reset_position_ids),
    }
    for index in range(config.num_layers):
        makers[f"{BLOCK_PREFIX}{index}"] = partial(
            TransformerBlock,
            config,
            mesh,
            index,
            seed=seed,
            separate_segments=reset_attention_mask,
            recompute=recompute_blocks,
            recompute_attention=recompute_attention,
        )
    makers[FINAL_LAYERNORM] = partial(FinalLayerNorm, config, mesh)
    specs = [LayerSpec(name, partial(_built, maker, name, config, seed)) for name, maker in makers.items()]
    head = partial(
        _built, makers[WORD_EMBEDDINGS], WORD_EMBEDDINGS, config, seed
    )  # the same values as the first stage draws
    return [*specs, LayerSpec(OUTPUT_LAYER, head, tied_to=WORD_EMBEDDINGS)]


class DenseGPT(nn.Module):
    """All layers in one module, for one pipeline stage; `named_parameters` gives the global names."""

    def __init__(self, specs: Sequence[LayerSpec]) -> None:
        super().__init__()
        self._names = [spec.name for spec in specs if spec.tied_to is None]
        for spec in specs:
            if spec.tied_to is None:
                _attach(self, spec.name, spec.build())

    def forward(
        self,
        tokens: torch.Tensor,
        sample_ids: torch.Tensor,
        segment_ids: torch.Tensor | None = None,
        caches: Sequence[KeyValueCache] | None = None,
    ) -> torch.Tensor:
        """Scores every word of the padded vocabulary as the next one.

        Shapes: tokens `[b, s]` int64, sample_ids `[b]`, segment_ids `[b, s]`; result `[b, s, v/t]`.

        Args:
            caches: one a block (see `new_caches`); tokens then follow those already in them.
        """
        inputs = (tokens, sample_ids) if segment_ids is None else (tokens, sample_ids, segment_ids)
        offset = caches[0].length if caches else 0
        blocks = 0
        for name in self._names:
            layer = self.get_submodule(name)
            if isinstance(layer, TransformerBlock):
                inputs = layer(inputs, None if caches is None else caches[blocks])
                blocks += 1
            else:
                inputs = layer(inputs, offset) if isinstance(layer, PositionEmbedding) else layer(inputs)
        return word_logits(self.word_embeddings, inputs[0])

    @property
    def word_embeddings(self) -> WordEmbedding:
        """The word table, which is the head too."""
        module = self.get_submodule(WORD_EMBEDDINGS)
        if not isinstance(module, WordEmbedding):
            raise ConfigError(
                f"{WORD_EMBEDDINGS} is a {type(module).__name__}, not the word table that the head needs."
            )
        return module

    def new_caches(self, capacity: int) -> list[KeyValueCache]:
        """Empty caches for generating sequences of up to `capacity` tokens."""
        return [KeyValueCache(capacity) for name in self._names if name.startswith(BLOCK_PREFIX)]


def build_dense(config: ModelConfig, mesh: ParallelMesh, **settings: Any) -> DenseGPT:
    """Builds the whole network (or its tensor-parallel part) as one module.

    Args:
        settings: keyword arguments of `gpt_layers`.

    Raises:
        ConfigError: the mesh has several pipeline stages.
    """
    if mesh.pp.size > 1:
        raise ConfigError(
            f"One module cannot be spread over {mesh.pp.size} stages "
            f"(--pipeline-model-parallel-size {mesh.pp.size}). Use 1."
        )
    return DenseGPT(gpt_layers(config, mesh, **settings))


def language_model_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    loss_weights: torch.Tensor,
    axis: Axis,
    vocab_size: int,
    *,
    observe: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """The weighted sum of the tokens' losses, float32; the caller divides by the tokens of the global batch.

    Shapes: logits `[b, s, v/t]`, labels and loss_weights `[b, s]`; result `[]`.

    Args:
        observe: is shown the weighted losses of the tokens `[b, s]`, outside the graph.
    """
    losses = vocab_parallel_cross_entropy(logits, labels, axis, vocab_size) * loss_weights  # [b, s]
    if observe is not None:
        observe(losses.detach())
    return losses.sum()


def whole_logits(logits: torch.Tensor, axis: Axis, vocab_size: int) -> torch.Tensor:
    """Joins the ranks' scores and drops the padding.

    Shapes: `[..., v/t]` to `[..., vocab_size]`.
    """
    return gather_from(logits, axis)[..., :vocab_size]


def initial_std(config: ModelConfig, parameter_name: str) -> float:
    """Standard deviation of a weight's initial values.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019, section 2.3 (residual layers
    scaled by 1/sqrt(N)), with N = 2 * num_layers as in Megatron-LM `scaled_init_method_normal`.
    """
    if parameter_name.endswith(_RESIDUAL_PROJECTIONS):
        return config.init_method_std / math.sqrt(2 * config.num_layers)
    return config.init_method_std


def _built(make: Callable[[], nn.Module], name: str, config: ModelConfig, seed: int) -> nn.Module:
    """Makes a layer and draws its matrices; norms start at weight 1, all biases at 0.

    Every parameter learns its global name (`parameter.global_name`).
    """
    module = make()
    for inner, parameter in module.named_parameters():
        full_name = f"{name}.{inner}"
        parameter.global_name = full_name  # type: ignore[attr-defined]
        if parameter.dim() > 1:
            normal_(parameter, seed, full_name, initial_std(config, full_name))
    return module


def _attach(root: nn.Module, dotted_name: str, module: nn.Module) -> None:
    """Puts a module at a dotted name, making plain containers on the way."""
    *path, last = dotted_name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(last, module)
