"""Every flag of the projects whose scripts we take has a status, and the status has a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.config.flags.legacy import IGNORING, Legacy, legacy_flags
from megatron.config.flags.status_table import IGNORED, REFUSED
from megatron.config.parse import field_flags, known_flags
from megatron.errors import ConfigError
from tests.config.command_lines import flag_table, small

FOLDER = Path(__file__).resolve().parents[1] / "golden"
GOLDEN = FOLDER / "flags.txt"
HEADER = "# name | type | default | status. Made by: python -m tests.config.golden.write_flags\n"


def golden_text() -> str:
    """The list of all flags as it is kept in the repository."""
    return HEADER + "".join(" | ".join(row) + "\n" for row in flag_table())


def known_spellings() -> set[str]:
    """Every option string the trainer accepts."""
    return {text for one in known_flags().values() for text in one.spellings}


def test_the_golden_list_is_current() -> None:
    assert GOLDEN.read_text(encoding="utf-8") == golden_text(), (
        "run python -m tests.config.golden.write_flags and look at the difference"
    )


def test_every_upstream_flag_is_known() -> None:
    lines = (FOLDER / "upstream_flags.txt").read_text(encoding="utf-8").splitlines()
    names = {line for line in lines if line.startswith("--")}
    assert len(names) > 300
    assert names - known_spellings() == set()


def test_no_spelling_means_two_flags() -> None:
    spellings = [text for one in known_flags().values() for text in one.spellings]
    assert len(spellings) == len(set(spellings))


def given(status: str) -> dict[str, Legacy]:
    """The flags of a status, as they are written on a command line with a value that is not the usual one."""
    entries = [entry for entry in legacy_flags().values() if entry.status == status]
    return {f"{one.flag.positive_name}{'' if one.flag.element is bool else ' 77'}": one for one in entries}


def test_every_rejected_flag_is_rejected() -> None:
    written = given(REFUSED)
    with pytest.raises(ConfigError) as caught:
        small(" ".join(written))
    sentences = [re.sub(r"77\.0(?= is)", "77", text) for text in caught.value.problems]
    assert sorted(sentences) == sorted(f"{text} is refused: {entry.reason}" for text, entry in written.items())


def test_every_ignored_flag_is_named_with_the_reason() -> None:
    written = given(IGNORED)
    config = small(" ".join(written))
    assert config.notices == ()
    sentences = [re.sub(r"77\.0(?= is)", "77", text) for text in config.ignored]
    assert sorted(sentences) == sorted(f"{text} {IGNORING}: {entry.reason}" for text, entry in written.items())


def test_a_harmless_value_gives_no_notice() -> None:
    entries = [entry for entry in legacy_flags().values() if entry.harmless is not None]
    config = small(" ".join(f"{entry.flag.positive_name} {entry.harmless}" for entry in entries))
    assert len(entries) > 100 and config.notices == config.ignored == ()


# Supported fields that only the configuration itself looks at.
DONE_IN_CONFIG = {
    "bias_dropout_fusion", "masked_softmax_fusion", "bias_swiglu_fusion", "rope_fusion", "persist_layer_norm",
    "make_vocab_size_divisible_by", "pad_vocab_size_to", "recompute_activations", "pp_partition_method",
    "override_lr_scheduler", "use_checkpoint_lr_scheduler", "data_impl", "config", "deepspeed", "recompute_granularity",
    "skip_train_iteration_range", "model_preset", "ckpt_step", "load_tag", "activations_checkpoint_method",
    "mos", "kd_iters", "cpu_optimizer", "elastic", "profile_steps", "profile_step_start", "profile_step_end",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "checkpoint_num_layers", "context_parallel_size",
    "cp_comm_type", "hierarchical_context_parallel_sizes", "ds_sequence_parallel_size",
    "distribute_saved_activations", "sequence_parallel", "fp8_e4m3", "fp8_hybrid", "first_last_layers_bf16",
    "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
    *(f"{size}_teacher"
      for size in ("num_layers", "hidden_size", "num_attention_heads", "num_experts", "moe_expert_counts")),
    *(f"{split}_{kind}" for split in ("train", "valid", "test")
      for kind in ("weighted_split_paths", "weighted_split_paths_path", "data_path")),
}  # fmt: skip


def test_a_supported_flag_is_read_somewhere() -> None:
    root = FOLDER.parents[2]
    patterns = ("megatron/**/*.py", "trident/**/*.py", "pretrain_*.py", "finetune_*.py")
    files = [file for pattern in patterns for file in root.glob(pattern)]
    config = root / "megatron" / "config"
    files = [file for file in files if config not in file.parents]
    files += [
        config / "schedule.py",
        config / "sections" / "curriculum.py",
        *(config / "rules").glob("*.py"),
        *(config / "architecture").glob("*.py"),
    ]
    texts = [file.read_text(encoding="utf-8") for file in files]
    read = {name for text in texts for name in re.findall(r"[.\"](\w+)", text)}
    supported = {one.field for one in field_flags().values() if not one.facts.ignored}
    assert supported - read - DONE_IN_CONFIG == set(), "nobody reads these: say so with ignored=, or refuse them"
