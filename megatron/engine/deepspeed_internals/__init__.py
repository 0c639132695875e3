"""All uses of DeepSpeed's internals; other folders use its documented API only.

Each file names the DeepSpeed 0.19.8 sources it relies on; tests/engine/deepspeed/test_deepspeed_internals.py checks all
names against the installed version.
"""
