"""What a run shows on a terminal while it trains."""
