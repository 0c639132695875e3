"""What a run tells those who watch it, in addition to its metrics: events, samples, and where its ranks are.

Three small files in the run folder, written by rank 0: `events.jsonl`, `samples.jsonl`, `heartbeats.json`. Nothing here
may end a run or hold it up.
"""
