"""What a run shows before its first step: its size, its ranks, its data and where it writes."""
