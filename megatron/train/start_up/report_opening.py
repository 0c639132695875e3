"""Opens the report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron import log
from megatron.config import RunConfig
from megatron.data.order.plan import DataPlan
from megatron.observe.console import argument_lines
from megatron.observe.progress_bar import ProgressBar, has_colour, wants_bar
from megatron.observe.report import Destination, Report, ReportOutputs, open_destinations
from megatron.observe.run_directory import MEGATRON_FILES, open_run_directory, write_arguments
from megatron.observe.styles.choice import style_named
from megatron.parallel.agreement import run_on_first
from megatron.parallel.mesh import ParallelMesh
from megatron.train.start_up.summary import workload_of


def open_report(
    config: RunConfig,
    mesh: ParallelMesh,
    parameters_without_embeddings: int,
    plan: DataPlan,
    *,
    is_resume: bool,
) -> tuple[Report, Path]:
    """Opens the report: the last rank prints the console lines, as in upstream; rank 0 writes all files. Collective.

    Returns:
        the report, and the run folder.
    """
    workload = workload_of(config, mesh, parameters_without_embeddings)
    arguments = config.flat()
    style = style_named(config.report.log_style, config.program)

    destinations: list[Destination] = []

    def open_files() -> list[Any]:
        opened = open_run_directory(
            config.report.run_dir,
            config.to_json(),
            name="bert" if config.model.bidirectional else "gpt",
            is_resume=is_resume,
            names=config.program.run_files.get(config.report.run_files, MEGATRON_FILES),
            program_flags=config.report.program_flags,
        )
        log.copy_to(opened.log_path)
        if config.report.log_path:
            write_arguments(config.report.log_path, argument_lines(arguments))
        tags = style.LOSS_TAGS
        destinations.extend(open_destinations(config.report, workload, opened, is_resume=is_resume, loss_tags=tags))
        has_bar = wants_bar(config.watching, config.report)
        return [str(opened.path), has_bar, has_bar and log.is_terminal("stdout")]

    folder, has_bar, hides_lines = run_on_first(mesh, open_files)
    if has_bar:
        log.open_status(with_lines=hides_lines)
    report = Report(
        config.report,
        config.optim,
        workload,
        ReportOutputs(
            style,
            destinations,
            bar=ProgressBar(has_colour=has_colour()) if has_bar and mesh.world.rank == 0 else None,
            hides_lines=hides_lines,
        ),
        samples_per_epoch=plan.pass_samples or None,
        shows_loss_scale=config.precision.fp16,
        arguments=arguments,
        experts_per_token=config.model.moe_router_topk,
    )
    return report, Path(folder)
