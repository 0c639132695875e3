"""The objective of a run, and the settings of micro-batches and step contexts for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.config import RunConfig
from megatron.config.objective.loss import MASKED, MULTITASK, PREFIX, SAMPLES
from megatron.config.objective.masking import SENTENCES
from megatron.data.datasets.changed_samples import PrefixDataset, ShortenedDataset
from megatron.data.datasets.masked.masked_options import MaskedOptions
from megatron.data.datasets.sample import SampleDataset
from megatron.data.loader import BatchOptions
from megatron.model.blocks.router import router_metric_sizes
from megatron.model.interface.step_context import MaskKind, Recompute, StepSettings
from megatron.objective.language_model import LanguageModelObjective, PrefixObjective
from megatron.objective.masked import MaskedLanguageModelObjective
from megatron.objective.multi_token import MultiTokenObjective
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.sequence.split import SequenceSplit
from megatron.tokenizers.tokenizer import Tokenizer


def build_objective(config: RunConfig, mesh: ParallelMesh, *, sources: Sequence[str] = ()) -> LanguageModelObjective:
    """The training objective of a resolved configuration.

    Args:
        sources: names of the data sources whose losses are reported separately.
    """
    loss, model = config.loss, config.model
    objective = LanguageModelObjective(
        mesh.tp,
        config.model.vocab_size,
        sources=tuple(sources),
        label_smoothing=loss.label_smoothing,
        z_loss_coeff=loss.z_loss_coeff,
        statistics=router_metric_sizes(config.model),
        averages_samples=loss.loss_mean == SAMPLES,
        packs_samples=packs_examples(config),
        implementation=mesh.kernels.cross_entropy,
    )
    if loss.objective == MASKED:
        return MaskedLanguageModelObjective(**vars(objective), has_sentence_order=config.model.sentence_order_head)
    if model.mtp_num_layers:
        return MultiTokenObjective(
            **vars(objective),
            depths=model.mtp_num_layers,
            scale=model.mtp_loss_scaling_factor,
            stops_at_masked=config.documents.eod_mask_loss,
        )
    if loss.objective != PREFIX:
        return objective
    return PrefixObjective(
        **vars(objective),
        on_targets_only=loss.loss_on_targets_only,
        by_document=config.documents.reset_attention_mask,
        reweights_positions=loss.reweight_loss_based_on_position_frequency,
    )


def step_settings(config: RunConfig, mesh: ParallelMesh | None = None) -> StepSettings:
    """The settings shared by all micro-batches of a run.

    Args:
        mesh: its ranks may share samples; None if nothing is computed with the settings.
    """
    recompute = Recompute.NONE
    if config.recompute.checkpoint_activations:
        is_split = config.recompute.distributes_saved and not config.parallel.splits_sequence
        recompute = Recompute.SPLIT_BLOCKS if is_split else Recompute.BLOCKS
    elif config.recompute.recomputes_attention:
        recompute = Recompute.ATTENTION
    packed, masked = packs_examples(config), config.loss.objective == MASKED
    separates = config.documents.reset_attention_mask or packed or masked  # of masked text, the padding
    mask = MaskKind.DOCUMENTS if separates else MaskKind.CAUSAL
    holds_parameters = config.parallel.effective_zero_stage != 3
    split = None
    if mesh is not None:
        causal, window = not config.model.bidirectional, config.model.widest_window
        split = SequenceSplit.of(mesh, causal=causal, by_document=separates, window=window)
    return StepSettings(
        seed=config.random.seed,
        recompute=recompute,
        restart_positions=config.documents.reset_position_ids or packed,
        mask=mask,
        has_prefixes=config.loss.has_prefixes,
        has_token_types=masked and config.model.token_types > 1 and config.masking.masked_samples == SENTENCES,
        has_predicted=names_predicted(config),
        has_tokens=config.model.mtp_num_layers > 0,
        dtype=getattr(torch, config.precision.dtype_name),
        hidden_size=config.model.hidden_size,
        explicit_attention=not config.kernels.fused_attention,
        # ZeRO-3 partitions the weight of the head again before the losses are computed; distillation compares the
        # logits of student and teacher, which must be materialized.
        factored_logits=not (masked or config.distillation.is_on) and holds_parameters,
        holds_parameters=holds_parameters,
        split=split,
    )


def names_predicted(config: RunConfig) -> bool:
    """True if batches list the positions to predict; ranks that share a sample compute all of theirs."""
    return config.loss.objective == MASKED and config.parallel.sequence_size == 1


def masked_options(config: RunConfig) -> MaskedOptions | None:
    """The options of masked samples; None for other objectives."""
    return MaskedOptions.of(config.masking, config.loss, pairs=config.model.sentence_order_head)


def batch_options(config: RunConfig, tokenizer: Tokenizer) -> BatchOptions:
    """The contents of a batch for the objective."""
    masked = masked_options(config)
    return BatchOptions(
        eod_id=tokenizer.eod_id,
        vocab_size=config.model.vocab_size,
        eod_mask_loss=config.documents.eod_mask_loss,
        segments=step_settings(config).needs_segments,
        prefixes=config.loss.has_prefixes,
        predictions=masked.predictions(config.data.seq_length)
        if masked is not None and names_predicted(config)
        else None,
    )


def samples_to_learn(
    dataset: SampleDataset, config: RunConfig, tokenizer: Tokenizer, length: int | None = None
) -> SampleDataset:
    """A dataset as the objective needs it: with random prefixes, or unchanged.

    Args:
        length: tokens of each sample that a curriculum uses, which also limit prefixes; None for all.
    """
    if length is not None and length < config.data.seq_length:
        dataset = ShortenedDataset(dataset, length)
    if config.loss.objective != PREFIX:
        return dataset
    eod_id = tokenizer.eod_id if config.documents.reset_attention_mask else None
    return PrefixDataset(dataset, config.random.seed, eod_id, config.loss.loss_on_targets_only)


def packs_examples(config: RunConfig) -> bool:
    """True if a sample contains several independent examples."""
    return config.loss.objective == MULTITASK or config.finetuning.pack_examples
