"""What the rules of the architecture go by: the order of packages, who may import what, and how large things may be."""

from __future__ import annotations

# Import order: a file only imports packages with a lower number; `train` and `inference` have the same.
PACKAGE_PLACES = {
    "errors": 0,
    "secret_text": 0,
    "files": 1,
    "log": 2,
    "process_exit": 3,
    "device": 3,
    "cuda_driver": 3,
    "host_memory": 3,
    "processor": 3,
    "slurm": 3,
    "config": 4,
    "kernels": 5,
    "tokenizers": 6,
    "data": 7,
    "parallel": 9,
    "model": 10,
    "objective": 11,
    "engine": 12,
    "checkpoint": 13,
    "observe": 15,
    "train": 18,
    "inference": 18,
}
# The packages of `trident/`, each of which imports `megatron` and no other of them; the trainer imports none.
COMPANIONS = frozenset({"checkpoints", "convert", "corpus", "dashboard", "evaluate", "launch", "plan", "serve"})
# The programs in the root, and the folders of the others; no module imports one.
PROGRAMS = frozenset(
    {
        "finetune_t0_non_causal_decoder",
        "pretrain_bert",
        "pretrain_gpt",
        "pretrain_prefix_lm",
        "train_on_text",
    }
)
PROGRAM_FOLDERS = ("tools", "tasks", "examples", "docs")
# Modules there that a program imports after reading its flags, as `megatron.config.Program` does every `log_style.py`.
LOADED_LATER = (
    "examples/demo_texts/",
    "tools/corpus/examination.py",
    "tools/runs/sample_order.py",
    "tools/runs/schedule_comparison.py",
    "tools/runs/schedule_drawing.py",
    "tools/runs/zero_stages.py",
)

