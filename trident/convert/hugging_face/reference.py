"""Reference outputs of `transformers`: logits of a model directory, and its tokenizer. The only file that imports it.

Nothing is downloaded, and no code of the directory is executed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.config import ModelConfig
from megatron.errors import ConfigError, ConversionError
from megatron.host_memory import available_memory_bytes
from trident.convert.hugging_face.proof_batches import ProofBatch, token_gradients

CAUSAL = "AutoModelForCausalLM"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_GRADIENT_COPIES = 4  # memory, in sizes of the embedding: the gradients of input and head, their sum, and activations


@dataclass(frozen=True)
class ReferenceLogits:
    """The logits of batches, and the embedding gradients of the first.

    Shapes: values float32, one per batch: the logits at its positions `[b, positions, v]`; with a sentence order head
    two per batch, the second `[b, 2]`; gradient `[tokens, h]` float32.

    Args:
        attention: the implementation: sdpa or eager.
        learned: the first batch, without an allowed padding token, or with one that is not allowed.
        gradient: its `token_gradients`; None if they do not fit into memory.
        padding: the declared padding token.
    """

    values: tuple[torch.Tensor, ...]
    attention: str
    learned: ProofBatch
    gradient: torch.Tensor | None
    padding: int | None


def check_installed() -> str:
    """The version of `transformers`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import transformers
    except ImportError as failure:
        raise ConfigError(
            "conversion from and to Hugging Face requires transformers to compare logits, which is not installed. "
            "Run pip install 'trident-megatron[hf]'."
        ) from failure
    return str(transformers.__version__)


def reference_logits(
    folder: Path,
    config: Mapping[str, Any],
    batches: Sequence[ProofBatch],
    attention: str,
    auto_class: str,
    *,
    paddings: Container[int],
    is_shortened: bool,
    is_ignored: Callable[[str], bool] = lambda name: False,
) -> ReferenceLogits:
    """Computes logits of a model directory in float32.

    Args:
        config: the fields of `config.json`, possibly with fewer layers.
        attention: sdpa (or the family's replacement), or eager.
        auto_class: the class that loads it, see `auto_class`.
        paddings: allowed padding tokens, whose embeddings transformers does not train.
        is_shortened: the configuration has fewer layers than the files, so that tensors are unused.
        is_ignored: returns True for stored buffers of the family, which may be unused.

    Raises:
        ConversionError: transformers cannot load the directory, or initializes or drops a tensor.
    """
    with _quiet():
        try:
            model, report, used = _load(folder, config, attention, auto_class)
        except Exception as failure:  # the library raises exceptions of any type
            raise ConversionError(
                f"transformers cannot load {folder} ({type(failure).__name__}: {str(failure)[:400]}). Check that "
                f"{auto_class}.from_pretrained loads the directory."
            ) from failure
        unused = () if is_shortened else [name for name in report["unexpected_keys"] if not is_ignored(name)]
        _check_report(folder, {**report, "unexpected_keys": unused})
        outputs = _decoded if auto_class == CAUSAL else _encoded
        learned = _gradient(model, outputs, batches[0], paddings)  # before a long batch changes dynamic RoPE scaling
        with torch.no_grad():
            logits = [values.float() for batch in batches for values in outputs(model, batch)]
    return ReferenceLogits(tuple(logits), used, *learned)


def auto_class(model: ModelConfig) -> str:
    """The class of `transformers` that loads a network with all its heads."""
    if model.sentence_order_head:
        return "AutoModelForPreTraining"
    return "AutoModelForMaskedLM" if model.bidirectional else CAUSAL


def _decoded(model: Any, batch: ProofBatch) -> Iterator[torch.Tensor]:
    yield model(batch.tokens, use_cache=False, logits_to_keep=batch.positions).logits


