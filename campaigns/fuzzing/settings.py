"""Fuzzes what reads settings: `--config`, `--deepspeed_config`, groups of sources, configurations of stores.

    python -m campaigns.run settings --cases 100000 --seed 1 --jobs 2

A case must be refused by a `ConfigError`, or give a run configuration that can be resolved, recorded, shown, and read
back, and settings that DeepSpeed takes; within the limits of `fuzzer.py`.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import shlex
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils import logger

from campaigns.campaign import Plan, Result
from campaigns.fuzzing.fuzzer import Kit, fuzz
from campaigns.fuzzing.mutations import ANY_FILE, JSON, NUMBERS, Files, Mutation
from campaigns.fuzzing.target import Target, check
from megatron.config import Machine, RunConfig, TokenizerFacts, parse, resolve
from megatron.config.files.deepspeed_table import Range, Values, deepspeed_keys
from megatron.config.files.flag_files import preset_names, preset_path
from megatron.data.formats.store_names import is_store_address
from megatron.data.stores.address import StoreAddress
from megatron.engine.ds_config import deepspeed_config
from megatron.errors import ConfigError
from megatron.observe.console import argument_lines
from megatron.secret_text import reveal
from tests.config.command_lines import SMALL

MACHINE, FACTS = Machine("cpu", 1, True, True), TokenizerFacts(1000, 999, "f" * 64)
_FILES_OF_FLAGS = ("run.json", "flags.yaml", "anchors.yaml", "preset.yaml")
_FILES_OF_DEEPSPEED = ("zero2.json", "zero3.json", "bloom.json", "disabled.json")
_PASSWORD = "s3same"

# What users publish, shortened; the third is that of BLOOM.
_DEEPSPEED: dict[str, Any] = {
    "zero2.json": {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 10, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "allgather_bucket_size": 5e8, "overlap_comm": True, "cpu_offload": False},
        "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "prescale_gradients": False,
    },
    "zero3.json": {
        "gradient_accumulation_steps": "auto", "fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 2},
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "sub_group_size": 1e9,
            "stage3_max_live_parameters": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
        },
        "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]}, "timers": {"throughput": {"enabled": False}},
    },
    "bloom.json": {
        "train_micro_batch_size_per_gpu": 2, "train_batch_size": 8, "zero_optimization": {"stage": 0},
        "bf16": {"enabled": True}, "steps_per_print": 2000, "wall_clock_breakdown": False,
    },
    "disabled.json": {
        "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 12},
        "amp": {"enabled": False, "opt_level": "O1"}, "elasticity": {"enabled": False, "max_train_batch_size": 2000},
        "sparse_gradients": False, "flops_profiler": {"enabled": False, "profile_step": 1, "output_file": None},
        "tensorboard": {"enabled": True, "output_path": "x"}, "activation_checkpointing": {"profile": False},
    },
}  # fmt: skip
_ANCHORS = """
base: &base {lr: 1.0e-4, clip-grad: 1.0}
optim: {<<: *base, min_lr: 1.0e-5, micro_batch_size: 2, global_batch_size: 8, train_iters: 10}
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, max_position_embeddings: 64}
data:
  seq_length: 64
  data_path: [1, a/b, 0.5, "mongodb://me:s3same@host/corpus?collection=web"]
