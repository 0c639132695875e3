"""Published commands train, one of each kind in the suite and all with `--cases 10000`; so do samples that grow.

All of them are trained by the same two processes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from docs.site.published_commands import LIST, Command, check, read_commands
from megatron.parallel.schedule.building import idle_share
from megatron.train.start_up.summary import chunk_costs
from tests.helpers.commands.scaled_commands import BATCH, MICRO, PROCESSES, scaled
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import TinyCorpus, saved_config, steps, train_here, write_tiny_corpus

# One command of each kind: experts, the same number in every layer or not, with a teacher that has such experts too, a
# part of the optimizer on the host, dense with the flags of experts and a ramp-up, a curriculum, an encoder norm with
# ALiBi, grouped queries in stages, stage 3 of ZeRO, Ulysses, a zero-bubble schedule, virtual stages.
KINDS = (
    "ds_pretrain_gpt_125M_MoE64.sh",
    "ds_pretrain_gpt_350M_PR-MoE32or64.sh",
    "ds_pretrain_gpt_350M_PR-MoE32or64_MoS.sh",
    "offload_pp/ds_pretrain_gpt_350M.sh",
    "ds_pretrain_gpt_1.3B_dense.sh",
    "ds_pretrain_gpt_125M_dense_cl.sh",
    "run_bf16.sh",
    "run-benchmark-model.sh",
    "ds_pretrain_gpt_1.3B_seq_parallel_32k.sh",
    "zbh1_pretrain_gpt_1.3b.sh",
    "run_figure_12.sh",
)
# What the last two of them follow on two stages, and its chunks of the network a stage.
SCHEDULES = {KINDS[-2]: ("zb-h1", 1), KINDS[-1]: ("interleaved", 2)}
ALL = 10_000  # of --cases
FACTS = ("lm_loss", "learning_rate", "consumed_samples", "consumed_tokens")


def train_all(rank: int, commands: Sequence[list[str]]) -> list[tuple[int, str]]:
    """Runs one command after the other in the same processes."""
    return [train_here(rank, command) for command in commands]


def growing(corpus: TinyCorpus, folder: Path, **changes: Any) -> list[str]:
    """A run by tokens with a ramp-up and evaluations, whose curriculum stands in a DeepSpeed file."""
    settings = folder.parent / "ds.json"
    schedule = {"total_curriculum_step": 6, "difficulty_step": 8}
    curriculum = {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 32}
    content = {"curriculum_learning": {**curriculum, "schedule_type": "fixed_linear", "schedule_config": schedule}}
    settings.write_text(json.dumps(content))
    flags = {
        "train_iters": None, "train_samples": 1000, "train_tokens": 500, "rampup_batch_size": (2, 2, 6),
        "lr_warmup_fraction": None, "lr_warmup_tokens": 48, "lr_decay_tokens": 480, "eval_interval": 3, "eval_iters": 1,
        "deepspeed_config": settings, "micro_batch_size": 1,
    }  # fmt: skip
    return corpus.flags(folder=folder, **{**flags, **changes})


def as_upstream() -> dict[int, tuple[float, int, int]]:
    """Learning rate, consumed samples and consumed tokens of the steps, as upstream's training loop counts them."""
    peak, floor, warmup, decay = 5e-3, 1e-4, 48, 480
    found, samples, tokens = {}, 0, 0
    for step in range(1, 100):
        rate = peak * tokens / warmup
        if tokens > warmup:
            share = min(1.0, (tokens - warmup) / (decay - warmup))
            rate = floor + (peak - floor) * 0.5 * (math.cos(math.pi * share) + 1.0)
        length = math.floor(step / 6 * (32 - 8) + 8)
        batch = 2 if samples < 6 else 4
        samples, tokens = samples + batch, tokens + batch * min(32, length - length % 8)
        found[step] = (rate, samples, tokens)
        if tokens >= 500:
            break
    return found


def chosen(cases: int) -> list[Command]:
    """The commands that are trained."""
    accepted = [command for command in read_commands(LIST) if not check(command).refusals]
    return [
        command for command in accepted if cases >= ALL or command.script.endswith(tuple(f"/{name}" for name in KINDS))
    ]


@pytest.mark.full
def test_published_commands_and_growing_samples_train(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    corpus = write_tiny_corpus(tmp_path)
    cases = pytestconfig.getoption("--cases")
    count = 4 if cases >= ALL else 2
    whole, stages, cut = (tmp_path / name for name in ("whole", "stages", "cut"))
    two = {"pipeline_model_parallel_size": 2}
    commands = {
        "growing": growing(corpus, whole),
        "growing, stages": growing(corpus, stages, **two),
        "growing, cut": growing(corpus, cut, tensor_model_parallel_size=2, exit_interval=5),
        "growing, resumed": growing(corpus, cut, **two),
    }
    published = {f"{place:02}": command for place, command in enumerate(chosen(cases))}
    pyramid = whole
    for place, command in published.items():
        teacher = (pyramid if "--num-experts-teacher" in command.flags else whole) / "checkpoints"
        commands[f"{place} {command.name}"] = scaled(command, corpus, tmp_path / place, count, teacher)
        if "PR-MoE" in command.name and "--mos" not in command.flags:
            pyramid = tmp_path / place
    results = run_ranks(train_all, PROCESSES, list(commands.values()), timeout_seconds=60 + 30 * len(commands))
    for ended in results:
        assert {name: result for name, result in zip(commands, ended, strict=True) if result != (0, "")} == {}
    for place, command in published.items():
        losses = {step: loss for step, (loss,) in steps(tmp_path / place, "lm_loss").items()}
        assert sorted(losses) == list(range(1, count + 1)), command.name
        assert all(0.0 < loss < 10.0 for loss in losses.values()), (command.name, losses)
        schedule = SCHEDULES.get(Path(command.script).name)
        if schedule is not None:
            (ratio,) = set(steps(tmp_path / place, "bubble_ratio").values())
            costs = chunk_costs(saved_config(tmp_path / place))
            assert ratio == (idle_share(schedule[0], 2, schedule[1], BATCH // MICRO, costs),), command.name
    assert len(published) >= len(KINDS)
    found = steps(whole, *FACTS)
    assert {step: values[1:] for step, values in found.items()} == {
        step: pytest.approx(values, rel=1e-6) for step, values in as_upstream().items()
    }
    for folder in (stages, cut):
        other = steps(folder, *FACTS)
        assert sorted(other) == sorted(found)
        for step in found:
            assert other[step] == pytest.approx(found[step], rel=1e-4), (folder.name, step)
