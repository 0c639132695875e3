"""The pages of interfaces: which modules a program that imports the project starts from, by package.

Their text is made by mkdocstrings from docstrings and signatures, without importing a module.
"""

from __future__ import annotations

from pathlib import Path

# Title, what the page is for, and its modules.
_PAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "config": (
        "Configuration",
        "From flags and files to the configuration that a run works with, and how to declare flags of a program.",
        (
            "megatron.config.parse",
            "megatron.config.resolve",
            "megatron.config.run_config",
            "megatron.config.flags.fields",
            "megatron.config.schedule",
        ),
    ),
    "parallel": (
        "Ranks and layers that are split",
        "The grid of ranks, its groups, where each parameter is, and the layers that are split over ranks.",
        (
            "megatron.parallel.mesh",
            "megatron.parallel.shard_spec",
            "megatron.parallel.tensor.layers",
            "megatron.parallel.tensor.cross_entropy",
        ),
    ),
    "model": (
        "Networks and objectives",
        "The networks as lists of layers that each rank builds its part of, their blocks, and the losses.",
        (
            "megatron.model.gpt",
            "megatron.model.blocks.transformer",
            "megatron.model.blocks.attention",
            "megatron.objective.base",
            "megatron.objective.language_model",
        ),
    ),
    "data": (
        "Token files and samples",
        "Reading and writing `.bin/.idx` files, the order of samples, and the batches of a rank.",
        (
            "megatron.data.formats.indexed",
            "megatron.data.formats.indexed_writer",
            "megatron.data.order.plan",
            "megatron.data.loader",
            "megatron.tokenizers.tokenizer",
            "megatron.tokenizers.library",
        ),
    ),
    "checkpoint": (
        "Checkpoints",
        "Finding, reading, verifying and writing checkpoints, whole or in the pieces that a layout needs.",
        (
            "megatron.checkpoint.recovery",
            "megatron.checkpoint.reader",
            "megatron.checkpoint.saving",
        ),
    ),
    "train": (
        "Training",
        "How a run is put together, its loop, and the engine under it.",
        (
            "megatron.train.build",
            "megatron.train.loop",
            "megatron.train.callback",
            "megatron.train.run",
            "megatron.engine.engine",
        ),
    ),
    "inference": (
        "Generation and evaluation",
        "Loading a checkpoint, generating from it and scoring texts with it, from Python.",
        (
            "megatron.inference.loaded_model",
            "trident.evaluate.loaded_scorer",
            "megatron.inference.generation.generation_engine",
            "megatron.inference.generation.request",
            "megatron.inference.sampling.settings",
            "trident.evaluate.statistics",
        ),
    ),
    "errors": (
        "Errors and exit codes",
        "The errors that a user may see, and the exit code that each ends a program with.",
        ("megatron.errors",),
    ),
}


def interface_pages(root: Path) -> dict[str, str]:
    """Markdown of the pages by their path in the site; modules that a version lacks are left out."""
    pages = {}
    index = "# Interfaces\n\nThe modules to start from when the project is imported, with their docstrings.\n\n"
    for name, (title, about, modules) in _PAGES.items():
        present = [module for module in modules if _file_of(root, module) is not None]
        text = f"# {title}\n\n{about}\n"
        for module in present:
            text += f"\n## {module}\n\n::: {module}\n"
        pages[f"reference/interfaces/{name}.md"] = text
        index += f"* [{title}]({name}.md): {about[0].lower()}{about[1:]}\n"
    return {"reference/interfaces/index.md": index, **pages}


def missing_modules(root: Path) -> list[str]:
    """Modules that the pages name and the package does not have."""
    return [module for _, _, modules in _PAGES.values() for module in modules if _file_of(root, module) is None]


def _file_of(root: Path, module: str) -> Path | None:
    path = root / module.replace(".", "/")
    return next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.exists()), None)