""".replace("base: &base", "optim: &base", 1)
_GROUPS = '"train: 1 0:0.9 a/b, 2 0:1 mongodb://me:s3same@host/corpus?collection=web"'
_STORE = {
    "MONGO_CONNECTION_STRING": "mongodb://me:s3same@host:27017/?tlsCertificateKeyFilePassword=s3same&w=1",
    "MONGO_CONNECTION_DB": "corpus", "COLLECTIONS": ["web", "news"], "TEXT_COLUMN": "form",
}  # fmt: skip


def write_settings(folder: Path) -> None:
    """The files that cases begin with."""
    request = parse(shlex.split(SMALL))
    run = {**resolve(request, MACHINE, FACTS).to_json(), "provenance": dict.fromkeys(request.provenance, "given")}
    (folder / "run.json").write_text(json.dumps(run, indent=1))
    words = shlex.split(SMALL)
    (folder / "flags.yaml").write_text(
        "".join(f"{name.lstrip('-')}: {value}\n" for name, value in zip(words, [*words[1:], "true"], strict=True)
                if name.startswith("--") and not value.startswith("--"))
    )  # fmt: skip
    (folder / "anchors.yaml").write_text(_ANCHORS.replace("\noptim: {<<", "\nprecision: {}\nrandom: {<<"))
    (folder / "preset.yaml").write_bytes(preset_path(preset_names()[0]).read_bytes())
    for name, tree in _DEEPSPEED.items():
        (folder / name).write_text(json.dumps(tree))
    (folder / "groups.txt").write_text(_GROUPS)
    (folder / "store.json").write_text(json.dumps(_STORE))


# --- readers --------------------------------------------------------------------------------------


def read_config(folder: Path, undamaged: Path, draw: Random) -> None:
    path = next(folder.iterdir(), folder / "absent.yaml")
    more = shlex.split(SMALL) if draw.random() < 0.5 else []
    _use([*more, "--config", str(path)], path)


def read_deepspeed(folder: Path, undamaged: Path, draw: Random) -> None:
    path = next(folder.iterdir(), folder / "absent.json")
    more = draw.choice(("", "--bf16", "--fp16", "--zero-stage 3", "--clip-grad 1 --loss-scale 8 --fp16"))
    config = _use([*shlex.split(SMALL), *more.split(), "--deepspeed_config", str(path)], path)
    settings = deepspeed_config(config)
    json.dumps(settings).encode()
    given = {**settings, "train_batch_size": settings["train_micro_batch_size_per_gpu"]}
    with contextlib.redirect_stdout(io.StringIO()):
        DeepSpeedConfig(given)  # raises what pydantic and DeepSpeed refuse


def read_groups(folder: Path, undamaged: Path, draw: Random) -> None:
    path = next(folder.iterdir(), folder / "absent.txt")
    words = shlex.split(SMALL)
    place = words.index("--data-path") if "--data-path" in words else len(words)
    kept = [*words[:place], *words[place + 2 :]]
    config = _use([*kept, "--train-weighted-split-paths-path", str(path)], path)
    for group in config.data.train_groups:
        for entry in group.entries:
            is_store_address(entry.prefix) and StoreAddress.of(entry.prefix)


def read_store(folder: Path, undamaged: Path, draw: Random) -> None:
    path = str(next(folder.iterdir(), folder / "absent.json"))
    is_store_address(path)
    address = StoreAddress.of(path)
    check(_PASSWORD not in f"{address!r} {address.shown}", "the address shows its password")
    json.dumps([address.shown, address.only("x")]).encode()
    reveal(address.target).encode()


def _use(words: list[str], path: Path) -> RunConfig:
    """Parses and resolves a command line, and does with it what a run does before it trains."""
    # A password can be told from other text only while the address around it is whole.
    secret = _PASSWORD if path.is_file() and b"//me:s3same@" in path.read_bytes() else "\0"
    try:
        request = parse(words)
        config = resolve(request, MACHINE, FACTS)
    except ConfigError as failure:
        check(secret not in str(failure), f"the refusal shows a password: {failure}")
        str(failure).encode()
        raise
    saved = json.dumps(config.to_json())
    texts = [saved, *argument_lines(config.flat()), *config.notices]
    shown = next((text for text in texts if secret in text), None)
    check(shown is None, f"a record shows a password: {shown}")
    for text in texts:
        text.encode()
    check(RunConfig.from_json(json.loads(saved)).to_json() == json.loads(saved), "the record does not read back")
    return config


# --- mutations ------------------------------------------------------------------------------------

_SCALARS = (
    "~", "true", "-1", "0", "1e999", ".nan", "-.inf", "9" * 400, "9" * 5000, "0x" + "f" * 3000, "1" + ":59" * 3000,
    "1_0", "2020-99-99", "2020-01-01", '"\\0"', '"\\ud800"', "!!binary AAAA", "!!set {a, b}",
    "!!python/object/apply:os.abort []",
    "[]", "{}", "[[1], [2]]", "{a: {b: c}}", "&x [*x]", "&y {z: 1}", "*base", "*nothing", "{<<: *base}", "<<", "? [a]",
    "[" * 50 + "]" * 50, "[" * 5000, "mongodb://u:s3same@h/d", "/dev/zero", "x" * 70_000, "'", '"', "|\n  a\n  b",
    "- a", "!!int s3same", "&b [1,1,1,1,1,1,1,1]\nb2: &c [*b,*b,*b,*b,*b,*b,*b,*b]\nb3: [*c,*c,*c,*c,*c,*c,*c,*c]",
)  # fmt: skip
_LAUGHS = "\n".join(
    ["l0: &l0 [x, x, x, x, x, x, x, x]", *(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 8)}]" for n in range(1, 12))]
)
_MERGES = "\n".join(
    ["m0: &m0 {x: 1}", *(f"m{n}: &m{n}\n  <<: [{', '.join([f'*m{n - 1}'] * 8)}]" for n in range(1, 12))]
)
_VALUES: tuple[Any, ...] = (
    None, True, False, "auto", "", 0, 1, -1, 2, 0.5, 1e9, 5e8, 1e-9, 16, 5000, 2**31, 2**63, 10**300, "cpu", "nvme",
    "none", "fp32", "bf16", "fp16", [], {}, ["all_reduce"], [1], {"enabled": True}, {"enabled": False},
    {"device": "cpu"},
    "x" * 5000, float("inf"), float("nan"), {"enabled": "auto"}, {"a": {"b": {"c": [1, 2, {"d": None}]}}},
    {"throughput": {"enabled": 3}},
)  # fmt: skip


def yaml_value(draw: Random, files: Files) -> Files:
    """The value of a line is replaced by a hostile one."""
    ((name, data),) = files.items()
    lines = data.decode("utf-8", "replace").split("\n")
    for _ in range(draw.choice((1, 1, 2, 3))):
        place = draw.choice([number for number, line in enumerate(lines) if ":" in line] or [0])
        lines[place] = lines[place].partition(":")[0] + ": " + draw.choice(_SCALARS)
    return {name: "\n".join(lines).encode("utf-8", "surrogatepass")}


def yaml_lines(draw: Random, files: Files) -> Files:
    """Lines are repeated, moved, indented, or a bomb is added."""
    ((name, data),) = files.items()
    lines = data.decode("utf-8", "replace").split("\n")
    place = draw.randrange(len(lines))
    change = draw.randrange(6)
    if change == 0:
        lines.insert(draw.randrange(len(lines)), lines[place])
    elif change == 1:
        lines[place] = draw.choice(("  ", "\t", "- ", "? ", "--- ", "%YAML 9\n", "# ", "!!map ")) + lines[place]
    elif change == 2:
        lines += [draw.choice((_LAUGHS, _MERGES))]
    elif change == 3:
        lines += [f"key{number}: {number}" for number in range(draw.choice((3, 300, 15_000)))]
    elif change == 4:
        lines += ["deep:" + "".join(f"\n{' ' * level}a:" for level in range(1, draw.choice((10, 40, 400))))]
    else:
        draw.shuffle(lines)
    return {name: "\n".join(lines).encode("utf-8", "surrogatepass")}


def deepspeed_entries(draw: Random, files: Files) -> Files:
    """Keys of the table are set to values of any type, some of them within their range."""
    ((name, data),) = files.items()
    tree = json.loads(data)
    for _ in range(draw.choice((1, 2, 4, 8))):
        keys = deepspeed_keys()
        key = keys[draw.choice(sorted(keys))]
        *sections, last = key.name.split(".")
        holder = tree
        for section in sections:
            if not isinstance(holder.get(section), dict):
                holder[section] = {}
            holder = holder[section]
        holder[last] = _fitting(draw, key.values) if draw.random() < 0.5 else draw.choice((*_VALUES, *NUMBERS))
    return {name: json.dumps(tree).encode()}


def _fitting(draw: Random, values: Values | None) -> Any:
    if isinstance(values, Range) and not values.is_list:
        least, most = values.least, values.most
        value = draw.choice((least, most, (least + most) / 2, least + 1))
        return int(value) if values.is_whole else value
    if isinstance(values, tuple):
        return draw.choice(values)
    return draw.choice((True, False)) if values is bool else draw.choice(_VALUES)


_ALWAYS_REFUSED = ("missing file", "swapped files", "zero length")
_BYTES = {name: mutation for name, mutation in ANY_FILE.items() if name not in _ALWAYS_REFUSED}
_YAML: dict[str, Mutation] = {"YAML value": yaml_value, "YAML lines": yaml_lines}
_NAMED = r"--|/case"
TARGETS = (
    Target("run.json", (("run.json",),), {**_BYTES, **JSON}, read_config, longest_letters=60_000, names=_NAMED),
    Target(
        "YAML of flags",
        tuple((name,) for name in _FILES_OF_FLAGS[1:]),
        {**_BYTES, **_YAML},
        read_config,
        share=2,
        longest_letters=60_000,
        names=_NAMED,
    ),
    Target(
        "DeepSpeed",
        tuple((name,) for name in _FILES_OF_DEEPSPEED),
        {**_BYTES, **JSON, "entries": deepspeed_entries, "more entries": deepspeed_entries},
        read_deepspeed,
        share=3,
        longest_letters=20_000,
        names=_NAMED,
    ),
    Target(
        "groups", (("groups.txt",),), _BYTES, read_groups, share=0.5, longest_letters=20_000, names=f"{_NAMED}|mongodb"
    ),
    Target(
        "store", (("store.json",),), {**_BYTES, **JSON}, read_store, share=0.5, longest_letters=20_000,
        names=f"{_NAMED}|mongodb",
    ),
)  # fmt: skip


def _load(undamaged: Path) -> None:
    logger.setLevel(logging.CRITICAL)
    for names, read in ((_FILES_OF_FLAGS, read_config), (_FILES_OF_DEEPSPEED, read_deepspeed)):
        for name in names:
            place = undamaged.parent / f"warm-up-{name}"
            place.mkdir()
            (place / name).write_bytes((undamaged / name).read_bytes())
            for seed in range(3):
                with contextlib.suppress(ConfigError):
                    read(place, undamaged, Random(seed))


def run_cases(plan: Plan) -> Iterator[Result]:
    """Fuzzes the files of settings."""
    return fuzz(Kit(TARGETS, write_settings, _load), plan)
