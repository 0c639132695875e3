"""How the lines of steps, evaluations and saves look: one style of --log-style per file, all pure functions.

A style is a module with the functions of `megatron.observe.console.LineStyle`.
"""
