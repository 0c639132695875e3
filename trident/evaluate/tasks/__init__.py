"""Tasks: what a file of text or questions asks of a network, and what is measured from its answers.

A task turns a file into queries, and scores into figures with their standard errors. It knows neither a network nor a
rank: whatever scores the queries, a network or a closed-form baseline, is measured by the same lines.
"""
