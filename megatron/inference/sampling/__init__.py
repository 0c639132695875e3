"""The choice of tokens from the network's scores, and the text they make up. Runs no network.

Every choice depends on the scores, the settings, the tokens so far, the seed and the index of the sample, and on
nothing else: not on the other sequences of a batch, and not on the layout.
"""

from megatron.inference.sampling.choosing import Chooser, Chosen, choose, score
from megatron.inference.sampling.settings import Sampling
from megatron.inference.sampling.text_stream import TextStream

__all__ = ["Chooser", "Chosen", "Sampling", "TextStream", "choose", "score"]
