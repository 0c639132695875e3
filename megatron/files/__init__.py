"""Files as such: opening foreign files, replacing a file durably, adding to one, exact reads and writes.

One mechanism each, which every other package uses. Knows paths and bytes, and of what the bytes mean no more than JSON
and YAML. It may import nothing but `megatron/errors.py` and `megatron/secret_text.py`.
"""
