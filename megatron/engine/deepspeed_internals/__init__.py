"""What DeepSpeed keeps to itself: no other folder uses a name that its documentation does not promise.

tests/engine/deepspeed/test_deepspeed_internals.py holds every name against the installed version. Each file names where
in DeepSpeed 0.19.8 its names are from.
"""
