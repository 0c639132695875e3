"""Writes checkpoints with megatron-core, on CPUs: `python core_writer.py CASES`, where `megatron` is megatron-core.

CASES is JSON: a list of objects with folder, form (torch or torch_dist), tensor, pipeline, arguments. Beside each
checkpoint lies `logits.pt`: the tokens, and the logits that megatron-core computed in that layout. This file is run by
another interpreter path than the tests and must not import this project.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F

ROWS, LENGTH, WIDTH = 640, 16, 32


def settings_of(arguments: dict[str, Any], tensor: int, pipeline: int) -> dict[str, Any]:
    """What Megatron-LM's `core_transformer_config_from_args` makes of arguments."""
    found: dict[str, Any] = {
        "num_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 4, "use_cpu_initialization": True,
        "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline, "pipeline_dtype": torch.float32,
        "gradient_accumulation_fusion": False, "persist_layer_norm": False, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "masked_softmax_fusion": False, "add_bias_linear": arguments["add_bias_linear"],
    }  # fmt: skip
    found |= {name: arguments[name] for name in ("attention_output_gate", "num_query_groups") if name in arguments}
    if arguments.get("quick_geglu"):
        from megatron.core.activations import quick_gelu

        bounds = {name: arguments[name] for name in ("glu_linear_offset", "activation_func_clamp_value")}
        return {**found, "activation_func": quick_gelu, "gated_linear_unit": True, "ffn_hidden_size": 128, **bounds}
    if arguments["swiglu"]:
        return {**found, "activation_func": F.silu, "gated_linear_unit": True, "ffn_hidden_size": 64}
    return {**found, "bias_activation_fusion": arguments["bias_gelu_fusion"]}


def build(arguments: dict[str, Any], tensor: int, pipeline: int) -> Any:
    """This rank's part of the network, with random vectors where megatron-core has zeros and ones."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer import TransformerConfig

    tracker = type(get_cuda_rng_tracker())
    tracker.fork = lambda *words, **more: contextlib.nullcontext()  # dropout is off, and there is no CUDA generator
    is_rotary = arguments["position_embedding_type"] == "rope"
    model = GPTModel(
        TransformerConfig(**settings_of(arguments, tensor, pipeline)), get_gpt_layer_local_spec(), ROWS, LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False, share_embeddings_and_output_weights=not arguments["untie_embeddings_and_output_weights"],
        position_embedding_type="rope" if is_rotary else "learned_absolute",
    )  # fmt: skip
    for name, value in model.named_parameters():
        # what tensor-parallel ranks share is alike, and what they split may be anything
        is_split, stage = (
            getattr(value, "tensor_model_parallel", False),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        rank = parallel_state.get_tensor_model_parallel_rank() if is_split else 0
        drawn = torch.Generator().manual_seed(sum(name.encode()) + 1000 * rank + 10000 * stage)
        spread = torch.randn(value.shape, generator=drawn)
        is_tied_copy = name.startswith("output_layer") and not arguments["untie_embeddings_and_output_weights"]
        if is_tied_copy or name.startswith("embedding.word_embeddings"):
            drawn = torch.Generator().manual_seed(rank)
            spread = torch.randn(value.shape, generator=drawn)
        with torch.no_grad():
            value.copy_(spread * 0.15 + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
    return model.eval()


@torch.no_grad()
def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor | None:
    """The logits, on the last stage."""
    from megatron.core import parallel_state

    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.triu(torch.ones(1, 1, tokens.shape[1], tokens.shape[1]), 1).bool()
    if not parallel_state.is_pipeline_first_stage():
        received = torch.empty(tokens.shape[1], tokens.shape[0], WIDTH)
        dist.recv(received, 0)
        model.set_input_tensor(received)
    made = model(tokens, positions, mask)
    if parallel_state.is_pipeline_last_stage():
        return made
    dist.send(made.contiguous(), 1)
    return None


def write(case: dict[str, Any]) -> None:
    """Writes one checkpoint and the logits."""
    from megatron.core import dist_checkpointing, parallel_state

    tensor, pipeline, folder = case["tensor"], case["pipeline"], Path(case["folder"])
    parallel_state.initialize_model_parallel(tensor, pipeline)
    model = build(case["arguments"], tensor, pipeline)
    tokens = torch.randint(0, 600, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    logits = logits_of(model, tokens)
    place = folder / "checkpoint" / "iter_0000003"
    inner = 64 if case["arguments"]["swiglu"] else 128
    stored = argparse.Namespace(
        **case["arguments"], num_layers=2, hidden_size=WIDTH, ffn_hidden_size=inner,
        num_attention_heads=4, max_position_embeddings=LENGTH, seq_length=LENGTH, transformer_impl="local",
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, norm_epsilon=1e-5,
        rotary_percent=1.0, rotary_base=10000, hidden_dropout=0.0, attention_dropout=0.0, padded_vocab_size=ROWS,
    )  # fmt: skip
    state: dict[str, Any] = {"args": stored, "checkpoint_version": 3.0, "iteration": 3}
    if case["form"] == "torch_dist":
        place.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save({**state, "model": model.sharded_state_dict()}, str(place))
    else:
        rank, stage = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        own = place / (f"mp_rank_{rank:02d}" if pipeline == 1 else f"mp_rank_{rank:02d}_{stage:03d}")
        own.mkdir(parents=True)
        torch.save({**state, "model": model.state_dict_for_save_checkpoint()}, own / "model_optim_rng.pt")
    if logits is not None and parallel_state.get_tensor_model_parallel_rank() == 0:
        torch.save({"tokens": tokens, "logits": logits[..., :600].clone()}, folder / "logits.pt")
        (folder / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("3")
    dist.barrier()
    parallel_state.destroy_model_parallel()


def work(rank: int, world_size: int, meeting: str, cases: list[dict[str, Any]]) -> None:
    """What one process does."""
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda value, *words, **more: value  # type: ignore[method-assign,assignment]
    torch.cuda.synchronize = lambda *words: None  # type: ignore[assignment]
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world_size)
    for case in cases:
        write(case)
    dist.destroy_process_group()


def main() -> None:
    """Writes all cases, those of one number of processes together."""
    import megatron.core  # before torch.cuda is touched, and once for all processes

    cases = json.loads(sys.argv[1])
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    context = multiprocessing.get_context("fork")
    for world_size in (1, 2):
        chosen = [case for case in cases if case["tensor"] * case["pipeline"] == world_size]
        with tempfile.TemporaryDirectory() as folder:
            words = (world_size, f"{folder}/meeting", chosen)
            ranks = [context.Process(target=work, args=(rank, *words)) for rank in range(world_size if chosen else 0)]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
            if any(rank.exitcode for rank in ranks):
                raise SystemExit(f"{megatron.core.__version__}: {[rank.exitcode for rank in ranks]}")


if __name__ == "__main__":
    main()
