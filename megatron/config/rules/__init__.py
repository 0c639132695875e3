"""Rules between flags, a file a subject: what can be combined, and the way out where it cannot.

What one flag may be stands beside its field. A rule is a generator of sentences, one for each way in which it is
broken, under a decorator of `rule.py` that says when it is checked; `checking.py` finds it by that. Rules are checked
in the order of their files there and of their lines, and see values that are out of bounds or missing: those are
refused anyway, together with all that is broken.
"""
