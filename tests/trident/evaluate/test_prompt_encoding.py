"""Every way to continue a text gives the network the same tokens, whatever the tokenizer puts around texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.config import EvaluationConfig
from megatron.inference.loaded_model import LoadedModel, open_checkpoint
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.prompts import encode_prompt
from tests.inference.checkpoints import make_checkpoint
from tests.tokenizers.framed import framed_choice
from tools.generate_samples_gpt import GenerateFlags, Generator
from trident.evaluate.completer import LoadedCompleter
from trident.evaluate.training.sample_prompts import open_prompts
from trident.serve.requests.served_model import build_served_model

TEXTS = ["def choose(", "a cat", "<s>a cat", "é"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    checkpoints = make_checkpoint(folder, choice=framed_choice(folder, "<s> $A </s>"))
    return open_checkpoint(str(checkpoints), {}, ParallelMesh.single())


class Noting(LoadedCompleter):
    """Notes the prompts."""

    def continue_tokens(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_texts: Sequence[str]
    ) -> list[str]:
        self.prompts = [list(prompt) for prompt in prompts]
        return [""] * len(prompts)


def test_every_place_encodes_prompts_alike(loaded: LoadedModel, tmp_path: Path) -> None:
    expected = [encode_prompt(loaded.tokenizer, text) for text in TEXTS]
    begin, end = (loaded.tokenizer.special_ids[text] for text in ("<s>", "</s>"))
    assert all(ids.count(begin) == 1 and ids[0] == begin and end not in ids for ids in expected)
    served = build_served_model(loaded)
    assert [list(served.prompt_of_text(text)) for text in TEXTS] == expected
    generator = Generator(GenerateFlags(load="nowhere"), 3, 1, loaded)
    assert [generator.encode(text) for text in TEXTS] == expected
    completer = Noting(loaded)
    completer([*TEXTS, ""], 3, ())
    assert completer.prompts == [*expected, [begin]]
    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS))
    evaluation = EvaluationConfig(sample_prompts=str(tmp_path / "prompts.txt"), sample_tokens=3)
    samples = open_prompts(evaluation, loaded.tokenizer, loaded.config.model, ParallelMesh.single())
    assert samples is not None and [list(ids) for ids in samples.tokens] == expected
