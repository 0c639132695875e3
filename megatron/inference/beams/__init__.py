"""Beam search: the texts that are most probable as a whole. Nothing is drawn."""

from megatron.inference.beams.hypotheses import Beam, BeamSettings
from megatron.inference.beams.search import beam_search

__all__ = ["Beam", "BeamSettings", "beam_search"]
