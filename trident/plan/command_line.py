"""Shows what a command line would take, in place of training; without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron import log
from megatron.config import Machine, Program, RunConfig, TokenizerFacts, resolve
from megatron.errors import ConfigError, ExitCode
from megatron.parallel.rank_start import launched_ranks
from megatron.train.preflight.pipelines import schedule_problems
from trident.plan.requests import (
    USUAL_VOCABULARY,
    cluster_of,
    job_of,
    layout_of,
    own_lines,
    read_planned,
)
from trident.plan.search import LayoutEstimate, estimate


def show_plan(argv: Sequence[str], program: Program) -> ExitCode:
    """Prints the plan of a command line, on the first rank.

    Raises:
        MegatronError: with what is wrong with it, or with the launcher's variables.
    """
    words = [word for word in argv if word != "--plan-only"]
    lines = list(own_lines(words, program, launched_ranks().world_size, ["pretrain_gpt.py", *words]))
    if log.is_first_rank():
        log.text("\n".join(lines))
    return ExitCode.DONE


def checked_dry_run(argv: Sequence[str], program: Program) -> tuple[RunConfig, int, LayoutEstimate]:
    """Returns the run that `--dry-run-ranks` simulates, its world size, and the planner's estimate.

    Raises:
        ConfigError: the command line is wrong, or cannot be simulated.
    """
    _, request = read_planned(argv, program)
    size = request.planning.dry_run_ranks or 1
    vocabulary = request.model.vocab_size or USUAL_VOCABULARY
    facts = TokenizerFacts(vocabulary, vocabulary - 1, "")
    config = resolve(request, Machine("cuda", size, supports_fp16=True, supports_bf16=True, supports_fp8=True), facts)
    problems = [*dry_run_problems(config), *schedule_problems(request, size)]
    if problems:
        raise ConfigError(problems)
    return config, size, estimate(job_of(request, cluster_of(request, size)), layout_of(request, size))


def dry_run_problems(config: RunConfig) -> Iterator[str]:
    """Settings that cannot be simulated."""
    parallel, model = config.parallel, config.model
    if parallel.effective_zero_stage == 3:
        yield (
            "--dry-run-ranks walks --zero-stage 0 to 2, and this run has 3, of which DeepSpeed decides during a step "
            "what it gathers in which message. Use --zero-stage 2."
        )
    if parallel.pipeline_engine != "own":
        yield "--dry-run-ranks walks --pipeline-engine own. Drop --pipeline-engine."
    rows = config.optim.micro_batch_size * config.data.seq_length // (parallel.ring_size * parallel.ulysses_size)
    if parallel.splits_sequence and not parallel.splits_each_expert:
        rows //= parallel.tensor_model_parallel_size
    if model.num_experts > 1 and not model.drops_tokens and rows * model.moe_router_topk % model.num_experts:
        yield (
            f"--dry-run-ranks walks an even load of experts, and {rows:,} tokens of a micro-batch on a rank x "
            f"--moe-router-topk {model.moe_router_topk} are not a multiple of --num-experts {model.num_experts}. Use "
            "another --seq-length or --micro-batch-size."
        )
