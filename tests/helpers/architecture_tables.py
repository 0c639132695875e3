"""What the rules of the architecture go by: the order of packages, who may import what, and how large things may be."""

from __future__ import annotations

# Import order: a file only imports packages with a lower number; `train` and `inference` have the same.
PACKAGE_PLACES = {
    "errors": 0,
    "secret_text": 0,
    "log": 1,
    "device": 2,
    "cuda_driver": 2,
    "config": 3,
    "kernels": 4,
    "launch": 4,
    "tokenizers": 5,
    "data": 6,
    "corpus": 7,
    "parallel": 8,
    "model": 9,
    "objective": 10,
    "engine": 11,
    "checkpoint": 12,
    "convert": 13,
    "observe": 14,
    "evaluation": 15,
    "train": 16,
    "inference": 16,
}
PROGRAM_PLACE = 17
# The programs in the root, and the folders of the others; no module imports one.
PROGRAMS = frozenset(
    {
        "benchmark",
        "ds_trainer",
        "finetune_t0_non_causal_decoder",
        "pretrain_bert",
        "pretrain_gpt",
        "pretrain_prefix_lm",
        "sft",
        "train",
        "train_bert",
        "train_bert_ds",
        "train_lm",
        "train_on_text",
    }
)
PROGRAM_FOLDERS = ("tools", "tasks", "examples")

# The sub-packages of a package in import order; "." stands for the package's own modules, but for those named.
SUBPACKAGE_ORDER: dict[str, tuple[str, ...]] = {
    "megatron.tokenizers": (".", "chat"),
    "megatron.data.datasets": ("examples", "sample", "masked", "."),
    "megatron.data": ("formats", "stores", "order", "datasets", "."),
    "megatron.corpus": (
        "generated",
        "inputs",
        "workers",
        "preprocess",
        "featurize",
        "vocabulary",
        "stores",
        "cleaning",
        ".",
    ),
    "megatron.config": ("flags", "architecture", "objective", "sections", "files", ".", "programs"),
    "megatron.kernels": (".", "attention", "native"),
    "megatron.observe": (
        *("naming", "speed", "start_up", "profiling", ".", "terminal", "curves", "activity", "dashboard", "styles"),
        "sync",
    ),
    "megatron.parallel": (".", "tensor", "watch"),
    "megatron.model": ("interface", "blocks", "."),
    "megatron.checkpoint": ("checks", ".", "keeping", "background", "analysis"),
    "megatron.train": ("preflight", "restarts", "tasks", "teachers", "start_up", ".", "memory"),
    "megatron.engine": (".", "memory"),
    "megatron.inference": ("sampling", ".", "beams", "generation", "serve", "harness"),
    "megatron.inference.serve": ("requests", "running", "."),
    "megatron.convert": ("pickles", "hugging_face", "megatron_format", "deepspeed_format", "megatron_output", "."),
    "megatron.evaluation": (".", "baselines", "tasks", "report"),
    "megatron.convert.hugging_face": ("table", "families", "."),
    "megatron.convert.hugging_face.families": ("encoders", "."),
    "megatron.corpus.cleaning": ("documents", "filters", "near_duplicates", "."),
}
NEVER_BY_TRAINING = "corpus"  # imported by tools only

# What is foreign, and the files that may touch it. A name covers its attributes.
HOMES = {
    # The second writes what Megatron-LM stores its arguments in.
    "argparse": ("megatron/config/flags/command_line.py", "megatron/convert/megatron_output/torch_writer.py"),
    "deepspeed": ("megatron/engine/",),
    "torch.cuda": ("megatron/device.py", "megatron/kernels/"),
    "torch.distributed": ("megatron/parallel/",),
    "os.environ": (
        "megatron/device.py",
        "megatron/cuda_driver.py",
        "megatron/launch/launching.py",
        "megatron/parallel/joining.py",
        "megatron/parallel/rank_start.py",
    ),
    "os.getenv": ("megatron/device.py",),
    "os.putenv": (),
    "sys.exit": ("megatron/log.py",),
    "os._exit": ("megatron/log.py", "megatron/train/watchdog.py", "megatron/corpus/workers/pool.py"),
    "pickle": (),
    "cPickle": (),
    "dill": (),
    "cloudpickle": (),
    "joblib": (),
    "shelve": (),
    "marshal": (),
    "torch.load": (),
    "torch.save": ("megatron/convert/megatron_output/torch_writer.py",),  # other programs' formats are pickles
    "torch.serialization": (),
    "os.system": (),
    "os.popen": (),
    "subprocess.getoutput": (),
    "subprocess.getstatusoutput": (),
    "runpy": (),
}

