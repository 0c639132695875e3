"""Where metrics go besides the console and `metrics.jsonl`: what a destination is, and one service per file.

A destination here may fail without ending the run. `megatron/observe/report.py` opens and calls them.
"""
