"""Near duplicates: MinHash signatures, and the index in which new ones are looked up.

Which of two documents is kept is decided in `cleaning/duplicates.py`.
"""
