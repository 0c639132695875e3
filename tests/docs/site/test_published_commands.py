"""Command lines that users already have: they parse, or are refused for stated reasons."""

import shlex
from pathlib import Path

import pytest

from docs.site.published_commands import LIST, Outcome, check, read_commands, subject, table_lines, totals
from megatron.config import Machine, TokenizerFacts, parse, resolve

PAGE = Path(__file__).resolve().parents[3] / "docs" / "published_commands.md"
BEGIN, END = "<!-- the table -->", "<!-- end of the table -->"
SHOWN = "python docs/site/published_commands.py --markdown"


# What upstream's training tests pass, without the model parts that are not built.
UPSTREAM_TEST = """
    --local_rank=0 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 128 --max-position-embeddings 1024
    --micro-batch-size 1 --rampup-batch-size 2 2 300 --global-batch-size 16 --train-samples 300
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --lr 1e-4 --lr-warmup-samples 5
    --lr-decay-samples 6 --clip-grad 1.0 --weight-decay 1e-1 --fp16
    --log-level debug --log-level-replica info --log-interval 10 --save-interval 10 --eval-interval 10 --eval-iters 5
    --checkpoint-activations --partition-activations --exit-interval 20 --tensorboard-dir tb
    --tensorboard-queue-size 5 --log-timers-to-tensorboard --log-batch-size-to-tensorboard
    --log-validation-ppl-to-tensorboard --save checkpoints --load checkpoints
    --merge-file gpt2-tiny-merges.txt --vocab-file gpt2-tiny-vocab.json --data-impl mmap --split 949,50,1
    --distributed-backend nccl --sync-tp-duplicated-parameters --deepspeed --zero-stage 1
    --deepspeed-activation-checkpointing
"""

# The flags of the published 176B launch script that are not sizes or paths.
LARGE_RUN = """
    --pp-partition-method type:transformer|embedding --num-layers 70 --hidden-size 14336 --num-attention-heads 112
    --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 --rampup-batch-size 192 32 9_765_625
    --global-batch-size 2048 --train-samples 220_000_000 --init-method-std 0.0048 --bf16 --seed 42
    --checkpoint-activations --pad-vocab-size-to 250880 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95
    --adam-eps 1e-8 --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine --lr-decay-samples 200_000_000
    --lr-warmup-samples 183_105 --clip-grad 1.0 --weight-decay 1e-1 --exit-duration-in-mins 5990 --exit-interval 5990
    --log-interval 1 --save-interval 250 --save out --load out --eval-interval 1000 --eval-iters 1
    --tensorboard-dir tb --tensorboard-queue-size 5 --log-timers-to-tensorboard --log-batch-size-to-tensorboard
    --log-validation-ppl-to-tensorboard --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path bigscience/tokenizer --data-impl mmap --num-workers 2
    --valid-num-workers 0 --data-path 1.0 corpus --kill-switch-path kill --deepspeed --zero-stage 0
    --deepspeed-activation-checkpointing --abort-on-unmet-fused-kernel-constraints
"""


def test_the_command_of_upstreams_training_tests(tmp_path: Path) -> None:
    settings = tmp_path / "ds.json"
    settings.write_text(
        """{"train_micro_batch_size_per_gpu": 1, "train_batch_size": 16, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1}, "steps_per_print": 2000, "wall_clock_breakdown": false,
        "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
        "initial_scale_power": 12}, "zero_allow_untested_optimizer": true}"""
    )
    config = parse([*shlex.split(UPSTREAM_TEST), "--data-path", "corpus", "--deepspeed_config", str(settings)])
    assert config.notices == () and config.recompute.distributes_saved
    assert [text.split()[0] for text in config.ignored] == [
        "--sync-tp-duplicated-parameters",
        "--deepspeed-activation-checkpointing",
        "--log-level-replica",
    ]
    scale = config.precision
    assert (scale.initial_loss_scale, scale.loss_scale_window, scale.loss_scale) == (4096, 500, None)
    resolved = resolve(config, Machine("cuda", 4, True, True), TokenizerFacts(5120, 0, "f"))
    assert resolved.parallel.data_parallel_size == 1 and resolved.optim.train_iters > 0


def test_a_large_published_run() -> None:
    config = parse([word.replace("\n", "") for word in LARGE_RUN.split()])
    resolved = resolve(config, Machine("cuda", 384, True, True), TokenizerFacts(250680, 2, "f"))
    assert resolved.parallel.data_parallel_size == 8 and resolved.parallel.effective_zero_stage == 1
    levels = [192 + 32 * level for level in range(58)]  # each lasts 1/58 of the ramp-up
    expected = sum(9_765_625 / 58 / size for size in levels) + (220_000_000 - 9_765_625) / 2048
    assert abs(resolved.optim.train_iters - expected) < len(levels)


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [check(command) for command in read_commands(LIST)]


def test_the_page_says_what_becomes_of_every_command(outcomes: list[Outcome]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = "\n".join(table_lines(outcomes))
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == table, f"put the table between the marks: {SHOWN}"
    (accepted,) = {row[1] for row in totals(outcomes) if row[0] == "all"}
    assert accepted >= 50 and len(outcomes) >= 80
    names = [(outcome.command.repository, outcome.command.name) for outcome in outcomes]
    assert len(set(names)) == len(names)


def test_a_refusal_names_a_flag_or_a_key_and_a_way_out(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        for sentence, name in ((text, subject(text)) for text in outcome.refusals):
            assert name in sentence and name != sentence, (outcome.command.name, sentence)
            assert sentence.endswith((".", "?")), sentence
