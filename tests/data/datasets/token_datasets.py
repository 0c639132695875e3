"""Datasets of small token files, built as a run would."""

from megatron.config import DataConfig
from megatron.data.build import build_split_datasets
from megatron.data.sources.source import DataRequest

SEQUENCE_LENGTH = 8
MANY_SOURCES = 300  # more than a byte can number


def build(data: DataConfig, samples=(9, 0, 0), plan=None, seed=1234, sequence_length=SEQUENCE_LENGTH, **options):
    """The datasets of a configuration and their plan."""
    return build_split_datasets(DataRequest(data, sequence_length, seed, samples, plan, **options))


def config(*path: str, split: str = "1,0,0", **flags) -> DataConfig:
    """A data section that reads these words of `--data-path`."""
    return DataConfig(seq_length=SEQUENCE_LENGTH, data_path=path, split=split, **flags)


def rows_of(dataset, first: int = 0, last: int | None = None) -> list[list[int]]:
    """The tokens of samples `first` to `last`, or to the end."""
    return [dataset[sample].tolist() for sample in range(first, len(dataset) if last is None else last)]
