"""How a run would be before it starts: memory and time of every layout, and which one is the fastest that fits.

Arithmetic on the configuration alone, without torch; pipeline schedules are compared and drawn here too. What a rank
in fact sends and holds is walked by `trident/plan/dry_run/`.
"""
