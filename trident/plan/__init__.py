"""Plans a run before it starts: estimates memory and time of every layout, and finds the fastest that fits.

Closed-form arithmetic on the configuration, without torch. `trident/plan/dry_run/` simulates every rank.
"""