def _encoded(model: Any, batch: ProofBatch) -> Iterator[torch.Tensor]:
    mask = None if batch.is_text is None else batch.is_text.long()
    output = model(batch.tokens, attention_mask=mask, token_type_ids=batch.token_types)
    logits = output.logits if "logits" in output else output.prediction_logits
    yield logits[:, batch.positions]
    if "seq_relationship_logits" in output:
        yield output.seq_relationship_logits


def _gradient(
    model: Any, outputs: Callable[[Any, ProofBatch], Iterator[torch.Tensor]], batch: ProofBatch, allowed: Container[int]
) -> tuple[ProofBatch, torch.Tensor | None, int | None]:
    embedding = model.requires_grad_(False).get_input_embeddings()
    weight, padding, tokens = embedding.weight.requires_grad_(True), embedding.padding_idx, batch.tokens.clone()
    if padding is not None and padding in allowed:
        tokens[tokens == padding] = int(padding == 0)
    elif padding is not None:
        tokens[0, 0], padding = padding, None
    batch = dataclasses.replace(batch, tokens=tokens)
    if _GRADIENT_COPIES * weight.nbytes > (available_memory_bytes() or math.inf):
        return batch, None, padding
    return batch, token_gradients(next(outputs(model, batch)), batch, weight), padding


def _load(
    folder: Path, config: Mapping[str, Any], attention: str, auto_class: str
) -> tuple[Any, Mapping[str, Any], str]:
    """Loads the model; also returns the report about its tensors, and the attention, eager if it has no sdpa."""
    import transformers

    fields = {name: value for name, value in config.items() if name != "model_type"}
    if quantization := fields.pop("quantization_config", None):
        fields["quantization_config"] = {**quantization, "dequantize": True}
    try:
        model, report = getattr(transformers, auto_class).from_pretrained(
            str(folder),
            config=transformers.AutoConfig.for_model(config["model_type"], **fields),
            dtype=torch.float32,
            attn_implementation=attention,
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
        )
    except ValueError as failure:
        if attention == "sdpa" and "scaled_dot_product_attention" in str(failure):
            return _load(folder, config, "eager", auto_class)
        raise
    return model.eval(), report, attention


def fast_tokenizer_description(folder: Path) -> dict[str, Any]:
    """The content of a `tokenizer.json` for a tokenizer without one, such as a `tokenizer.model`.

    Raises:
        ConversionError: transformers cannot create it.
    """
    from transformers import AutoTokenizer

    with _quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            described: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
            return described
        except Exception as failure:  # the library raises exceptions of any type
            raise ConversionError(
                f"{folder} has no tokenizer.json and transformers cannot create one ({type(failure).__name__}: "
                f"{str(failure)[:300]}). Name another tokenizer with --tokenizer-name-or-path."
            ) from failure


@contextlib.contextmanager
def loaded_tokenizer(folder: Path) -> Iterator[Any]:
    """Context manager for the tokenizer of a folder, without BPE dropout; converts its exceptions."""
    from transformers import AutoTokenizer

    with _quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            if tokenizer.is_fast and getattr(tokenizer.backend_tokenizer.model, "dropout", None):
                tokenizer.backend_tokenizer.model.dropout = None
            yield tokenizer
        except Exception as failure:  # the library raises exceptions of any type
            raise ConversionError(
                f"transformers cannot load the tokenizer in {folder} ({type(failure).__name__}: {str(failure)[:400]}). "
                "Name another one with --tokenizer-name-or-path, a folder with tokenizer.json."
            ) from failure


def _check_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Checks that no tensor was initialized at random or dropped: transformers only reports it."""
    kinds = ("missing_keys", "mismatched_keys", "error_msgs", "unexpected_keys")
    problems = [f"{kind} {sorted(map(str, report[kind]))[:8]}" for kind in kinds if report.get(kind)]
    if problems:
        raise ConversionError(
            f"transformers loads {folder} only in part: {'; '.join(problems)}. The weights do not match config.json; "
            "download the model again."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    level, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bar:
            logging.enable_progress_bar()
