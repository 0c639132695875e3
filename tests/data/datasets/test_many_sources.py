"""Blends of more sources than a byte can number, and more files than a process may hold open at first."""

from megatron.data.build import build_split_datasets, describe
from megatron.data.sources.source import DataRequest
from tests.config.command_lines import small
from tests.data.corpora import write_corpus
from tests.data.datasets.token_datasets import MANY_SOURCES


def test_three_hundred_sources_named_in_files(tmp_path, few_open_files):
    write_corpus(tmp_path / "part", [11, 5, 17] * 40)
    prefixes = []
    for number in range(MANY_SOURCES):
        for suffix in (".bin", ".idx"):
            (tmp_path / f"part{number}{suffix}").symlink_to(tmp_path / f"part{suffix}")
        prefixes.append(str(tmp_path / f"part{number}"))
    for name, part in (("train", "0:0.9"), ("valid", "0.9:1")):
        entries = ", ".join(f"{1 + number % 2} {part} {prefix}" for number, prefix in enumerate(prefixes))
        (tmp_path / name).write_text(f'"{name}: {entries}"\n')
    flags = f"--train-weighted-split-paths-path {tmp_path}/train --valid-weighted-split-paths-path {tmp_path}/valid"
    data = small(flags, drop="--data-path").data
    datasets, plan = build_split_datasets(DataRequest(data, 8, 1234, (900, 300, 0)))
    taken = [datasets.train.source_of(sample) for sample in range(900)]
    assert [taken.count(number) for number in range(MANY_SOURCES)] == [2, 4] * (MANY_SOURCES // 2)
    assert len({tuple(datasets.train[sample]) for sample in range(900)}) == 4
    lines = describe(datasets, plan)
    assert len(lines) == 2 * MANY_SOURCES
    assert f"train: {prefixes[299]} [0, 108): 4 samples (0.44%, target 0.44%), 0.03 epochs of 1,188 tokens" in lines
