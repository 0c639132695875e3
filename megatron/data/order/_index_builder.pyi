import numpy as np

INTERFACE: int

def build_sample_index(
    lengths: np.ndarray, documents: np.ndarray, sequence_length: int, samples: int, wide: bool
) -> np.ndarray: ...
def shuffle(values: np.ndarray, place: int, draws: np.ndarray) -> tuple[int, int]: ...
def build_blend_index(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]: ...
def build_sentence_map(
    lengths: np.ndarray,
    firsts: np.ndarray,
    lasts: np.ndarray,
    epochs: int,
    samples: int,
    most_tokens: int,
    short_ratio: int,
    seed: int,
    least_sentences: int,
    wide: bool,
) -> np.ndarray: ...
