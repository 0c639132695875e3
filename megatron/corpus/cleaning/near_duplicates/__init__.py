"""Near duplicates: MinHash signatures, and the index in which new ones are looked up.

Which of two documents stays is decided in `cleaning/duplicates.py`.
"""
