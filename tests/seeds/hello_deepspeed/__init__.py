"""The scenarios of HelloDeepSpeed."""
