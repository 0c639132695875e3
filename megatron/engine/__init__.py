"""Training steps of any network and objective on a mesh, and the optimizer state as named pieces.

Only this package imports deepspeed.
"""
