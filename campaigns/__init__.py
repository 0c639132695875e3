"""Programs that try thousands of random kills, damages, hostile inputs and layouts; `python -m campaigns.run --list`.

The test suite runs a few cases of each (`tests/reliability/test_campaigns.py`). Not part of the installed package.
"""
