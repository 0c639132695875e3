"""The choice of tokens from the network's scores, and their text. Runs no network.

A choice depends only on the scores, the settings, the tokens so far, the seed and the index of the sample; not on other
sequences of the batch, nor on the layout.
"""

from megatron.inference.sampling.choosing import Chooser, TokenChoice, choose, score
from megatron.inference.sampling.settings import Sampling
from megatron.inference.sampling.text_stream import TextStream

__all__ = ["Chooser", "Sampling", "TextStream", "TokenChoice", "choose", "score"]
