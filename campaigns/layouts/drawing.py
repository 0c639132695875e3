"""A random combination, drawn from a seed until the configuration's own checks accept it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

from docs.site.layout_survey import AXES
from megatron.config import Machine, RunConfig
from megatron.config.sections.optimizers import LION, OPTIMIZERS
from megatron.engine.ds_config import deepspeed_config
from megatron.errors import ConfigError
from tests.parity.layouts import layout_config
from tests.parity.reference import Recipe
from tests.parity.switches import SWITCHES

RANKS = (2, 4)
LAYERS = 3  # the number of entries of lists in `SWITCHES` that have one for each block
BUCKETS_ELEMENTS = (300, 2000, 9000)  # of networks of 20,000 to 100,000 values
# What changes a layout and not what is learned.
AXES_OF_LAYOUTS = ("pipeline", "ZeRO", "tensor parallelism", "sequences", "recompute", "optimizer state")
# The default is so small that Adam takes the sign of gradients that are rounding alone.
EPSILON = ("--adam-eps", "1e-4")
FROZEN = (
    ("embedding.*",),
    ("decoder.layers.0.*",),
    ("decoder.layers.1.*", "decoder.layers.2.*"),
    ("*bias",),
    ("*norm*",),
    ("embedding.*", "decoder.layers.[01].*"),
)
# Relative differences of losses, of the first gradient norm, of all norms and of tensors that are rounding.
LIMITS = {
    "float32": (2e-6, 2e-6, 2e-5, 2e-4),
    "signs": (1e-4, 2e-6, 1e-3, 2e-2),
    "bf16": (
        1e-2,
        1e-2,
        1e-1,
        5e-1,
    ),  # squares of gradients, each of which is 1 to 6 % from float32 in one process, too
}
EXPERTS = ("--num-experts", "4", "--moe-ffn-hidden-size", "16", "--moe-aux-loss-coeff", "0.1")


@dataclass(frozen=True)
class Case:
    """A network and its layout.

    Attributes:
        model: the name of the architecture.
        words: flags of one process as well.
        layout: flags of the layout.
        bucket_elements: `reduce_bucket_size` in the layout, if not DeepSpeed's.
        skipped_step: the step that is skipped because its gradients are NaN.
    """

    seed: int
    recipe: Recipe
    model: str
    words: tuple[str, ...]
    ranks: int
    layout: tuple[str, ...]
    bucket_elements: int | None
    skipped_step: int | None

    def config(self, folder: Path, *, is_alone: bool) -> RunConfig:
        """The resolved configuration of the layout, or of one process.

        Raises:
            ConfigError: it cannot be trained.
        """
        words = [*self.words, *([] if is_alone else self.layout)]
        if self.bucket_elements is not None and not is_alone:
            words += ["--deepspeed_config", str(_bucket_file(folder, self.bucket_elements))]
        ranks = 1 if is_alone else self.ranks
        machine = Machine(device_type="cpu", world_size=ranks, supports_fp16=False, supports_bf16=True)
        config = layout_config(self.recipe, (1, 1, ranks), 0 if is_alone else 1, words, machine)
        deepspeed_config(config)
        return config

    @property
    def takes_signs(self) -> bool:
        """True if the optimizer updates by the sign of gradients, some of which are rounding alone."""
        return LION in self.words

    @property
    def numbers(self) -> str:
        """The row of `LIMITS` for the case."""
        return "bf16" if "--bf16" in self.words else "signs" if self.takes_signs else "float32"

    @property
    def limits(self) -> tuple[float, ...]:
        """The largest relative differences from one process that are rounding, in the order of `Distance`."""
        return LIMITS[self.numbers]

    @property
    def text(self) -> str:
        """A description from which the case can be run again."""
        parts = (*self.words, "|", *self.layout, "| ranks", self.ranks, "layers", self.recipe.num_layers)
        more = f"micro-batch {self.recipe.micro_batch_size} of {self.recipe.global_batch_size}"
        rest = f"bucket {self.bucket_elements}, skipped step {self.skipped_step}"
        return f"seed {self.seed}, {self.model}: {' '.join(map(str, parts))}, {more}, {rest}"


def draw(seed: int, folder: Path) -> Case:
    """The case of a seed.

    Args:
        folder: for the files that flags name, written here: ranks only read them.
    """
    for elements in BUCKETS_ELEMENTS:
        content = {"zero_optimization": {"reduce_bucket_size": elements}}
        _bucket_file(folder, elements).write_text(json.dumps(content))
    random = Random(seed)
    while True:
        case = _drawn(random, seed)
        try:
            case.config(folder, is_alone=False)
            case.config(folder, is_alone=True)
        except ConfigError:
            continue
        return case


def _bucket_file(folder: Path, elements: int) -> Path:
    return folder / f"buckets_{elements}.json"


def _drawn(random: Random, seed: int) -> Case:
    is_skipped = random.random() < 0.15
    recipe = dataclasses.replace(
        Recipe(),
        num_layers=random.choice((3, 4, 5)),
        steps=2 + is_skipped,
        micro_batch_size=random.choice((1, 2)),
        global_batch_size=8,
        learning_rate=2.0e-3,
    )
    model = random.choice(("plain", *SWITCHES))
    words = [*_for_layers(SWITCHES.get(model, []), recipe.num_layers), *EPSILON]

    def perhaps(share: float, *flags: str) -> None:
        if random.random() < share:
            words.extend(flags)

    if "--num-experts" not in words:
        perhaps(0.2, *EXPERTS)
    perhaps(0.2, "--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid")
    perhaps(0.1, "--mtp-num-layers", "1")
    perhaps(0.2, "--untie-embeddings-and-output-weights")
    perhaps(0.3, "--hidden-dropout", "0.1")
    perhaps(0.3, "--freeze", *random.choice(FROZEN))
    perhaps(0.5, "--optimizer", random.choice(OPTIMIZERS))
    perhaps(0.2, "--ema-decay", "0.9")
    perhaps(0.15, "--bf16")
    layout = [word for axis in AXES_OF_LAYOUTS for word in random.choice(list(AXES[axis].values())).split()]
    for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
        if random.random() < 0.15:
            layout += [flag, "4"]
    if "--num-experts" in words and random.random() < 0.6:
        layout += ["--expert-model-parallel-size", random.choice(("2", "4"))]
        layout += random.choice(([], ["--expert-tensor-parallel-size", "1"]))
    if random.random() < 0.3:
        layout.append("--no-gradient-accumulation-fusion")
    return Case(
        seed,
        recipe,
        model,
        tuple(words),
        random.choice(RANKS),
        tuple(layout),
        random.choice(BUCKETS_ELEMENTS) if random.random() < 0.6 else None,
        1 if is_skipped else None,
    )


def _for_layers(flags: list[str], layers: int) -> list[str]:
    """The flags with lists that have an entry for each block extended: the last entry is repeated."""
    longer: list[str] = []
    length = 0  # of the list that a flag begins
    for word in [*flags, "--"]:
        if word.startswith("--"):
            longer += longer[-1:] * (layers - LAYERS if length == LAYERS else 0)
            length = 0
        else:
            length += 1
        longer.append(word)
    return longer[:-1]
