"""Every shell block of the documents is run by a test or says why not; tables that are said to be computed are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from megatron.config import parse
from megatron.engine.memory.closed_form import Partitioning, predicted_bytes
from tests.helpers.architecture.tables import LOADED_LATER
from tests.helpers.commands.recording_shell import recorded

ROOT = Path(__file__).resolve().parents[2]
# The test that runs the blocks of a document, but for those that say why they are not run.
RUN_BY = {
    "README.md": "docs/test_readme.py",  # by their parsers; the same programs are run for docs/training.md
    "docs/checkpoints.md": "docs/guides/test_checkpoint_guide.py",
    "docs/dashboard.md": "tools/test_dashboard.py",
    "docs/data.md": "docs/guides/test_data_guide.py",
    "docs/distillation.md": "docs/guides/test_distillation_guide.py",
    "docs/evaluation.md": "docs/guides/test_evaluation_guide.py",
    "docs/evaluation_harness.md": "trident/evaluate/harness/test_running.py",
    "docs/finetuning.md": "docs/guides/test_finetuning_guide.py",
    "docs/foreign_checkpoints.md": "docs/guides/test_foreign_guide.py",
    "docs/generation.md": "docs/guides/test_generation_guide.py",
    "docs/hugging_face.md": "tools/convert/test_hugging_face_tools.py",
    "docs/kernels.md": "tools/test_build_kernels.py",
    "docs/launching.md": "docs/guides/test_launching_guide.py",
    "docs/long_sequences.md": "docs/test_long_sequences_guide.py",
    "docs/masked_language_models.md": "docs/guides/test_masked_guide.py",
    "docs/operations.md": "docs/guides/test_operations_guide.py",
    "docs/pipelines.md": "docs/guides/test_pipelines_guide.py",
    "docs/recipes.md": "docs/test_recipes_guide.py",
    "docs/scaling.md": "docs/test_scaling_guide.py",
    "docs/prefix_lm.md": "docs/guides/test_prefix_guide.py",
    "docs/published_commands.md": "docs/site/test_published_commands.py",
    "docs/serving.md": "docs/guides/test_serving_guide.py",
    "docs/training.md": "docs/test_readme.py",
    "docs/tutorial_deepspeed.md": "seeds/hello_deepspeed/test_003_5.py",
    "docs/watching_a_run.md": "docs/guides/test_watching_guide.py",
    "docs/seeds/dsgpt2.md": "seeds/dsgpt2/example.py",
    "docs/seeds/gpt2_all_in.md": "examples/test_gpt2_all_in_guide.py",
    "docs/seeds/hello_deepspeed.md": "seeds/hello_deepspeed/test_003_5.py",
    "docs/seeds/jax_lm_training.md": "helpers/projects/jax_lm_page.py",
    "docs/seeds/turkish_gpt2.md": "seeds/turkish_gpt2/guide.py",
}
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix() for pattern in ("*.md", "docs/**/*.md") for path in ROOT.glob(pattern)
)
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?:bash|shell|sh|console)\n(?P<text>.*?)^```", re.M | re.S
)


def unaccounted(document: str, text: str) -> list[str]:
    """The blocks of a document that no test runs and that do not say why."""
    if document in RUN_BY:
        return []
    return [block["text"] for block in _BLOCK.finditer(text) if len((block["reason"] or "").split()) < 2]


def test_every_block_is_run_or_says_why_not() -> None:
    left = {name: unaccounted(name, (ROOT / name).read_text(encoding="utf-8")) for name in DOCUMENTS}
    assert {name: blocks for name, blocks in left.items() if blocks} == {}, (
        "name the test that runs them in RUN_BY, or write <!-- not run: REASON --> above"
    )
    assert sum(len(_BLOCK.findall((ROOT / name).read_text(encoding="utf-8"))) for name in DOCUMENTS) > 80
    assert unaccounted("docs/new.md", "```bash\nls\n```\n") == ["ls\n"]
    assert unaccounted("docs/new.md", "<!-- not run: later -->\n```bash\nls\n```\n") == ["ls\n"]
    assert unaccounted("docs/new.md", "<!-- not run: needs a cluster -->\n```bash\nls\n```\n") == []


def test_every_test_that_is_named_reads_its_document() -> None:
    for document, test in RUN_BY.items():
        parts = Path(document).parts
        text = (ROOT / "tests" / test).read_text(encoding="utf-8")
        assert parts[-1] in text and (ROOT / document).is_file(), (document, test)


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name.startswith("docs/")])
def test_a_page_begins_with_its_title_and_what_the_reader_gets(document: str) -> None:
    title, _, first = (ROOT / document).read_text(encoding="utf-8").partition("\n")
    assert re.fullmatch(r"# \S.+", title)
    begins = re.match(r"\n[^#<|-].{40,}", first) and not first.startswith("\n```")
    assert begins, f"{document}: the first sentence says what the reader gets"


def test_the_configuration_of_the_neox_page_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/coming_from/gpt_neox.md writes its file of flags itself."""
    text = (ROOT / "docs" / "coming_from" / "gpt_neox.md").read_text(encoding="utf-8")
    (command,) = recorded("\n".join(block["text"] for block in _BLOCK.finditer(text)), tmp_path)
    monkeypatch.chdir(tmp_path)
    request = parse(command[command.index("pretrain_gpt.py") + 1 :])
    assert (request.model.num_layers, request.optim.global_batch_size, request.saving.keep_last) == (12, 32, 4)
    assert request.model.position_embedding_type == "rope" and request.precision.bf16


def test_the_page_of_the_tools_lists_every_program() -> None:
    page = (ROOT / "tools" / "README.md").read_text(encoding="utf-8")
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "tools").rglob("*.py")}
    programs = {name: path for name, path in files.items() if name not in LOADED_LATER}
    rows = dict(re.findall(r"^\| `([\w/]+\.py)` \| (.+) \|$", page, flags=re.M))
    texts = {name: ast.get_docstring(ast.parse(path.read_text())) or "" for name, path in programs.items()}
    assert rows == {name: text.partition("\n")[0] for name, text in texts.items()}


def table_of(name: str) -> list[list[str]]:
    """The rows of a table of docs/choosing_a_layout.md that says it is computed, its head first."""
    page = (ROOT / "docs" / "choosing_a_layout.md").read_text(encoding="utf-8")
    text = page.partition(f"<!-- computed: {name} -->\n\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [rows[0], *rows[2:]]


def test_gigabytes_of_a_layout_are_those_of_the_closed_form() -> None:
    head, *rows = table_of("gigabytes")
    sizes = [float(cell.removesuffix(" B")) * 1e9 for cell in head[4:]]
    assert len(rows) == 9 and len(sizes) == 4
    for ranks, split, copies, stage, *shown in rows:
        assert int(ranks) == int(split) * int(copies)
        how = Partitioning(int(stage), int(copies), weight_bytes=2)
        held = [predicted_bytes([[int(size / int(split))]], how).total / 1e9 for size in sizes]
        assert shown == [f"{amount:.1f}" for amount in held]


def test_the_idle_share_of_a_pipeline_is_that_of_its_formula() -> None:
    head, *rows = table_of("idle share")
    for stages, *shown in rows:
        waits = int(stages) - 1
        micro_batches = [int(cell.removeprefix("m = ")) for cell in head[1:]]
        assert shown == [f"{100 * waits / (count + waits):.1f} %" for count in micro_batches]
