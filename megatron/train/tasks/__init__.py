"""Tasks during training: what --eval-tasks asks of the network, and how the training engine answers.

Nothing here knows a run or the loop.
"""