# Projects whose programs are in `examples/`; the package names them only in docstrings and comments, as sources.
PROJECTS = r"all.?in.?one|gpt2.?all.?in|hello.?deepspeed|jax.?lm|dsgpt2"
# But for formats of texts that are chosen by the name of the project they come from.
NAMES_FORMATS = (
    "megatron/config/objective/finetuning.py",
    "trident/corpus/vocabulary/learning.py",
    "megatron/tokenizers/chat/named.py",
)
# Files of the root that every project has, and that a reader need not look at; those with a leading dot as well.
METADATA = frozenset(
    {
        *("CHANGELOG.md", "CITATION.cff", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE", "README.md"),
        "SECURITY.md",
    }
)

# The sub-packages of a package in import order; "." means the package's own modules, except those named.
SUBPACKAGE_ORDER: dict[str, tuple[str, ...]] = {
    "megatron.tokenizers": ("encoders", ".", "chat"),
    "megatron.data.datasets": ("examples", "sample", "masked", "."),
    "megatron.data": ("formats", "order", "datasets", "sources", "stores", "."),
    "trident.corpus": (
        "inputs",
        "workers",
        "preprocess",
        "featurize",
        "vocabulary",
        "stores",
        "cleaning",
        ".",
    ),
    "megatron.config": (
        *("flags", "architecture", "objective", "sections", "files", "machine", "schedule", "run_sections"),
        *("rules", "."),
    ),
    "megatron.kernels": (".", "attention", "native"),
    "megatron.observe": (
        "speed",
        "quantities",
        "routing",
        "metrics",
        "names",
        "console",
        "destinations",
        ".",
        "styles",
    ),
    "megatron.parallel": ("schedule", ".", "expert", "sequence", "tensor", "watch"),
    "megatron.model": ("interface", "blocks", "."),
    "megatron.model.blocks": ("dropout", "norm", "position", "attention_forms", "."),
    "megatron.checkpoint": (
        "object_storage",
        "storage",
        "checks",
        "catalogue",
        "layout",
        "manifests",
        ".",
        "retention",
    ),
    "megatron.train": ("preflight", "restarts", ".", "start_up", "callbacks", "build"),
    "megatron.engine": (
        *("buckets", "gradients"),
        *("ds_config", "grid", "tensor_parts", "optimizers", "deepspeed_internals"),
        ".",
        *("passes", "pipeline", "engine", "state", "weight_norms", "replicas", "memory"),
    ),
    "megatron.inference": ("sampling", ".", "beams", "generation"),
    "trident.serve": ("requests", "execution", "."),
    "trident.dashboard": (".", "curves"),
    "trident.plan": (".", "dry_run"),
    "trident.convert": ("pickles", "hugging_face", "megatron_format", "deepspeed_format", "megatron_output", "."),
    "trident.evaluate": (".", "baselines", "tasks", "completer", "harness", "training", "results", "task_runner"),
    "trident.convert.hugging_face": ("table", "families", "."),
    "trident.corpus.cleaning": ("documents", "filters", "near_duplicates", "."),
}

# What is foreign, and the files that may touch it. A name covers its attributes.
HOMES = {
    # The second writes what Megatron-LM stores its arguments in.
    "argparse": ("megatron/config/flags/command_line.py", "trident/convert/megatron_output/output_tensors.py"),
    "deepspeed": ("megatron/engine/",),
    "torch.cuda": ("megatron/device.py", "megatron/kernels/"),
    "torch.distributed": ("megatron/parallel/", "trident/plan/dry_run/recording.py"),
    "os.environ": (
        "megatron/device.py",
        "megatron/cuda_driver.py",
        "trident/launch/launching.py",
        "megatron/parallel/joining.py",
        "megatron/parallel/rank_start.py",
    ),
    "os.getenv": ("megatron/device.py",),
    "os.putenv": (),
    "sys.exit": ("megatron/process_exit.py",),
    "os._exit": ("megatron/process_exit.py", "megatron/train/watchdog.py", "trident/corpus/workers/pool.py"),
    "pickle": ("trident/convert/pickles/unpickler.py",),  # with every name replaced, in a child process with limits
    "cPickle": (),
    "dill": (),
    "cloudpickle": (),
    "joblib": (),
    "shelve": (),
    "marshal": (),
    "torch.load": (),
    "torch.save": ("trident/convert/megatron_output/output_tensors.py",),  # other programs' formats are pickles
    "torch.serialization": (),
    "os.system": (),
    "os.popen": (),
    "subprocess.getoutput": (),
    "subprocess.getstatusoutput": (),
    "runpy": ("examples/jax_lm_training/jax_lm/preprocess.py",),  # Beam pickles what is in __main__ by value
}

# Who renames and syncs files, or parses what is in one.
FILES_OF_THEIR_OWN = ("megatron/files/",)

# What DeepSpeed's documentation promises, and its own attributes, which only one folder may touch.
DEEPSPEED_DOOR = "megatron/engine/deepspeed_internals/"
DEEPSPEED_PUBLIC = (
    "deepspeed.__version__",
    "deepspeed.init_distributed",
    "deepspeed.initialize",
    "deepspeed.runtime.pipe.schedule",
    "deepspeed.zero.Init",
)

# Packages that may be imported inside a function: they are optional or slow, and one file owns each.
OPTIONAL_PACKAGES: dict[str, tuple[str, ...]] = {
    "bitsandbytes": ("megatron/kernels/optimizer.py",),
    "torch.nn.attention.varlen": ("megatron/kernels/attention/gpu.py",),  # since torch 2.10; takes seconds
    "yaml": ("megatron/files/settings.py",),
    "fcntl": ("trident/corpus/workers/pool.py", "trident/corpus/preprocess/partitions.py"),  # not on every system
    "tokenizers": (
        "megatron/tokenizers/declared.py",
        "megatron/tokenizers/gpt2.py",
        "megatron/tokenizers/hugging_face.py",
        "megatron/tokenizers/tokenizer_files.py",
        "megatron/tokenizers/wordpiece.py",
        "trident/corpus/vocabulary/learning.py",
        "trident/corpus/vocabulary/wordpiece.py",
    ),
    "sentencepiece": ("megatron/tokenizers/sentencepiece.py", "trident/corpus/vocabulary/unigram.py"),
    "huggingface_hub": ("megatron/tokenizers/hugging_face.py",),
    "transformers": ("megatron/tokenizers/hugging_face.py", "trident/convert/hugging_face/reference.py"),
    "gigatoken": ("megatron/tokenizers/encoders/fast_encoder.py",),
    "sentencex": ("trident/corpus/preprocess/sentences.py",),
    "orjson": ("trident/corpus/inputs/lines.py", "trident/corpus/stores/store_table.py"),
    "zstandard": ("trident/corpus/inputs/compressed.py",),
    "ftfy": ("trident/corpus/cleaning/documents/repair.py",),
    "py3langid": ("trident/corpus/cleaning/filters/language.py",),
    "datasketch": ("trident/corpus/cleaning/near_duplicates/signatures.py",),
    "pymongo": ("megatron/data/stores/mongodb.py",),
    "bson": ("megatron/data/stores/mongodb.py",),  # comes with it
    "xxhash": ("trident/corpus/preprocess/provenance.py",),
    "datasets": ("trident/corpus/inputs/hub_rows.py",),
    "pyarrow": (
        "megatron/data/formats/parquet_windows.py",
        "trident/corpus/inputs/hub_rows.py",
        "trident/corpus/inputs/parquet.py",
    ),
    "apache_beam": ("trident/corpus/featurize/beam.py",),
    "starlette": ("trident/serve/web.py",),
    "uvicorn": ("trident/serve/network.py",),
    "prometheus_client": ("trident/serve/metrics.py",),
    "matplotlib": ("trident/dashboard/curves/image.py",),
    "lm_eval": ("trident/evaluate/harness.py",),
    "wandb": ("megatron/observe/destinations/weights_and_biases.py",),
    "tensorboard": ("megatron/observe/destinations/tensorboard.py",),
    "torch.utils.tensorboard": ("megatron/observe/destinations/tensorboard.py",),
    "megatron.data.order._index_builder": ("megatron/data/order/index_map.py",),
}

# The only module state: which rank speaks, set once by the mesh.
STATEFUL_FILES = ("megatron/log.py", "megatron/process_exit.py")

# Modules that may use the whole RunConfig; all others take the smallest section.
USES_RUN_CONFIG = (
    "megatron/config/",
    *(f"megatron/train/{name}.py" for name in ("build", "objectives", "callback", "run", "run_data")),
    *(f"trident/plan/{name}.py" for name in ("command_line", "out_of_memory", "requests")),
    "trident/plan/dry_run/",
    "megatron/train/preflight/",
    "megatron/train/restarts/restore.py",
    "megatron/train/start_up/",
    "megatron/engine/cuda_graphs.py",
    "megatron/engine/ds_config.py",
    "megatron/inference/loaded_model.py",  # a checkpoint holds the configuration of its run
    "megatron/train/callbacks/distillation.py",  # likewise
    "megatron/train/callbacks/saving.py",
    "megatron/train/restarts/restart_policy.py",
)

BANNED_WORDS = {"args", "cfg", "utils", "helpers", "misc", "common", "manager"}
MAXIMUM_FILE_LINES = 500
MAXIMUM_FUNCTION_LINES = 60
LINES_THAT_DESCRIBE_THEMSELVES = 10
MAXIMUM_FOLDER_FILES = 15
# Folders that are lists, one file an entry: they may be long.
LISTS = (
    "examples/configs/",
    "megatron/config/architecture/",
    "megatron/config/rules/",
    "megatron/config/sections/",
    "megatron/kernels/",
    "megatron/model/blocks/",
    "megatron/presets/",
    "megatron/train/callbacks/",
    "trident/convert/hugging_face/families/",
)
