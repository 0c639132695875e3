"""Operations that a fused implementation can replace, one kind per file, and the choice between implementations.

Each file has the plain torch form, which defines the operation, and calls the compiled one of `csrc/ops`;
`implementation=` selects one, and layers take it from `mesh.kernels`. `attention` has the forms of attention, `native`
builds, loads, measures and chooses the compiled operations.
"""
