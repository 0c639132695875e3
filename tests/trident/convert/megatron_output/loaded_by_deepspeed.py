"""Loads universal checkpoints into engines of the real DeepSpeed, and trains on."""

from __future__ import annotations

import os
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from tests.trident.convert.deepspeed_format.upstream_network import BATCH, run_steps, samples_of, start

STEPS = 3

Case = tuple[str, int, str]


def load_with_deepspeed(
    rank: int, folder: str, flags: list[str], cases: list[Case], sources: dict[tuple[int, str], str]
) -> list[list[float]]:
    """Loads what was exported for each case, writes down what the engine then holds, and returns the next losses.

    Args:
        sources: the exported folder for each ZeRO stage and kind of network.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    os.environ["LOCAL_RANK"] = str(rank)
    samples = samples_of(flags, BATCH * 8)
    losses = []
    for kind, stage, dtype in cases:
        engine = start(kind, stage, dtype, seed=99, universal=True)
        _, client_state = engine.load_checkpoint(sources[stage, kind])
        held = {}
        for name, parameter in engine.module.named_parameters():
            moments = [safe_get_full_optimizer_state(parameter, moment) for moment in ("exp_avg", "exp_avg_sq")]
            tensors = [safe_get_full_fp32_param(parameter), *moments]
            held[name] = [tensor.detach().clone().view(parameter_shape(parameter)) for tensor in tensors]
        steps = {float(state["step"]) for state in engine.optimizer.optimizer.state.values() if "step" in state}
        counters = (engine.global_steps, engine.global_samples, client_state["iteration"], sorted(steps))
        torch.save((held, counters), Path(folder) / f"{kind}-{stage}-{dtype}-{rank}.pt")
        if stage == 3:  # its loader keeps the number of DeepSpeed's Adam, and torch's counts in a tensor of each group
            for state in engine.optimizer.optimizer.state.values():
                state["step"] = torch.tensor(float(state["step"]))
        losses.append(run_steps(engine, kind, samples, STEPS, STEPS, rank))
    return losses


def parameter_shape(parameter: torch.nn.Parameter) -> torch.Size:
    """The whole shape; ZeRO-3 leaves an empty tensor in its place."""
    return getattr(parameter, "ds_shape", parameter.shape)
