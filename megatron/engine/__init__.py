"""Training steps: a network, an objective and a mesh to optimizer updates, and optimizer state as named pieces.

Only this package imports deepspeed. It knows no particular network and no particular objective.
"""
