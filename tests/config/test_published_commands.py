"""Command lines that users already have: they parse, or are refused for stated reasons."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron.config import Machine, TokenizerFacts, parse, resolve
from megatron.errors import ConfigError

# The 345M command of bigscience's start_fast.md, written as its shell script passes it on.
START_FAST = """
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
    --micro-batch-size 4 --global-batch-size 8 --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000
    --lr-decay-style cosine --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --lr-warmup-fraction .01
    --log-interval 10 --save-interval 500 --eval-interval 100 --eval-iters 10 --checkpoint-activations
    --save checkpoints/gpt2 --load checkpoints/gpt2 --data-path my-gpt2_text_document
"""
GPT2 = TokenizerFacts(50257, 50256, "f")

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


def test_the_first_command_of_the_manual() -> None:
    config = parse(shlex.split(START_FAST + "--fp16"))
    assert config.notices == ()
    on_gpu = resolve(config, Machine("cuda", 1, True, True), GPT2)
    assert on_gpu.precision.dtype_name == "float16" and on_gpu.model.padded_vocab_size == 50304
    with pytest.raises(ConfigError, match=r"--fp16 does not train on this machine \(cpu\)\. Use --bf16") as caught:
        resolve(config, Machine("cpu", 1, False, True), GPT2)
    assert len(caught.value.problems) == 1
    on_cpu = parse(shlex.split(START_FAST + "--bf16 --exit-interval 1"))
    assert resolve(on_cpu, Machine("cpu", 1, False, True), GPT2).optim.train_iters == 500000


def test_the_command_of_upstreams_training_tests(tmp_path: Path) -> None:
    settings = tmp_path / "ds.json"
    settings.write_text(
        """{"train_micro_batch_size_per_gpu": 1, "train_batch_size": 16, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1}, "steps_per_print": 2000, "wall_clock_breakdown": false,
        "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
        "initial_scale_power": 12}, "zero_allow_untested_optimizer": true}"""
    )
    config = parse([*shlex.split(UPSTREAM_TEST), "--data-path", "corpus", "--deepspeed_config", str(settings)])
    assert [notice.split()[0] for notice in config.notices] == [
        "--sync-tp-duplicated-parameters",
        "--deepspeed-activation-checkpointing",
        "--partition-activations",
        "--log-level-replica",
    ]
    scale = config.precision
    assert (scale.initial_loss_scale, scale.loss_scale_window, scale.loss_scale) == (4096, 500, None)
    resolved = resolve(config, Machine("cuda", 4, True, True), TokenizerFacts(5120, 0, "f"))
    assert resolved.parallel.data_parallel_size == 1 and resolved.optim.train_iters > 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            "--inference",
            "--inference is refused: the trainer does not generate text. Use tools/generate_samples_gpt.py",
        ),
    ],
)
def test_unsupported_flags_of_upstreams_tests_are_rejected_with_a_reason(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        parse(shlex.split(f"{UPSTREAM_TEST} --data-path corpus {flags}"))
    assert len(caught.value.problems) == 1


def test_weighted_paths_of_upstreams_tests() -> None:
    groups = """--train-weighted-split-paths "TRAIN: 0.2 0:0.2 corpus, 0.8 0.2:0.8 corpus"
        --valid-weighted-split-paths "VALID_A: 0.2 0.8:1 corpus" "VALID_B: 0.2 0.9:1 corpus" """
    config = parse(shlex.split(UPSTREAM_TEST.replace("--split 949,50,1", "") + groups))
    assert len(config.data.train_groups[0].entries) == 2 and len(config.data.valid_groups) == 2


def test_a_large_published_run() -> None:
    config = parse([word.replace("\n", "") for word in LARGE_RUN.split()])
    resolved = resolve(config, Machine("cuda", 384, True, True), TokenizerFacts(250680, 2, "f"))
    assert resolved.parallel.data_parallel_size == 8 and resolved.parallel.effective_zero_stage == 1
    levels = [192 + 32 * level for level in range(58)]  # each lasts 1/58 of the ramp-up
    expected = sum(9_765_625 / 58 / size for size in levels) + (220_000_000 - 9_765_625) / 2048
    assert abs(resolved.optim.train_iters - expected) < len(levels)


def test_tensor_parallelism_on_one_process_is_rejected_instead_of_clamped() -> None:
    config = parse(shlex.split(UPSTREAM_TEST + "--data-path corpus"))
    with pytest.raises(ConfigError, match="needs a multiple of 4 processes, and 1 was started"):
        resolve(config, Machine("cuda", 1, True, True), TokenizerFacts(5120, 0, "f"))
