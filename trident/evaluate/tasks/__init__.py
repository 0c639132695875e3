"""Tasks: files of texts or questions, and the metrics of a network's answers.

A task turns a file into queries, and scores into metrics with their standard errors. It is independent of networks and
ranks: networks and closed-form baselines are measured by the same code.
"""
