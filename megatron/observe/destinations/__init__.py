"""Destinations of metrics besides the console and `metrics.jsonl`, one service per file.

A destination may fail without ending the run. `megatron/observe/report.py` opens and calls them.
"""
