"""GPT2-ALL-IN's programs: `train.py`, `benchmark.py` and `sft.py`, with their flags and configuration files."""