# Packages that may be imported inside a function: they are optional or slow, and one file owns each.
OPTIONAL_PACKAGES: dict[str, tuple[str, ...]] = {
    "apex": ("megatron/kernels/norms.py", "megatron/kernels/optimizer.py"),
    "bitsandbytes": ("megatron/kernels/optimizer.py",),
    "torch.nn.attention.varlen": ("megatron/kernels/attention/gpu.py",),  # since torch 2.10; takes seconds
    "yaml": ("megatron/config/files/bounded_file.py",),
    "fcntl": ("megatron/corpus/workers/pool.py", "megatron/corpus/preprocess/partitions.py"),  # not on every system
    "tokenizers": (
        "megatron/tokenizers/gpt2.py",
        "megatron/tokenizers/hugging_face.py",
        "megatron/tokenizers/package.py",
        "megatron/tokenizers/wordpiece.py",
        "megatron/corpus/vocabulary/learning.py",
        "megatron/corpus/vocabulary/wordpiece.py",
    ),
    "sentencepiece": ("megatron/tokenizers/sentencepiece.py", "megatron/corpus/vocabulary/unigram.py"),
    "huggingface_hub": ("megatron/tokenizers/hugging_face.py",),
    "transformers": ("megatron/tokenizers/hugging_face.py", "megatron/convert/hugging_face/reference.py"),
    "gigatoken": ("megatron/tokenizers/fast_encoder.py",),
    "sentencex": ("megatron/corpus/preprocess/sentences.py",),
    "orjson": ("megatron/corpus/inputs/lines.py", "megatron/corpus/inputs/tables.py"),
    "zstandard": ("megatron/corpus/inputs/zstandard_stream.py",),
    "ftfy": ("megatron/corpus/cleaning/documents/repair.py",),
    "py3langid": ("megatron/corpus/cleaning/filters/language.py",),
    "datasketch": ("megatron/corpus/cleaning/near_duplicates/signatures.py",),
    "pymongo": ("megatron/data/stores/mongodb.py",),
    "bson": ("megatron/data/stores/mongodb.py",),  # comes with it
    "xxhash": ("megatron/corpus/preprocess/provenance.py",),
    "datasets": ("megatron/corpus/inputs/hub.py",),
    "pyarrow": (
        "megatron/data/formats/windows.py",
        "megatron/corpus/inputs/hub.py",
        "megatron/corpus/inputs/parquet.py",
    ),
    "apache_beam": ("megatron/corpus/featurize/beam.py",),
    "starlette": ("megatron/inference/serve/web.py",),
    "uvicorn": ("megatron/inference/serve/network.py",),
    "prometheus_client": ("megatron/inference/serve/metrics.py",),
    "matplotlib": ("megatron/observe/curves/image.py",),
    "lm_eval": ("megatron/inference/harness/",),
    "wandb": ("megatron/observe/weights_and_biases.py",),
    "tensorboard": ("megatron/observe/tensorboard.py",),
    "torch.utils.tensorboard": ("megatron/observe/tensorboard.py",),
    "megatron.data.order._index_builder": ("megatron/data/order/index_map.py",),
}

# The only module state: which rank speaks, set once by the mesh.
STATEFUL_FILES = ("megatron/log.py",)

# Modules that may use the whole RunConfig; all others take the smallest section.
USES_RUN_CONFIG = (
    "megatron/config/",
    *(f"megatron/train/{name}.py" for name in ("build", "objectives", "run", "start_up/facts")),
    "megatron/train/preflight/",
    "megatron/engine/ds_config.py",
    "megatron/engine/estimate.py",
    "megatron/inference/loading.py",  # a checkpoint holds the configuration of its run
    "megatron/train/teachers/opening.py",  # likewise
)

BANNED_WORDS = {"args", "cfg", "utils", "helpers", "misc", "common", "manager", "handler"}
# Methods that a base class describes: an override says nothing new.
DESCRIBED_BY_THEIR_BASE = {"problems", "complete", "forward", "backward"}
MAXIMUM_FILE_LINES = 500
MAXIMUM_FUNCTION_LINES = 60
MAXIMUM_FOLDER_FILES = 15
