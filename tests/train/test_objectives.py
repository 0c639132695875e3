"""What follows from --objective: the objective itself, masks, positions and prefixes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from megatron.config import Machine, RunConfig, TokenizerFacts, resolve
from megatron.data.datasets.changed_samples import PrefixDataset, ShortenedDataset
from megatron.data.datasets.sample import Sample, SampleDataset
from megatron.model.interface.step_context import MaskKind
from megatron.objective.language_model import LanguageModelObjective, PrefixObjective
from megatron.objective.masked import MaskedLanguageModelObjective
from megatron.objective.multi_token import MultiTokenObjective
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.tokenizer import Tokenizer
from megatron.train.objectives import batch_options, build_objective, samples_to_learn, step_settings
from tests.config.command_lines import small

TOKENIZER = cast(Tokenizer, SimpleNamespace(eod_id=9))
DATASET = cast(SampleDataset, SimpleNamespace(read=lambda sample: Sample(np.arange(9))))


def _config(text: str = "") -> RunConfig:
    return resolve(small(text), Machine("cpu", 1, False, True), TokenizerFacts(1000, 999, "f"))


@pytest.mark.parametrize(
    ("flags", "separates", "restarts", "segments", "prefixes"),
    [
        ("", False, False, False, False),
        ("--reset-attention-mask", True, False, True, False),
        ("--pack-examples", True, True, True, False),
        ("--objective prefix", False, False, False, True),
        ("--objective prefix --reset-position-ids", False, True, True, True),
        ("--objective prefix --reset-attention-mask", True, False, True, True),
        ("--objective multitask", True, True, True, True),
        ("--objective masked --bidirectional", True, False, True, False),
    ],
)
def test_masks_positions_and_prefixes(
    flags: str, separates: bool, restarts: bool, segments: bool, prefixes: bool
) -> None:
    settings, options = step_settings(_config(flags)), batch_options(_config(flags), TOKENIZER)
    assert (settings.mask is MaskKind.DOCUMENTS, settings.restart_positions) == (separates, restarts)
    assert (settings.needs_segments, settings.has_prefixes) == (segments, prefixes)
    assert (options.segments, options.prefixes, options.eod_id) == (segments, prefixes, 9)


def test_multi_token_prediction_has_an_objective_and_the_tokens() -> None:
    flags = "--mtp-num-layers 2 --position-embedding-type rope --mtp-loss-scaling-factor 0.3 --eod-mask-loss"
    tp = ParallelMesh.single().tp
    expected = MultiTokenObjective(tp, 1000, depths=2, scale=0.3, stops_at_masked=True)
    assert build_objective(_config(flags), ParallelMesh.single()) == expected
    assert step_settings(_config(flags)).passed == ("tokens",)


def test_masked_text_passes_what_only_it_has() -> None:
    masked = "--objective masked --bidirectional"
    assert step_settings(_config(masked)).passed == ("segment_ids", "predicted")
    stages = [step_settings(_config(f"--zero-stage {stage}")) for stage in (2, 3)]
    assert [of.holds_parameters for of in stages] == [of.factored_logits for of in stages] == [True, False]
    assert step_settings(_config(f"{masked} --num-token-types 2")).passed == ("segment_ids", "token_types", "predicted")
    assert build_objective(_config(f"{masked} --sentence-order-head"), ParallelMesh.single()) == (
        MaskedLanguageModelObjective(ParallelMesh.single().tp, 1000, has_sentence_order=True)
    )


def test_the_objective_of_each_kind() -> None:
    mesh = ParallelMesh.single()
    for flags in ("", "--loss-on-targets-only", "--objective multitask"):
        assert type(build_objective(_config(flags), mesh)) is LanguageModelObjective
    text = "--objective prefix --loss-on-targets-only --z-loss 0.5 --label-smoothing 0.1"
    built = build_objective(_config(text), mesh, sources=["a", "b"])
    assert built == PrefixObjective(
        mesh.tp, 1000, sources=("a", "b"), label_smoothing=0.1, z_loss_coeff=0.5, on_targets_only=True
    )
    weighted = build_objective(
        _config("--objective prefix --reset-attention-mask --reweight-loss-based-on-position-frequency"), mesh
    )
    assert isinstance(weighted, PrefixObjective) and weighted.reweights_positions and weighted.by_document
    assert not weighted.on_targets_only


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("", {"eod_id": None, "on_targets_only": False}),
        ("--reset-attention-mask --loss-on-targets-only", {"eod_id": 9, "on_targets_only": True}),
    ],
)
def test_samples_get_prefixes_within_the_length_in_use(flags: str, found: dict[str, Any]) -> None:
    config = _config(f"--objective prefix --seed 77 {flags}")
    whole = PrefixDataset(DATASET, 77, **found)
    assert samples_to_learn(DATASET, config, TOKENIZER) == whole
    assert samples_to_learn(DATASET, config, TOKENIZER, config.data.seq_length) == whole
    short = PrefixDataset(ShortenedDataset(DATASET, 3), 77, **found)
    assert samples_to_learn(DATASET, config, TOKENIZER, 3) == short


def test_other_objectives_keep_their_samples() -> None:
    for flags in ("", "--objective multitask"):
        assert samples_to_learn(DATASET, _config(flags), TOKENIZER) is DATASET
    assert samples_to_learn(DATASET, _config(), TOKENIZER, 3) == ShortenedDataset(DATASET, 3)
