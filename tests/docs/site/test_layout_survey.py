"""The survey of layouts finds every rule that refuses a combination, and nothing else."""

import pytest

from docs.site.layout_survey import survey
from tests.config.command_lines import words


def test_a_command_with_other_values_keeps_its_sizes() -> None:
    flags = words("--pipeline-model-parallel-size 4 --bf16", drop="--data-path")
    asked = survey(flags)
    found = {one.value: one for one in asked.alternatives}
    assert (asked.pipeline, asked.problems) == ("1f1b", ())
    given = {one.value for one in found.values() if one.is_given}
    assert {"1f1b", "bf16", "ZeRO 1", "tensor 1", "all trained"} <= given
    assert not found["float32"].is_given and found["float32"].problems == ()
    (problem,) = found["ZeRO 3"].problems
    assert "--zero-stage 3 cannot be combined with --pipeline-model-parallel-size 4" in problem
    (problem,) = found["interleaved"].problems
    assert "--pipeline-model-parallel-size 4" in problem, "eight chunks of four layers"
    assert not any("--data-path" in problem for one in found.values() for problem in one.problems)


@pytest.mark.parametrize(
    ("flags", "pipeline", "cures"),
    [
        ("--pipeline-schedule zbv --zero-stage 3", "zbv", {"no pipeline", "ZeRO 0", "ZeRO 1", "ZeRO 2"}),
        (
            "--pipeline-schedule zbv --compile",
            "zbv",
            {"no pipeline", "1f1b", "interleaved", "v-1f1b", "1f1b, engine deepspeed", "not compiled"},
        ),
        ("--num-layers-per-virtual-pipeline-stage 1 --zero-stage=3", "interleaved", {"no pipeline", "ZeRO 1"}),
        ("--enable-zbh1-pipeline --pipeline-engine deepspeed --zero-stage 2", "zb-h1, engine deepspeed", {"zbv"}),
        ("--zero-stage 3 --cpu-optimizer --num-experts 4 --compile", "1f1b", set()),
    ],
)
def test_a_refused_command_is_cured_by_what_replaces_its_flags(flags: str, pipeline: str, cures: set[str]) -> None:
    asked = survey(words("--pipeline-model-parallel-size 2 " + flags))
    assert asked.pipeline == pipeline and asked.problems
    working = {one.value for one in asked.alternatives if not one.problems}
    assert cures <= working and (cures or not working), working
    if "compile" in flags:
        assert working == cures
