"""Plans a command line in place of training, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron import log
from megatron.config import Machine, Program, RunConfig, TokenizerFacts, resolve
from megatron.errors import ConfigError, ExitCode
from megatron.parallel.rank_start import launched_ranks
from megatron.train.preflight.pipelines import schedule_problems
from trident.plan.requests import DEFAULT_VOCABULARY, cluster_of, command_lines, job_of, layout_of, read_plan_request
from trident.plan.search import LayoutEstimate, estimate


def show_plan(argv: Sequence[str], program: Program) -> ExitCode:
    """Prints the plan of a command line, on rank 0.

    Raises:
        MegatronError: the command line or the launcher's variables are invalid.
    """
    arguments = [argument for argument in argv if argument != "--plan-only"]
    lines = list(command_lines(arguments, program, launched_ranks().world_size, ["pretrain_gpt.py", *arguments]))
    if log.is_first_rank():
        log.text("\n".join(lines))
    return ExitCode.DONE


def checked_dry_run(argv: Sequence[str], program: Program) -> tuple[RunConfig, int, LayoutEstimate]:
    """Returns the run that `--dry-run-ranks` simulates, its world size, and the planner's estimate.

    Raises:
        ConfigError: the command line is wrong, or cannot be simulated.
    """
    _, request = read_plan_request(argv, program)
    size = request.planning.dry_run_ranks or 1
    vocabulary = request.model.vocab_size or DEFAULT_VOCABULARY
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
            "--dry-run-ranks cannot be combined with --zero-stage 3: DeepSpeed decides during a step which weights it "
            "gathers in which message. Use --zero-stage 2."
        )
    if parallel.pipeline_engine != "own":
        yield "--dry-run-ranks requires --pipeline-engine own. Drop --pipeline-engine."
    rows = config.optim.micro_batch_size * config.data.seq_length // (parallel.ring_size * parallel.ulysses_size)
    if parallel.splits_sequence and not parallel.splits_each_expert:
        rows //= parallel.tensor_model_parallel_size
    if model.num_experts > 1 and not model.drops_tokens and rows * model.moe_router_topk % model.num_experts:
        yield (
            f"--dry-run-ranks assumes balanced experts, and {rows:,} tokens of a micro-batch on a rank x "
            f"--moe-router-topk {model.moe_router_topk} are not a multiple of --num-experts {model.num_experts}. Use "
            "another --seq-length or --micro-batch-size."
        )
