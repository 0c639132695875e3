"""Which name and which template a checkpoint is served with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.inference.loading import LoadedModel, open_checkpoint
from megatron.inference.serve.opening import model_name, served_model
from megatron.parallel.mesh import ParallelMesh
from tests.inference.checkpoints import make_checkpoint
from tests.tokenizers.chat.tokenizers_with_tokens import DSGPT2_TOKENS


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A checkpoint of a run that was fine-tuned with dsGPT2's template."""
    folder = tmp_path_factory.mktemp("chat")
    checkpoints = make_checkpoint(folder, "--chat-template", "dsgpt2", more_tokens=DSGPT2_TOKENS)
    return open_checkpoint(str(checkpoints), {}, ParallelMesh.single())


def test_the_template_is_that_of_the_fine_tuning_unless_one_is_given(loaded: LoadedModel) -> None:
    served = served_model(loaded)
    assert served.template.name == "dsgpt2" and served.is_chat and served.name == "checkpoints"
    assert (
        served.tokenizer.decode(served.prompt_of_messages([{"role": "user", "content": "q"}]))
        == "<usr><s>q</s><sys><s>"
    )
    plain = served_model(loaded, "mine", "plain")
    assert plain.template.name == "plain" and plain.is_chat and plain.name == "mine"
    assert plain.fingerprint != served.fingerprint == served_model(loaded).fingerprint


def test_a_model_without_a_template_continues_texts(loaded: LoadedModel) -> None:
    finetuning = replace(loaded.config.finetuning, chat_template=None)
    pretrained = replace(loaded, config=replace(loaded.config, finetuning=finetuning))
    served = served_model(pretrained)
    assert served.template.name == "plain" and not served.is_chat
    assert (served.positions, served.vocab_size) == (48, loaded.vocab_size)


def test_a_template_needs_its_tokens(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"--chat-template llama needs the special tokens .*<\|eot_id\|>"):
        served_model(loaded, chat_template="llama")


def test_the_name_is_that_of_the_folder(tmp_path: Path) -> None:
    assert model_name(tmp_path / "chat" / "iter_0000003") == "chat" and model_name(Path("/iter_0000003")) == "model"
