"""The sources of the data: whether they are there, and are what their names say."""

from __future__ import annotations

from collections.abc import Collection

from megatron.config.run import RunRequest
from megatron.data.build import check_sources, data_prefixes
from megatron.data.datasets.examples.example_files import names_example_files
from megatron.data.datasets.examples.example_options import ExampleOptions
from megatron.errors import ConfigError, MegatronError


def source_failures(request: RunRequest, wrong: Collection[str]) -> list[MegatronError]:
    """What is wrong with the files and stores that the data flags name.

    Args:
        wrong: fields of the request that hold no usable value.
    """
    data = request.data
    if "objective" in wrong:
        return []
    try:
        prefixes = data_prefixes(data)
    except ConfigError:  # a blend that cannot be read; the flags have been refused for it
        return []
    options = ExampleOptions.of(request.finetuning, request.loss, data, request.optim)
    length = None if "seq_length" in wrong else data.seq_length
    failures: list[MegatronError] = []
    try:
        check_sources(data, length, request.loss.objective, options.needed_by, options.excluded_by)
    except MegatronError as failure:
        failures.append(failure)
    if request.finetuning.chat_template is not None and any(map(names_example_files, prefixes)):
        try:
            _ = options.template
        except MegatronError as failure:
            failures.append(failure)
    return failures
