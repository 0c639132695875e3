"""What the user asked for: one frozen dataclass per area, the flags made from them, and the rules between them.

Imports neither torch nor numpy, reads no environment variable and opens no socket; `parse` sees flags and files only.
"""
