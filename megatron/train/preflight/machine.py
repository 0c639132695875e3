"""Checks of the launched processes against machine, layout and batches, and of the network against memory."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import cast

from megatron import log
from megatron.config import ModelConfig
from megatron.config.files.deepspeed_file import read_settings
from megatron.config.flags.fields import Unset
from megatron.config.machine import Machine
from megatron.config.resolve import machine_problems
from megatron.config.rules.checking import world_problems
from megatron.config.rules.precision import supported_dtype
from megatron.config.run_config import RunRequest
from megatron.config.run_sections import fields_of
from megatron.cuda_driver import cuda_unavailable_reason, largest_gpu_memory_bytes
from megatron.engine.memory.closed_form import Partitioning, predicted_bytes
from megatron.errors import ConfigError, LaunchError, MegatronError
from megatron.host_memory import available_memory_bytes, total_memory_bytes
from megatron.model.costs import block_cost
from megatron.parallel.launchers import Ranks
from megatron.parallel.rank_start import launched_ranks
from megatron.secret_text import masked

# The sections with layout, batch sizes and timeouts.
_SECTIONS = ("model", "parallel", "optim", "safety")


def launch_failures(
    request: RunRequest, wrong: Collection[str], *, is_sound: bool
) -> tuple[Ranks | None, list[MegatronError]]:
    """The launched ranks, None if their environment variables are inconsistent, and the problems with them.

    Args:
        wrong: fields of the request without a valid value; the layout is not checked if it is among them.
        is_sound: no rule between fields of the request is violated.
    """
    reason = cuda_unavailable_reason()
    device = "cpu" if reason else "cuda"  # torch reports a missing GPU later
    machine = Machine(device, 1, not reason, supports_bf16=True, device_reason=reason, supports_fp8=not reason)
    problems = list(supported_dtype(request, machine))
    try:
        ranks = launched_ranks(request.parallel.local_rank)
    except LaunchError as failure:
        return None, [failure, *map(ConfigError, problems)]
    if _has_layout(request, wrong):
        machine = dataclasses.replace(machine, world_size=ranks.world_size)
        if is_sound:
            problems = list(machine_problems(request, machine))
        elif not request.parallel.elastic:
            problems += world_problems(request, machine.world_size)
        if ranks.launcher == "none" and request.parallel.replica_size > 1 and not request.parallel.elastic:
            problems.append(f"Type: {_launched(request.parallel.replica_size)}")
    return ranks, [*map(ConfigError, problems)]


def _launched(processes: int) -> str:
    return f"torchrun --nproc-per-node {processes} {shlex.join(map(masked, sys.argv))}"


def _has_layout(request: RunRequest, wrong: Collection[str]) -> bool:
    """True if the layout is fully specified."""
    fields = [
        (field.name, getattr(getattr(request, section), field.name))
        for section in _SECTIONS
        for field in fields_of(type(getattr(request, section)))
    ]
    return not any(name in wrong or value is Unset.COMPUTED for name, value in fields)


# The rest is for activations, buffers and libraries.
_COMFORTABLE_SHARE = 0.8
_GIB = 2**30
_ADVICE = "Use a smaller network, or more ranks on more machines, with tensor or pipeline parallelism or ZeRO."


@dataclass(frozen=True)
class _Memory:
    """Memory shared by some ranks.

    Attributes:
        name: its name in messages.
        ranks: the number of ranks that share it, as far as known.
    """

    name: str
    ranks: int
    total_bytes: int
    free_bytes: int


def memory_problems(request: RunRequest, ranks: Ranks) -> Iterator[str]:
    """Refuses a network whose weights, gradients and optimizer exceed the memory; warns if little memory remains.

    Args:
        request: valid flags, whose batch sizes and layout match the ranks.
    """
    memory = _available(ranks)
    needed = least_bytes(request, ranks.world_size) if memory is not None else None
    if memory is None or needed is None:
        return
    model = _sizes(request)
    parameters = sum(block_cost(model, index).parameters for index in range(model.num_layers + model.mtp_num_layers))
    network = (
        f"the {parameters / 1e9:,.1f}B parameters of --num-layers {model.num_layers} --hidden-size {model.hidden_size}"
    )
    where = memory.name if memory.ranks == 1 else f"{memory.name}, which {memory.ranks} ranks share,"
    gib = memory.ranks * needed / _GIB
    if memory.ranks * needed > memory.total_bytes:
        yield (
            f"{network} need at least {gib:,.1f} GiB for weights, gradients and optimizer, without activations, but "
            f"{where} has {memory.total_bytes / _GIB:,.1f} GiB. {_ADVICE}"
        )
    elif memory.ranks * needed > _COMFORTABLE_SHARE * memory.free_bytes and log.is_first_rank():
        log.warning(
            f"{network} need at least {gib:,.1f} GiB for weights, gradients and optimizer, plus activations; {where} "
            f"has {memory.free_bytes / _GIB:,.1f} GiB left. {_ADVICE}"
        )


def least_bytes(request: RunRequest, world_size: int) -> int | None:
    """The least that a rank holds in its device's memory while it trains; None where the closed form does not know.

    Counts the blocks alone, divided evenly: embeddings depend on the tokenizer.
    """
    model, parallel, optim = _sizes(request), request.parallel, request.optim
    settings = {} if parallel.deepspeed_config is None else read_settings(parallel.deepspeed_config)
    zero = settings.get("zero_optimization", {})
    is_other = optim.use_bnb_optimizer or parallel.cpu_optimizer
    is_partial = bool(request.finetuning.freeze) or request.evaluation.eval_only
    is_offloaded = isinstance(zero, dict) and any(name.startswith("offload") for name in zero)
    if is_other or is_partial or is_offloaded or parallel.elastic or Unset.COMPUTED in vars(model).values():
        return None
    blocks = [block_cost(model, index).parameters for index in range(model.num_layers + model.mtp_num_layers)]
    share = sum(blocks) // parallel.model_parallel_size
    replicas = max(1, world_size // parallel.model_parallel_size)
    is_half = request.precision.dtype_name != "float32"
    stage = max(parallel.zero_stage, 1) if is_half else parallel.zero_stage
    how = Partitioning(stage, replicas, weight_bytes=2 if is_half else 4)
    return predicted_bytes([[share]], how, states=[optim.state_bytes(of_blocks=True)]).on_device


def _sizes(request: RunRequest) -> ModelConfig:
    # The vocabulary, which depends on the tokenizer, does not affect the cost of a block.
    return cast(ModelConfig, request.model)


def _available(ranks: Ranks) -> _Memory | None:
    """The memory of this rank's device, shared by all local ranks on a CPU."""
    if not cuda_unavailable_reason():
        total = largest_gpu_memory_bytes()
        return None if total is None else _Memory("the largest GPU here", 1, total, total)
    total, free = total_memory_bytes(), available_memory_bytes()
    if total is None:
        return None
    here = ranks.world_size if ranks.is_one_node else 1
    return _Memory("this machine", here, total, total if free is None else free)
