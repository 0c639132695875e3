"""Every preset, built without memory, has the published number of parameters."""

from __future__ import annotations

import pytest
import yaml

from megatron.config import Machine, ModelConfig, TokenizerFacts, parse, resolve
from megatron.config.files.flag_files import preset_names, preset_path
from megatron.config.run_config import frozen
from megatron.model.interface.network import LayerStack
from megatron.model.networks import network_layers
from megatron.parallel.mesh import ParallelMesh

# Source: the numbers that the Hugging Face hub or the model card states for the files of each model; those of Pythia
# from its README.
PUBLISHED = {
    "gpt2-82m": 81_912_576,
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "gpt-oss-20b": 20_914_757_184,  # 20.91 and 116.83 billion in the model card
    "gpt-oss-120b": 116_829_156_672,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "phi-3-mini": 3_821_079_552,
    "mixtral-8x7b": 46_702_792_704,
    "bert-base-uncased": 110_106_428,
    "bert-large-uncased": 336_226_108,
    "roberta-base": 124_697_433 - 2 * 768,  # without the positions that it does not use
}
# What is published is the number in the name; the exact one follows from the published sizes.
NOMINAL = {
    "gpt3-125m": (125e6, 125_226_240),
    "gpt3-350m": (350e6, 355_871_744),
    "gpt3-760m": (760e6, 760_300_032),
    "gpt3-1.3b": (1.3e9, 1_315_723_264),
    "gpt3-2.7b": (2.7e9, 2_651_553_280),
    "gpt3-6.7b": (6.7e9, 6_658_404_352),
    "gpt3-13b": (13e9, 12_853_386_240),
    "gpt3-175b": (175e9, 174_604_259_328),
    # these names were chosen for another vocabulary
    "dsgpt2-112m": (None, 123_751_680),
    "dsgpt2-112m-half": (None, 81_175_296),
    "dsgpt2-345m": (None, 353_840_128),
}
# Presets that also say how to train; only data and tokenizer are missing.
# With the parameters at a vocabulary of 8,000 entries, and the steps.
RECIPES = {"laptop": (4_802_816, 200), "workstation": (81_660_672, 2000)}


def parameters(name: str) -> tuple[int, int]:
    """The parameters of the network as built, and as its layers state."""
    fields = {key: frozen(value) for key, value in yaml.safe_load(preset_path(name).read_text()).items()}
    config = ModelConfig(**fields, padded_vocab_size=fields["vocab_size"])
    layers = network_layers(config, ParallelMesh.single("meta"))
    built = LayerStack(layers)
    return sum(one.numel() for one in built.parameters()), sum(layer.cost.parameters for layer in layers)


def test_every_preset_is_checked() -> None:
    assert sorted({*PUBLISHED, *NOMINAL, *RECIPES}) == preset_names()


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_number_of_parameters(name: str) -> None:
    assert parameters(name) == (PUBLISHED[name], PUBLISHED[name])


@pytest.mark.parametrize("name", NOMINAL)
def test_the_number_of_parameters_in_the_name(name: str) -> None:
    nominal, exact = NOMINAL[name]
    assert parameters(name) == (exact, exact)
    assert nominal is None or exact == pytest.approx(nominal, rel=0.03)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_needs_only_data_and_a_tokenizer(name: str) -> None:
    words = ["--model-preset", name, "--data-path", "text", "--vocab-file", "v.json", "--merge-file", "m.txt"]
    request = parse([*words, "--save", "folder", "--load", "folder"])
    machine = Machine("cpu", 2, supports_fp16=False, supports_bf16=True)
    config = resolve(request, machine, TokenizerFacts(8000, 0, "fingerprint"))
    layers = network_layers(config.model, ParallelMesh.single("meta"))
    assert (sum(layer.cost.parameters for layer in layers), config.optim.train_iters) == RECIPES[name]
