"""Universal folders that are incomplete are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import ConversionError
from tests.trident.convert.foreign.foreign_files import VOCABULARY, foreign, gpt2_arguments, save, write_universal
from trident.convert.foreign import open_foreign
from trident.convert.megatron_format.torch_files import ImportOptions


def test_incomplete_folders_are_refused(tmp_path: Path) -> None:
    made = foreign(gpt2_arguments(num_layers=1))
    folder = write_universal(tmp_path, made, first_version=False) / "global_step3_universal"
    opened = open_foreign(tmp_path, ImportOptions(VOCABULARY))
    assert opened.state.updates == 3
    save({"cat_dim": 0}, folder / "zero" / "3.mlp.dense.weight" / "fp32.pt")
    with pytest.raises(ConversionError, match=r"fp32\.pt holds no tensor"):
        open_foreign(tmp_path, ImportOptions(VOCABULARY))
    save([1], folder / "mp_rank_00_model_states.pt")
    with pytest.raises(ConversionError, match="does not hold a dictionary"):
        open_foreign(tmp_path, ImportOptions(VOCABULARY))
    (folder / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(ConversionError, match=r"holds no mp_rank_00_model_states\.pt"):
        open_foreign(tmp_path, ImportOptions(VOCABULARY))


def test_adams_counter_may_stand_in_the_common_file(tmp_path: Path) -> None:
    made = foreign(gpt2_arguments(num_layers=1))
    folder = write_universal(tmp_path, made, first_version=True) / "global_step3_universal"
    save({"param_groups": [{"step": 9}]}, folder / "zero" / "optimizer_state.pt")
    assert open_foreign(tmp_path, ImportOptions(VOCABULARY)).state.updates == 9
