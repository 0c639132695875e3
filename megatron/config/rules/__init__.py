"""Rules between flags, one file per subject. Bounds of a single flag are declared with its field.

A rule is a generator that yields a sentence for each violation. A decorator of `rule.py` sets the phase of its
check; `checking.py` collects the rules in the order of files and lines. Rules also receive values that are missing or
out of bounds, which are refused separately.
"""
