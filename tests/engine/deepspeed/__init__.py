"""What meets DeepSpeed: its settings, groups and private names."""
