"""What the bytes of a checkpoint must be before anything is made of them: bounded, well-formed, finite.

A digest shows that bytes are those that were written, not who wrote them; so nothing here trusts its input, and nothing
here decides what a checkpoint means.
"""
