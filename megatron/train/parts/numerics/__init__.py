"""Parts that watch the numbers of a run: batches that are passed over, spikes, and copies that must stay equal."""
