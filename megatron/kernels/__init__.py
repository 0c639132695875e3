"""Operations that a fused implementation can replace, one kind a file, and a report of what is in use.

All are torch operations today, whose attention, GELU and layer norm are single kernels on GPU and CPU; some have a
backward pass of their own that reads and writes less. `attention` is the general form, `bounded_attention` chooses
forms for documents and windows that compute only what is visible. Nothing outside this package knows which one runs.
"""
