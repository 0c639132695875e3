"""Files that flags are read from: `--config`, `--deepspeed_config`, and the table of known DeepSpeed keys."""
