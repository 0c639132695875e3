"""The networks that a run learns from beside its data."""
