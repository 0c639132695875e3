"""Fine-tuning of a pretrained network on examples with answers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import RUN_MUST_MATCH, flag
from megatron.config.flags.paths import PathUse
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class FinetuningConfig(ConfigSection):
    """The conversion of examples to samples, the number of epochs, and frozen parameters."""

    chat_template: str | None = flag(
        None,
        "chat template: plain, chatml, llama, dsgpt2, or a file with a Jinja template; the tokenizer's if unset, or "
        "plain if it has none",
        resume=RUN_MUST_MATCH,
        path=PathUse.FILE_OR_FOLDER,
    )
    pack_examples: bool = flag(
        False, "pack several examples into each sample, without attention between them", resume=RUN_MUST_MATCH
    )
    copy_prompt_probability: float = flag(
        0.0,
        "probability that the answers of a training sample are replaced by its prompts, drawn anew in each epoch",
        at_least=0,
        at_most=1,
        resume=RUN_MUST_MATCH,
    )
    epochs: int | None = flag(
        None,
        "train for this many epochs instead of --train-iters, --train-samples or --train-tokens",
        at_least=1,
    )
    freeze: tuple[str, ...] = flag(
        (),
        "freeze the parameters whose names match these patterns, such as 'decoder.layers.[0-3].*'",
        nargs="+",
    )
