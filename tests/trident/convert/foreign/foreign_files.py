"""Writes checkpoints as other programs do, with plain torch.save, from tensors in our logical shapes."""

from __future__ import annotations

import argparse
import sys
import types
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config import ModelConfig
from trident.convert.megatron_format.arguments import model_config
from trident.convert.megatron_format.foreign_model import ForeignModel, ForeignPieces
from trident.convert.megatron_format.sharding_rules import tensor_rules

VOCABULARY = 600
ROWS = 640  # of the padded word embedding


class PositionEmbeddingType(Enum):
    """As bigscience defines it."""

    rotary = 1
    absolute = 2
    alibi = 3


PositionEmbeddingType.__module__ = "megatron.enums"


@dataclass
class Foreign:
    """A network and its state, and how a program writes them.

    Args:
        stored: the arguments of the run.
        tensors: our logical tensors by kind and name.
        version: of the order of query, key and value rows.
    """

    config: ModelConfig
    stored: argparse.Namespace
    ranks: int = 1
    stages: int = 1
    version: float = 3.0
    gate_last: bool = False
    core_names: bool = False
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            self.tensors[kind] = {
                name: torch.randn(rule.shape, generator=generator) for name, rule in tensor_rules(self.config).items()
            }

    def local(self, kind: str, name: str, rank: int) -> Tensor:
        """What one tensor-parallel rank stores."""
        value, ranks = self.tensors[kind][name], self.ranks
        last = name.rsplit(".", 2)[-2]
        if last in ("word_embeddings", "output_layer"):
            padded = torch.cat([value, torch.full((ROWS - len(value), value.shape[1]), 0.25)])
            return padded.chunk(ranks)[rank].clone()
        if last == "linear_qkv":
            value = value.chunk(ranks)[rank]
            if self.version < 1:
                value = value.transpose(0, 1)
            elif self.version < 2:
                value = value.transpose(1, 2)
            return value.reshape(-1, *value.shape[3:]).clone()
        if last == "linear_fc1" and self.config.gated_linear_unit:
            gate, up = (half.chunk(ranks)[rank] for half in value)
            return torch.cat([up, gate] if self.gate_last else [gate, up])
        if last == "linear_fc1":
            return value.chunk(ranks)[rank].clone()
        if last in ("linear_proj", "linear_fc2") and value.dim() == 2:
            return value.chunk(ranks, dim=1)[rank].clone()
        return value.clone()

    def block(self, kind: str, layer: int, rank: int) -> dict[str, Tensor]:
        """The tensors of a block by the name inside it."""
        prefix = f"decoder.layers.{layer}."
        names = [name for name in self.tensors[kind] if name.startswith(prefix)]
        return {self._inner(name.removeprefix(prefix)): self.local(kind, name, rank) for name in names}

    def _inner(self, name: str) -> str:
        if self.core_names:
            fused = {
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            }
        else:
            fused = {
                "linear_qkv": "query_key_value",
                "linear_proj": "dense",
                "pre_mlp_layernorm": "post_attention_layernorm",
                "linear_fc1": "dense_h_to_4h",
                "linear_fc2": "dense_4h_to_h",
            }
        for ours, theirs in fused.items():
            name = name.replace(ours, theirs)
        return name

    @property
    def layers_per_stage(self) -> int:
        """Blocks of each pipeline stage."""
        return self.config.num_layers // self.stages


def gpt2_arguments(**changes: Any) -> argparse.Namespace:
    """The arguments of a small bigscience run with learned positions."""
    values = {
        "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 128, "kv_channels": 8,
        "max_position_embeddings": 32, "seq_length": 32, "layernorm_epsilon": 1e-5, "glu_activation": None,
        "position_embedding_type": PositionEmbeddingType.absolute, "bias_gelu_fusion": True, "openai_gelu": False,
        "init_method_std": 0.02, "attention_dropout": 0.0, "hidden_dropout": 0.0, "embed_layernorm": False,
        "apply_residual_connection_post_layernorm": False, "tensor_model_parallel_size": 1,
        "consumed_train_samples": 12, "consumed_train_tokens": 384, "global_batch_size": 4, "micro_batch_size": 2,
        "train_iters": 8, "train_samples": None, "lr": 5e-3, "min_lr": 0.0, "lr_decay_style": "constant",
        "lr_warmup_fraction": None, "lr_warmup_iters": 0, "lr_decay_iters": None, "weight_decay": 0.01,
        "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "clip_grad": 1.0, "seed": 1234, "split": "80,15,5",
        "optimizer": "adam", "fp16": False, "bf16": False, "eod_mask_loss": False, "rampup_batch_size": None,
        "deepspeed": True, "params_dtype": torch.float32, **changes,
    }  # fmt: skip
    return argparse.Namespace(**values)


