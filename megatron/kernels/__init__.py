"""Operations that a fused implementation can replace, one kind a file, and a report of what is in use.

All are plain torch today, whose attention, GELU and layer norm are single kernels on GPU and CPU. Kernels of our own or
of another package stand behind the same functions; nothing outside this package knows which one runs.
"""
