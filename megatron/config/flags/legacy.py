"""Flags of published launch scripts that set no field here: accepted and ignored, or refused with what to use instead.

A row is a reason and the flags it holds for: `Known`, or the name of an on/off flag.

Source: the flags, types and defaults of bigscience-workshop/Megatron-DeepSpeed `megatron/arguments.py` and
deepspeedai's fork.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.config.flags.fields import Flag, FlagFacts

SUPPORTED = "supported"
IGNORED = "ignored"
REFUSED = "refused"
IGNORING = "is accepted and ignored"


@dataclass(frozen=True)
class Legacy:
    """A flag that is known but sets no field."""

    flag: Flag
    status: str
    reason: str
    harmless: Any

    def sentence(self, option: str, value: Any) -> str | None:
        """The message for a user who gave it; None if the value asks for the default behavior."""
        words = value if self.flag.is_tuple else (value,)
        if value is False or (self.harmless is not None and value == self.harmless):
            return None
        shown = option if value is True else f"{option} {' '.join(str(word) for word in words)}".rstrip()
        verb = IGNORING if self.status == IGNORED else "is refused"
        return f"{shown} {verb}: {self.reason}"


class Known(NamedTuple):
    """A flag of a row.

    Attributes:
        harmless: the value that asks for the default behavior, for which no message is shown; None if there is none.
    """

    name: str
    element: type = bool
    harmless: Any = None
    is_tuple: bool = False


Row = tuple[str, tuple[str | Known, ...]]

_REFUSED_ROWS: tuple[Row, ...] = (
    # removed by upstream
    (
        "it was renamed. Use --micro-batch-size (samples per forward pass) and --global-batch-size.",
        (Known("batch_size", int),),
    ),
    ("it was renamed. Use --lr-warmup-fraction, --lr-warmup-iters or --lr-warmup-samples.", (Known("warmup", int),)),
    ("it was renamed. Use --tensor-model-parallel-size.", (Known("model_parallel_size", int),)),
    # other kinds of model
    (
        "models with an encoder and a decoder are not supported. Use --num-layers and --seq-length for a GPT.",
        (Known("encoder_num_layers", int), Known("decoder_num_layers", int), Known("decoder_seq_length", int)),
    ),
    (
        "the vocabulary has no room for sentinel tokens. Add them to the tokenizer's files.",
        (Known("vocab_extra_ids", int, 0),),
    ),
    (
        "retrieval models are not supported. Drop the flag to train a GPT.",
        (
            Known("ict_head_size", int),
            Known("ict_load", str),
            Known("bert_load", str),
            "biencoder_shared_query_context_model",
            Known("titles_data_path", str),
            Known("evidence_data_path", str),
            Known("embedding_path", str),
            "output_bert_embeddings",
            Known("retro_workdir", str),
            "retro_add_retriever",
        ),
    ),
    ("vision models are not supported. Drop the flag to train a GPT.", ("vision_pretraining",)),
    # the network and its training
    (
        "weights and activations have one dtype. Use --bf16, whose range needs no wider residual.",
        ("fp32_residual_connection",),
    ),
    ("it selects an older router. Use --num-experts with --moe-router-topk 1.", (Known("num_experts_switch", int),)),
    (
        "all weights have one learning rate. Use --lr, or --use-mup for learning rates by kind of parameter.",
        (Known("decoupled_lr", float), Known("decoupled_min_lr", float)),
    ),
    (
        "Muon orthogonalises queries, keys and values one by one. Drop the flag.",
        ("muon_no_split_qkv",),
    ),
    (
        'gradients in bfloat16 are accumulated in float32. Use "data_types": {"grad_accum_dtype": "bf16"} in a '
        "--deepspeed_config file.",
        ("grad_reduce_in_bf16",),
    ),
    ("all weights have one dtype. Drop the flag.", ("embedding_weights_in_fp32",)),
    # memory
    (
        "every block of every stage is recomputed. Use --recompute-method uniform, or --recompute-granularity "
        "selective to recompute attention only.",
        (Known("recompute_method", str, "uniform"),),
    ),
    (
        "a block is recomputed as a whole. Use --checkpoint-activations, or --recompute-granularity selective for "
        "attention only.",
        ("split_transformers",),
    ),
    (
        "what recompute keeps stays on the device. Use --distribute-saved-activations with "
        "--tensor-model-parallel-size to divide it, or --cpu-optimizer to make room.",
        ("checkpoint_in_cpu",),
    ),
    # layout
    (
        "the embedding is on the first stage, with blocks. Drop the flag; --tensor-model-parallel-size divides the "
        "embedding.",
        ("standalone_embedding_stage",),
    ),
    (
        "a sequence is divided over ranks as far as --ds-sequence-parallel-size or --context-parallel-size says, and "
        "not further. Use one of them, and --checkpoint-activations to save memory.",
        ("force_ds_sequence_parallel", "ds_sequence_parallel_fpdt"),
    ),
    (
        "it says where weights are kept. Use --cpu-optimizer for the optimizer's state, and for weights --zero-stage "
        "3 with an offload_param section in a --deepspeed_config file.",
        (Known("remote_device", str, "none"),),
    ),
    # data
    (
        "random tokens are not trained on. Give --data-path; tools/corpus/build_demo_corpus.py writes a small corpus.",
        ("mock_data",),
    ),
    (
        "every epoch is shuffled already, and there is only one loader. Drop the flag.",
        (Known("dataloader_type", str, "single"),),
    ),
    ("every layer sees every token. Drop the flag to train without dropped tokens.", ("random_ltd",)),
    (
        "samples are not ordered by what DeepSpeed's data analyzer found in them. Drop the flag, or use "
        "--curriculum-learning for a curriculum by sequence length.",
        ("data_efficiency_curriculum_learning",),
    ),
    (
        "the order of samples follows from the data and the seed, and index files are found by their content. Use "
        "--data-cache-path.",
        (
            Known("train_desc_path", str),
            Known("train_idx_path", str),
            Known("train_doc_idx_path", str),
            Known("train_sample_idx_path", str),
            Known("train_shuffle_idx_path", str),
        ),
    ),
    (
        "the run's length is a number of steps, samples or tokens. Use --train-iters, --train-samples or "
        "--train-tokens.",
        (Known("train_data_exact_num_epochs", int),),
    ),
    (
        "data is read from local folders only. Give full prefixes in --data-path.",
        (Known("aml_data_download_path", str),),
    ),
    # checkpoints and modes
    (
        "flags are not read from a checkpoint. Repeat the command, or give --config RUN_DIR/config.json of the run "
        "that saved it.",
        ("use_checkpoint_args", "use_mp_args_from_checkpoint_args"),
    ),
    (
        "the trainer does not generate text. Use tools/generate_samples_gpt.py to generate text.",
        ("inference", "ds_inference"),
    ),
)

_IGNORED_ROWS: tuple[Row, ...] = (
    # kernels
    (
        "the fastest available attention kernel is chosen automatically.",
        (
            "use_flash_attn",
            "use_flash_attn_v1",
            "use_flash_attn_v2",
            "use_flash_attn_triton",
            "use_flash_attn_builder",
            Known("attention_backend", str, "auto"),
        ),
    ),
    (
        "the attention kernel already accumulates in float32 and scales safely.",
        ("no_query_key_layer_scaling", "apply_query_key_layer_scaling", "attention_softmax_in_fp32"),
    ),
    ("the loss is always computed in float32, which is more accurate.", ("fp16_lm_cross_entropy",)),
    (
        "gradients are accumulated in float32 in any case.",
        ("accumulate_allreduce_grads_in_fp32",),
    ),
    (
        "no fused kernel is required; each operation falls back to plain PyTorch.",
        ("abort_on_unmet_fused_kernel_constraints",),
    ),
    (
        "it selects fused kernels that are not used here.",
        (
            "disable_mem_efficient_ln",
            "cross_entropy_loss_fusion",
            Known("cross_entropy_fusion_impl", str, "native"),
        ),
    ),
    # parallelism
    (
        "copies of one parameter are computed from equal values on every rank, so they cannot drift.",
        ("sync_tp_duplicated_parameters",),
    ),
    (
        "initial weights never depend on the layout.",
        ("use_cpu_initialization", "data_parallel_random_init", "no_initialization"),
    ),
    (
        "DeepSpeed reduces the gradients; its own buffers are used.",
        (
            Known("DDP_impl", str, "local"),
            "use_contiguous_buffers_in_ddp",
            "no_contiguous_buffers_in_local_ddp",
            "lazy_mpu_init",
        ),
    ),
    ("ZeRO stage 1, the default, shards the optimizer already.", ("use_distributed_optimizer",)),
    (
        "it changes when data is sent, not what is computed.",
        (
            "no_scatter_gather_tensors_in_pipeline",
            "no_async_tensor_model_parallel_allreduce",
            "overlap_p2p_communication",
            "use_ring_exchange_p2p",
            "overlap_grad_reduce",
            "overlap_param_gather",
            "tp_comm_overlap",
            Known("empty_unused_memory_level", int, 0),
        ),
    ),
    ("Python's garbage is collected at chosen steps unless --manual-gc-interval is 0.", ("manual_gc",)),
    ("a run with one pipeline stage never uses the pipeline engine.", ("no_pipeline_parallel",)),
    (
        "upstream never reads it; ZeRO's settings come from --deepspeed_config.",
        (
            "zero_reduce_scatter",
            "zero_contigious_gradients",
            Known("zero_reduce_bucket_size", float, 0.0),
            Known("zero_allgather_bucket_size", float, 0.0),
            "use_pin_memory",
        ),
    ),
    (
        "upstream never reads it.",
        ("scattered_embeddings", "memory_centric_tiled_linear", Known("tile_factor", int, 1)),
    ),
    ("launchers, mpirun included, are detected automatically.", ("deepspeed_mpi",)),
    (
        "the layers recompute themselves (--checkpoint-activations); how their inputs are allocated and awaited "
        "changes neither memory nor results.",
        ("deepspeed_activation_checkpointing", "contigious_checkpointing", "synchronize_each_layer"),
    ),
    ("--profile records what is recomputed with everything else.", ("profile_backward",)),
    ("torch's fused AdamW is the default.", ("cpu_torch_adam", "ds_fused_adam")),
    (
        "Muon orthogonalises every matrix as a whole, whatever ranks its parts are on: all layouts train alike.",
        (Known("muon_tp_mode", str, "distributed"),),
    ),
    (
        "Muon's iteration multiplies in the dtype that --muon-dtype names, and as torch does by default.",
        (Known("muon_fp32_matmul_prec", str),),
    ),
    # experts
    (
        "experts with a capacity always compute on inputs of that length; without one there is no length.",
        ("moe_pad_expert_input_to_capacity",),
    ),
    (
        "every expert is split over the tensor-parallel ranks, as all matrices are.",
        ("enable_expert_tensor_parallelism",),
    ),
    (
        "a shared expert computes while tokens are on their way to the others; no other micro-batch does.",
        ("overlap_moe_expert_parallel_comm",),
    ),
    ("experts are chosen by their scores alone, without sampling.", ("disable_moe_top2_2nd_expert_sampling",)),
    (
        "it selects how experts are computed, not what.",
        (
            "create_moe_param_group",
            "use_tutel",
            "moe_grouped_gemm",
            Known("moe_token_dispatcher_type", str, "allgather"),
            "moe_permute_fusion",
            "moe_shared_expert_overlap",
        ),
    ),
    # data
    ("token files are memory-mapped and read on demand.", ("mmap_warmup", "no_mmap_bin_files")),
    (
        "a causal mask needs no memory; others are made where they are used.",
        ("no_create_attention_mask_in_dataloader",),
    ),
    ("the loss is always the sum over tokens divided by their number.", ("calculate_per_token_loss",)),
    ("tokens per second are always in the log line.", ("log_throughput",)),
    ("validation reads with --num-workers too.", (Known("valid_num_workers", int, 2),)),
    (
        "the data order has no such option; samples are never repeated within an epoch.",
        ("repeated_dataloader", "return_data_index"),
    ),
    # length and checkpoints
    (
        "random streams follow from the seed and the samples consumed, so none are stored.",
        ("no_save_rng", "no_load_rng"),
    ),
    ("the schedule follows from the samples consumed, so none is stored.", ("no_load_lr_state",)),
    (
        "every checkpoint loads into every layout.",
        ("universal_checkpoint", "auto_detect_ckpt_format", Known("ckpt_format", str, "torch_dist")),
    ),
    # reports and surroundings
    ("emissions are not tracked.", (Known("codecarbon_dir", str),)),
    (
        "SIGTERM and SIGUSR1 save and stop the run (--exit-on-signal).",
        ("adlr_autoresume", Known("adlr_autoresume_interval", int, 1000)),
    ),
    (
        "timers are always on; their cost is negligible.",
        (
            Known("timing_log_level", int, 0),
            Known("timing_log_option", str, "minmax"),
            "no_barrier_with_level_1_timing",
        ),
    ),
    (
        "this value is not written to TensorBoard.",
        ("log_optimizer_states_to_tensorboard", "log_memory_to_tensorboard", "log_world_size_to_tensorboard"),
    ),
    (
        "scales of 8 bits follow the values at hand, without a history, and weights are kept and gathered in bf16.",
        (
            Known("fp8_margin", int, 0),
            "fp8_param_gather",
            Known("fp8_interval", int, 1),
            Known("fp8_amax_history_len", int, 1),
            Known("fp8_amax_compute_algo", str, "most_recent"),
        ),
    ),
    (
        "it has no effect without a feature that is not supported.",
        (
            Known("ds_sequence_parallel_fpdt_chunk_size", int, 65536),
            "ds_sequence_parallel_fpdt_offloading",
            Known("inference_batch_times_seqlen_threshold", int, 512),
            Known("max_tokens_to_oom", int, 12000),
            Known("bert_embedder_type", str, "megatron"),
            "use_dataset_only",
            Known("classes_fraction", float, 1.0),
            Known("data_per_class_fraction", float, 1.0),
            "no_data_sharding",
            Known("head_lr_mult", float, 1.0),
            Known("vision_pretraining_type", str, "classify"),
            Known("vision_backbone_type", str, "vit"),
            Known("swin_backbone_type", str, "tiny"),
            Known("mask_type", str, "random"),
            Known("mask_factor", float, 1.0),
            Known("iter_per_epoch", int, 1250),
            Known("dino_local_img_size", int, 96),
            Known("dino_local_crops_number", int, 10),
            Known("dino_head_hidden_size", int, 2048),
            Known("dino_bottleneck_size", int, 256),
            Known("dino_freeze_last_layer", float, 1.0),
            "dino_norm_last_layer",
            Known("dino_warmup_teacher_temp", float, 0.04),
            Known("dino_teacher_temp", float, 0.07),
            Known("dino_warmup_teacher_temp_epochs", int, 30),
            Known("retro_cyclic_train_iters", int),
            Known("retro_encoder_layers", int, 2),
            Known("retro_encoder_hidden_dropout", float, 0.1),
            Known("retro_encoder_attention_dropout", float, 0.1),
            Known("retro_num_neighbors", int, 2),
            Known("retro_num_retrieved_chunks", int, 2),
            "retro_return_doc_ids",
        ),
    ),
    (
        "there is one implementation of the model.",
        ("use_mcore_models", "use_legacy_models", Known("transformer_impl", str, "local")),
    ),
    ("every operation used can be exported, and there is no exporter to ONNX.", ("onnx_safe",)),
    ("code that comes with a tokenizer is never run; a tokenizer.json needs none.", ("trust_remote_code",)),
    (
        "only other kinds of models use it.",
        (
            Known("retriever_seq_length", int, 256),
            Known("pipeline_model_parallel_split_rank", int),
            Known("sample_rate", float, 1.0),
            Known("noise_density", float),
            Known("mean_noise_span_length", int),
            Known("biencoder_projection_dim", int, 0),
            Known("query_in_block_prob", float, 0.1),
            "use_one_sent_docs",
            Known("retriever_report_topk_accuracies", int, is_tuple=True),
            "retriever_score_scaling",
            Known("block_data_path", str),
            Known("indexer_batch_size", int, 128),
            Known("indexer_log_interval", int, 1000),
            Known("num_classes", int, 1000),
            Known("img_dim", int, 224),
            Known("img_h", int, 224),
            Known("img_w", int, 224),
            Known("num_channels", int, 3),
            Known("patch_dim", int, 16),
        ),
    ),
)

# More spellings of the flags above.
_SPELLED: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "cpu_torch_adam": ("--cpu_torch_adam",),
        "ds_fused_adam": ("--ds_fused_adam",),
        "deepspeed_mpi": ("--deepspeed_mpi",),
        "zero_contigious_gradients": ("--zero-contiguous-gradients",),
        "contigious_checkpointing": ("--contiguous-checkpointing",),
    }
)

# Spellings of supported flags that upstream has dropped.
DEPRECATED: Mapping[str, str] = types.MappingProxyType(
    {
        "--deepscale": "it is an old name for --deepspeed.",
        "--deepscale_config": "it is an old name for --deepspeed_config.",
        "--deepscale-config": "it is an old name for --deepspeed_config.",
    }
)


def legacy_flags() -> dict[str, Legacy]:
    """Every flag that is known but sets no field, by its destination `legacy.name`."""
    return {
        f"legacy.{known.name}": _legacy(known, status, reason)
        for status, rows in ((REFUSED, _REFUSED_ROWS), (IGNORED, _IGNORED_ROWS))
        for reason, entries in rows
        for known in (Known(entry) if isinstance(entry, str) else entry for entry in entries)
    }


def _legacy(known: Known, status: str, reason: str) -> Legacy:
    facts = FlagFacts(help=reason, spelled=_SPELLED.get(known.name, ()), numeric=True)
    default = False if known.element is bool else known.harmless
    flag = Flag(known.name, known.element, facts, default, required=False, is_tuple=known.is_tuple, count=None)
    return Legacy(flag, status, reason, known.harmless)
