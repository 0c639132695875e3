"""Evaluation during training: tasks and sample prompts, as callbacks that the trainer imports by name."""
