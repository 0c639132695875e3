"""Which flags concern examples."""

import pytest

from megatron.config.objective.finetuning import FinetuningConfig
from megatron.config.objective.loss import LossConfig
from megatron.config.sections.curriculum import CurriculumFields
from megatron.data.datasets.examples.example_options import ExampleOptions
from megatron.tokenizers.tokenizer import TokenizerChoice

TOKENIZER = TokenizerChoice("GPT2BPETokenizer")


@pytest.mark.parametrize(
    ("objective", "pack", "targets", "needed_by"),
    [
        ("causal", True, False, "--pack-examples"),
        ("causal", False, True, "--loss-on-targets-only"),
        ("causal", False, False, ""),
        ("prefix", False, True, ""),
        ("multitask", True, True, ""),
    ],
)
def test_flags_that_need_examples(objective, pack, targets, needed_by):
    loss = LossConfig(objective=objective, loss_on_targets_only=targets)
    options = ExampleOptions.of(FinetuningConfig(pack_examples=pack), loss, TOKENIZER, CurriculumFields())
    assert options.excluded_by == ""
    assert options.needed_by == needed_by
    assert options.pack == (pack and objective == "causal")
    assert options.on_targets_only == (targets and objective == "causal")


def test_a_curriculum_excludes_examples():
    curriculum = CurriculumFields(curriculum_learning=True, curriculum_min_length=8, curriculum_steps=1)
    options = ExampleOptions.of(FinetuningConfig(), LossConfig(), TOKENIZER, curriculum)
    assert options.excluded_by == "--curriculum-learning"


def test_template_is_of_the_flags_or_of_the_tokenizers_folder(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    flags = TokenizerChoice("GPT2BPETokenizer", str(tmp_path / "vocab.json"))
    assert ExampleOptions("chatml", flags=flags).template.name == "chatml"
    assert ExampleOptions(flags=flags).template.name == str(tmp_path / "chat_template.jinja")
    assert ExampleOptions().template.name == "plain"
