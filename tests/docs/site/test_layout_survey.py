"""The survey of layouts finds every rule that refuses a combination, and nothing else."""

from __future__ import annotations

import pytest

from docs.site import layout_survey
from docs.site.layout_survey import AXES, problems_of, refusals, survey, words_of
from tests.config.command_lines import words


def test_values_have_names_of_their_own_and_flags_that_are_known() -> None:
    values = [value for axis in AXES.values() for value in axis]
    assert len(values) == len(set(values))
    for axis in AXES.values():
        assert problems_of([*words(), *words_of([next(iter(axis))])]) == ()


def test_as_few_values_as_possible_make_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: AXES[name] for name in ("ZeRO", "experts", "compiled blocks")}
    monkeypatch.setattr(layout_survey, "AXES", few)
    assert {one.values for one in refusals(words(), most=3)} == {
        ("ZeRO 3", "compiled"),
        ("4 experts", "compiled"),
        ("4 experts on 2 ranks", "compiled"),
        ("4 whole experts on 2 ranks", "compiled"),
    }


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


def test_what_a_command_says_in_other_words_is_replaced_too() -> None:
    mixed = "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
    shape = "--tensor-model-parallel-size 2 --sequence-parallel --attention-dropout 0 --freeze embedding.*"
    asked = survey(words(f"{mixed} {shape} --recompute-activations"))
    assert asked.problems == ()
    found = {one.value: one for one in asked.alternatives}
    assert found["whole sequences"].problems == () and found["a ring of 2 groups of 2"].is_given
    assert found["some frozen"].is_given and not found["all trained"].is_given
    assert found["tensor 2 with sequence parallelism"].is_given and not found["tensor 2"].is_given
    assert not found["nothing recomputed"].is_given