def foreign(arguments: argparse.Namespace, **how: Any) -> Foreign:
    """A network with random tensors, as its arguments describe it."""
    arguments.tensor_model_parallel_size = how.get("ranks", 1)
    stored = dict(vars(arguments))
    kind = stored.get("position_embedding_type")
    if isinstance(kind, PositionEmbeddingType):
        stored["position_embedding_type"] = kind.name
    return Foreign(model_config(stored, VOCABULARY), arguments, **how)


def save(value: Any, path: Path) -> None:
    """torch.save into a folder that is made; the classes of other programs are there while it pickles."""
    path.parent.mkdir(parents=True, exist_ok=True)
    module = types.ModuleType("megatron.enums")
    module.PositionEmbeddingType = PositionEmbeddingType  # type: ignore[attr-defined]
    sys.modules["megatron.enums"] = module
    try:
        torch.save(value, path)
    finally:
        del sys.modules["megatron.enums"]


def write_torch_layout(folder: Path, foreign: Foreign, *, with_optimizer: bool = True) -> Path:
    """`iter_0000003/mp_rank_XX[_YYY]/model_optim_rng.pt` and the file that points at it."""
    for stage in range(foreign.stages):
        for rank in range(foreign.ranks):
            weights = _stage(foreign, "weight", stage, rank)
            content: dict[str, Any] = {
                "args": foreign.stored,
                "iteration": 3,
                "model": _nested(weights, foreign.core_names),
            }
            if foreign.version:
                content["checkpoint_version"] = foreign.version
            if with_optimizer:
                content["optimizer"] = _adam(foreign, weights, stage, rank)
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if foreign.stages > 1 else "")
            save(content, folder / "iter_0000003" / name / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def _stage(foreign: Foreign, kind: str, stage: int, rank: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    outside = "" if foreign.core_names else "language_model."
    blocks = "decoder" if foreign.core_names else "language_model.encoder"
    names = foreign.tensors[kind]
    if stage == 0:
        for name in ("word_embeddings", "position_embeddings"):
            if f"embedding.{name}.weight" in names:
                found[f"{outside}embedding.{name}.weight"] = foreign.local(kind, f"embedding.{name}.weight", rank)
        for last in ("weight", "bias") if foreign.config.embed_layernorm else ():
            found[f"{outside}embedding.word_embeddings.norm.{last}"] = foreign.local(
                kind, f"embedding.word_embeddings_layernorm.{last}", rank
            )
    for place in range(foreign.layers_per_stage):
        layer = stage * foreign.layers_per_stage + place
        for name, value in foreign.block(kind, layer, rank).items():
            found[f"{blocks}.layers.{place}.{name}"] = value
    if stage == foreign.stages - 1:
        for last in ("weight", "bias"):
            if f"decoder.final_layernorm.{last}" in names:
                found[f"{blocks}.final_layernorm.{last}"] = foreign.local(kind, f"decoder.final_layernorm.{last}", rank)
        if "output_layer.weight" in names:
            found[f"{outside}output_layer.weight"] = foreign.local(kind, "output_layer.weight", rank)
        elif foreign.stages > 1:
            found["word_embeddings_for_head.weight"] = foreign.local(kind, "embedding.word_embeddings.weight", rank)
    return found


def _nested(weights: Mapping[str, Tensor], flat: bool) -> dict[str, Any]:
    """The tree of bigscience's state dicts: down to the name in front of `layers` or `weight`."""
    if flat:
        return OrderedDict({**weights, "decoder.layers.0.self_attention._extra_state": None})
    tree: dict[str, Any] = {}
    for name, value in weights.items():
        parts = name.split(".")
        depth = 2 if parts[1] == "encoder" else len(parts) - 1
        place = tree
        for part in parts[:depth]:
            place = place.setdefault(part, OrderedDict())
        place[".".join(parts[depth:])] = value
    return tree


def _adam(foreign: Foreign, weights: Mapping[str, Tensor], stage: int, rank: int) -> dict[str, Any]:
    moments = {kind: _stage(foreign, kind, stage, rank) for kind in ("exp_avg", "exp_avg_sq")}
    matrices = [name for name, value in weights.items() if value.dim() > 1]
    vectors = [name for name, value in weights.items() if value.dim() == 1]
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    for names, decay in ((matrices, 0.01), (vectors, 0.0)):
        groups.append({"params": list(range(len(state), len(state) + len(names))), "weight_decay": decay, "step": 3})
        for name in names:
            state[len(state)] = {kind: moments[kind][name] for kind in moments}
    return {"state": state, "param_groups": groups}


def write_pipeline(folder: Path, foreign: Foreign, *, bigscience: bool = True) -> Path:
    """`global_step3/layer_XX-model_YY-model_states.pt` and the rank files, without optimizer states."""
    target = folder / "global_step3"
    count = foreign.config.num_layers
    first = 3 if bigscience else 2
    norm = count + (4 if bigscience else 2)
    for rank in range(foreign.ranks):
        stage = _stage(foreign, "weight", 0, rank)
        prefix = "language_model.embedding."
        layers = {1: {name.removeprefix(prefix): value for name, value in stage.items() if name.startswith(prefix)}}
        layers |= {first + layer: foreign.block("weight", layer, rank) for layer in range(count)}
        layers[norm] = {
            last: foreign.local("weight", f"decoder.final_layernorm.{last}", rank) for last in ("weight", "bias")
        }
        for number, tensors in layers.items():
            save(OrderedDict(tensors), target / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    for rank in range(foreign.ranks * foreign.stages):
        content: dict[str, Any] = {
            "module": None,
            "args": foreign.stored,
            "iteration": 3,
            "global_steps": 3,
            "param_shapes": [],
        }
        save(content, target / f"mp_rank_{rank:02d}_model_states.pt")
    (folder / "latest").write_text("global_step3")
    return folder


def write_universal(folder: Path, foreign: Foreign, *, first_version: bool) -> Path:
    """`global_step3_universal/zero/NAME/fp32.pt` and so on; the first version joins all ranks along the rows."""
    target = folder / "global_step3_universal"
    names = _universal_names(foreign)
    for kind, file in (("weight", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        for ours, theirs in names.items():
            parts = [foreign.local(kind, ours, rank) for rank in range(foreign.ranks)]
            is_row = parts[0].dim() == 2 and ours.endswith(("linear_proj.weight", "linear_fc2.weight"))
            gated = "linear_fc1" in ours and foreign.config.gated_linear_unit
            is_split = is_row or any(
                word in ours for word in ("linear_qkv", "linear_fc1", "word_embeddings.", "output_layer")
            )
            content: dict[str, Any] = {}
            if "position_embeddings" in ours and first_version:
                content["param"] = torch.cat(parts)
            elif not is_split:
                content["param"] = parts[0]
            elif gated and not first_version:
                halves = [part.chunk(2) for part in parts]
                content["param"] = torch.cat([torch.cat([half[place] for half in halves]) for place in (0, 1)])
                content["param_n_sub_params"] = 2
            else:
                content["param"] = torch.cat(parts, dim=1 if is_row else 0)
            if not first_version and is_split:
                content["cat_dim"] = 1 if is_row else 0
            save(content, target / "zero" / theirs / f"{file}.pt")
            if not first_version:
                save(3, target / "zero" / theirs / "step.pt")
    save({"args": foreign.stored, "iteration": 3, "module": None}, target / "mp_rank_00_model_states.pt")
    (folder / "latest_universal").write_text(target.name)
    return folder


def _universal_names(foreign: Foreign) -> dict[str, str]:
    """Our names and those of bigscience's pipeline."""
    found = {}
    for name in foreign.tensors["weight"]:
        if name.startswith("decoder.layers."):
            layer, inner = name.removeprefix("decoder.layers.").split(".", 1)
            found[name] = f"{int(layer) + 3}.{foreign._inner(inner)}"
        elif name.startswith("decoder.final_layernorm."):
            found[name] = f"{foreign.config.num_layers + 4}.{name.rsplit('.', 1)[1]}"
        else:
            inner = name.removeprefix("embedding.").replace("word_embeddings_layernorm", "word_embeddings.norm")
            found[name] = f"tied_modules.embed.{inner}"
    return found


def check_equal(opened: ForeignModel, written: Foreign, *, moments: bool) -> None:
    """Compares every tensor."""
    opened.check()
    assert opened.has_moments is moments
    pieces = ForeignPieces(opened)
    for kind in ("weight", "exp_avg", "exp_avg_sq") if moments else ("weight",):
        for name, rule in tensor_rules(written.config).items():
            assert torch.equal(pieces.tensor(rule, kind), written.tensors[kind][name]), (name, kind)  # type: ignore[arg-type]
