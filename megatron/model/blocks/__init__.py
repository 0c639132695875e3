"""The parts of a network, one kind a file; each maps hidden states and a `StepContext` to hidden states."""
