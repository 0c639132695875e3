"""What a run evaluates while it trains: its tasks and its sample prompts, callbacks that the trainer finds by name."""
