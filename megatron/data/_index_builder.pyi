import numpy as np

INTERFACE: int

def build_sample_index(
    lengths: np.ndarray, documents: np.ndarray, sequence_length: int, samples: int, wide: bool
) -> np.ndarray: ...
def build_blend_index(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]: ...
