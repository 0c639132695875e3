"""Training on examples with answers, from the weights of a pretrained network."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import RUN_MUST_MATCH, flag
from megatron.config.flags.paths import PathUse
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class FinetuningConfig(ConfigSection):
    """How examples become samples, how often they are seen, and which weights they may change."""

    chat_template: str | None = flag(
        None,
        "how conversations are written as text: plain, chatml, llama, dsgpt2, or a file with a Jinja template; if "
        "unset, the tokenizer's own, or plain where it has none",
        resume=RUN_MUST_MATCH,
        path=PathUse.FILE_OR_FOLDER,
    )
    pack_examples: bool = flag(
        False, "fill each sample with several examples, which do not attend to each other", resume=RUN_MUST_MATCH
    )
    copy_prompt_probability: float = flag(
        0.0,
        "share of the training samples, drawn again in each epoch, in which the answers are replaced by the prompts",
        at_least=0,
        at_most=1,
        resume=RUN_MUST_MATCH,
    )
    epochs: int | None = flag(
        None,
        "train for this many passes over the examples instead of --train-iters, --train-samples or --train-tokens",
        at_least=1,
    )
    freeze: tuple[str, ...] = flag(
        (),
        "patterns of parameter names, such as 'decoder.layers.[0-3].*', whose weights stay as they are",
        nargs="+",
    )
