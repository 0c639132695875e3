"""The layers of a network, one kind per file; each maps hidden states and a `StepContext` to hidden states."""
