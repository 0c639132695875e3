"""Expert parallelism: which token goes to which expert, and the exchange of tokens between ranks that hold
different experts.

Nothing here knows how a token's experts are chosen or what an expert computes.
"""
