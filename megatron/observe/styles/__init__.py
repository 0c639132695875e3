"""Formats of the lines of steps, evaluations and saves: one style of --log-style per file, all pure functions.

A style is a module that implements `megatron.observe.console.LineStyle`.
"""
