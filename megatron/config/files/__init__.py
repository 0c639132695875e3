"""Files with flags: `--config`, `--deepspeed_config`, and the table of known DeepSpeed keys."""
