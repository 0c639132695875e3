"""Files that flags are read from: `--config`, `--deepspeed_config` and the DeepSpeed keys that are known."""
