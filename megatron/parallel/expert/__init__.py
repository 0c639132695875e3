"""Expert parallelism: the exchange of tokens between ranks that hold different experts.

Independent of the routing of tokens and of the computation of experts.
"""
