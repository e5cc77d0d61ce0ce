"""QLoRA from its options: base weights quantised in a built model, from any checkpoint, and what is refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quantized_files import nested_scales, quantization_config, stored_tensors
from tiny_models import hf_config, write_config
from xorl.ckpt import CheckpointError
from xorl.ckpt.reader import source_shapes
from xorl.config.arguments import in_options
from xorl.config.local import LoraConfig, ModelConfig, TrainConfig
from xorl.config.resolve import GROUP_SIZES
from xorl.kernels.quant import GROUP_SIZES as KERNEL_GROUP_SIZES
from xorl.kernels.quant import QuantScheme
from xorl.kernels.quant.nf4 import quantize_nf4
from xorl.lora.quantized import QuantizedRows, quantized_layers, read_rows
from xorl.train.export.rest import Rest
from xorl.train.export.source import weights_at
from xorl.train.model import build_model
from xorl.train.model_source import read_architecture
from xorl.train.module.models import load_model

CPU = torch.device("cpu")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "initializer_range": 0.05}
HF_CONFIG = hf_config(**SIZES, tie_word_embeddings=False)
# The first layer has experts, the second one does not.
MIXED = {**SIZES, "moe_intermediate_size": 128, "mlp_only_layers": [1]}
CONFIGS_BY_FAMILY = {
    "qwen3": HF_CONFIG,
    "qwen3_moe": hf_config("qwen3_moe", **MIXED, head_dim=32),
    "qwen2_moe": hf_config("qwen2_moe", **MIXED, shared_expert_intermediate_size=128),
}
# Of a model with merged projections: its quantised modules, and those in the checkpoint.
NUM_MODULES = {"qwen3": (7, 13), "qwen3_moe": (7, 22), "qwen2_moe": (9, 25)}
SKIPPED = ["lm_head", "model.layers.1.mlp.down_proj"]
CONFIGS = {
    quant_format: quantization_config(QuantScheme(quant_format, size), SKIPPED)
    for quant_format, size in GROUP_SIZES.items()
}
CONFIGS["nvfp4"]["ignore"] = ["lm_head", "model.layers.1.mlp.down_*"]


def write_model(folder, quant_format=None, *, nested=False, family="qwen3", missing=()):
    """A checkpoint in Hugging Face's names, quantised as other tools do it; returns its weights in bf16."""
    folder.mkdir(exist_ok=True)
    hf_config = CONFIGS_BY_FAMILY[family]
    write_config(folder, hf_config)
    architecture = read_architecture(ModelConfig(model_path=str(folder)))
    model = architecture.spec.build(architecture.config, merge_qkv=False)
    model.init_weights(0)
    recipes = architecture.recipes(merge_qkv=False)
    dense = {}
    for name, parameter in model.named_parameters():
        dense |= recipes[name].split(parameter.detach().bfloat16())
    tensors = dict(dense)
    for name in [name for name in dense if name.endswith("_proj.weight")] if quant_format else []:
        module = name.removesuffix(".weight")
        if module not in SKIPPED:
            scheme = QuantScheme(quant_format, GROUP_SIZES[quant_format])
            tensors |= stored_tensors(module, tensors.pop(name), scheme, nested=nested)
    if quant_format:
        write_config(folder, hf_config | {"quantization_config": CONFIGS[quant_format]})
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if name not in missing}
    save_file(kept, folder / "model.safetensors")
    return dense


def build(folder, mesh, *, merge_qkv=True, random=False, **lora):
    options = LoraConfig(**{"enable_lora": True, "enable_qlora": True, **lora})
    if options.enable_qlora and options.quant_group_size is None:
        options = options.model_copy(update={"quant_group_size": GROUP_SIZES[options.quant_format]})
    path = None if random else str(folder)
    model = ModelConfig(config_path=str(folder), model_path=path, merge_qkv=merge_qkv, attn_implementation="eager")
    alone = {"data_parallel_mode": "none", "load_weights_mode": "all_ranks", "reshard_after_forward": True}
    plain = {"param_dtype": "fp32", "enable_mixed_precision": False, "enable_compile": False}
    train = TrainConfig(output_dir="o", **alone, **plain)
    return build_model(read_architecture(model), model, train, options, mesh, CPU).module


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (
            {"rope_thetaa": 5.0},
            "model.foundation: Qwen3ForCausalLM: config.json sets rope_thetaa: 5.0, which may change",
        ),
        ({"use_cache": True}, "use_cache is not in .*config.json and has no effect on Qwen3ForCausalLM"),
        ({"rope_thetaa": None}, "rope_thetaa is not in .*config.json and has no effect on Qwen3ForCausalLM"),
        ({"attention_dropout": 0.1}, "model.foundation: attention_dropout: 0.1: models train without dropout"),
        ({"num_attention_heads": 0}, "model.foundation: .*num_attention_heads"),
        ({"num_hidden_layers": "2"}, "model.foundation: .*num_hidden_layers"),
    ],
)
def test_entries_that_make_no_model_or_change_none_are_refused(entries, told, tmp_path):
    # Catches a misspelt entry of config.json that is accepted and ignored.
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    made = read_architecture(ModelConfig(config_path=str(tmp_path), foundation={"rms_norm_eps": 1e-3}))
    assert made.hf_config == {**HF_CONFIG, "rms_norm_eps": 1e-3}
    with pytest.raises(ValueError, match=told):
        read_architecture(ModelConfig(config_path=str(tmp_path), foundation=entries))


def test_an_unknown_key_of_the_file_can_be_declared_harmless(tmp_path):
    # Catches a model that a key without effect keeps from training, and a key that is ignored without a word.
    (tmp_path / "config.json").write_text(json.dumps({**HF_CONFIG, "flavour": 3}))
    told = r"model.config_path: .*config.json: Qwen3ForCausalLM: .* sets flavour: 3, which"
    with pytest.raises(ValueError, match=told) as raised:
        read_architecture(ModelConfig(config_path=str(tmp_path)))
    assert "set it to null in model.foundation, or remove it" in in_options(str(raised.value))
    made = read_architecture(ModelConfig(config_path=str(tmp_path), foundation={"flavour": None}))
    assert made.hf_config == {**HF_CONFIG, "flavour": None}


@pytest.mark.parametrize("family", list(CONFIGS_BY_FAMILY))
@pytest.mark.parametrize("merge_qkv", [True, False])
@pytest.mark.parametrize("quant_format", list(CONFIGS))
def test_a_quantised_checkpoint_is_read_as_it_is(quant_format, merge_qkv, family, tmp_path, mesh):
    # Catches codes that are unpacked otherwise, scales of another matrix of a stack, one that is quantised again, and
    # modules that the checkpoint leaves unquantised.
    write_model(tmp_path / "dense", family=family)
    write_model(tmp_path / "stored", quant_format, family=family)
    options = {"merge_qkv": merge_qkv, "quant_format": quant_format}
    stored = build(tmp_path / "stored", mesh, **options)
    made = build(tmp_path / "dense", mesh, **options, exclude_modules=["model.layers.1.mlp.down_proj"])
    num_modules, _ = NUM_MODULES[family]
    assert len(quantized_layers(stored)) == num_modules + (0 if merge_qkv else 4)
    assert dict(stored.named_parameters()).keys() == dict(made.named_parameters()).keys()
    for name, parameter in made.named_parameters():
        assert torch.equal(dict(stored.named_parameters())[name], parameter), name


@pytest.mark.parametrize("family", list(CONFIGS_BY_FAMILY))
@pytest.mark.parametrize("quant_format", list(CONFIGS))
def test_a_quantised_checkpoint_is_dequantised_where_the_model_is_not(quant_format, family, tmp_path, mesh, caplog):
    # Catches codes that are read as weights, scales of other rows, and weights that are rounded on their way.
    write_model(tmp_path, quant_format, family=family)
    caplog.set_level("DEBUG")
    plain = build(tmp_path, mesh, enable_qlora=False)
    num_modules, num_stored = NUM_MODULES[family]
    assert f"dequantized modules={num_stored} of_checkpoint={quant_format}_" in caplog.text
    partly = build(
        tmp_path, mesh, quant_format=quant_format, modules_to_save=["o_proj"], lora_target_modules=["q_proj"]
    )
    assert "dequantized modules=2 of_checkpoint" in caplog.text
    layers = quantized_layers(build(tmp_path, mesh, quant_format=quant_format))
    assert len(layers) == num_modules
    for path, layer in layers.items():
        assert torch.equal(plain.get_parameter(f"{path}.weight"), read_rows(layer)), path
        if path.endswith("o_proj"):
            assert torch.equal(partly.get_parameter(f"{path}.weight"), read_rows(layer)), path
    wanted = plain.state_dict()
    for name, weight in load_model(tmp_path).decoder.named_parameters():
        assert torch.equal(weight, wanted[name]), name
    exported = weights_at("--base", str(tmp_path), read_architecture(ModelConfig(model_path=str(tmp_path))))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert exported.dtype(name) == torch.bfloat16
    assert torch.equal(exported.read(name, 32, 96), wanted["model.layers.0.self_attn.qkv_proj.weight"][32:96])


def test_an_expert_without_its_scales_is_missing(tmp_path, mesh):
    # Catches an error of the reader that names no tensor, and scales that are left uninitialised.
    missing = "model.layers.0.mlp.experts.2.up_proj.weight_scale_inv"
    write_model(tmp_path, "block_fp8", family="qwen3_moe", missing=[missing])
    with pytest.raises(CheckpointError, match=r"missing \(1\): model.layers.0.mlp.experts.2.up_proj.weight_scale"):
        build(tmp_path, mesh, quant_format="block_fp8")


def test_modelopts_own_file_says_it_too(tmp_path, mesh):
    # Catches a checkpoint whose config.json is silent, and which is then read as bytes that no parameter uses.
    write_model(tmp_path, "nvfp4")
    write_config(tmp_path, HF_CONFIG)
    stored = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": SKIPPED, "kv_cache_quant_algo": None}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": stored}))
    assert len(quantized_layers(build(tmp_path, mesh))) == 7
    (tmp_path / "hf_quant_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"model.model_path: .*hf_quant_config.json: the key 'quantization'"):
        build(tmp_path, mesh)


def test_scales_that_are_quantised_in_turn_are_read(tmp_path, mesh):
    # Catches a table, an offset or a block of the nested scales that is another's.
    dense = write_model(tmp_path, "nf4", nested=True)
    layer = quantized_layers(build(tmp_path, mesh, quant_format="nf4"))["model.layers.0.self_attn.qkv_proj"]
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    scales = torch.cat([nested_scales(quantize_nf4(dense[name], 64)[1]) for name in names])
    assert torch.allclose(layer.weight_scale, scales, atol=1e-9)


@pytest.mark.parametrize("random", [False, True], ids=["read", "drawn"])
def test_one_weight_at_a_time_is_held_as_it_was(random, tmp_path, mesh, monkeypatch):
    # Catches a base that has to fit into memory unquantised first.
    write_model(tmp_path)
    held: list[int] = []
    counts: list[int] = []
    put, finish = QuantizedRows.put, QuantizedRows.finish

    def counted_put(self: QuantizedRows, start: int, rows: torch.Tensor) -> None:
        put(self, start, rows)
        if id(self) not in held:
            held.append(id(self))
        counts.append(len(held))

    def counted_finish(self: QuantizedRows) -> None:
        finish(self)
        held.remove(id(self))

    monkeypatch.setattr(QuantizedRows, "put", counted_put)
    monkeypatch.setattr(QuantizedRows, "finish", counted_finish)
    assert len(quantized_layers(build(tmp_path, mesh, random=random, quant_format="nf4"))) == 8
    assert (max(counts), held) == (1, [])


def test_random_weights_are_quantised_as_they_are_drawn(tmp_path, mesh):
    # Catches bytes of memory as it was found, and trained parameters among what is quantised.
    write_model(tmp_path)
    model = build(
        tmp_path, mesh, random=True, quant_format="nf4", modules_to_save=["o_proj"], lora_target_modules=["q_proj"]
    )
    layers = quantized_layers(model)
    assert len(layers) == 6
    weight = layers["model.layers.0.mlp.down_proj"].dense_weight(torch.float32)
    assert weight.std().item() == pytest.approx(0.05, rel=0.05)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert "model.layers.0.self_attn.o_proj.weight" in trained
    assert all(parameter.is_floating_point() for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(
    ("stored", "lora", "told"),
    [
        (None, {"quant_group_size": 24}, r"group_size: 24 is not a valid group size for nvfp4"),
        (None, {"quant_format": "nf4", "quant_group_size": 256}, r"lora.quant_group_size: .*rows of 128 weights"),
        (None, {"exclude_modules": ["c_attn"]}, r"lora.exclude_modules: no module is named c_attn"),
        (None, {"exclude_modules": ["q_proj"]}, r"lora.exclude_modules: .*merge_qkv=False"),
        (None, {"exclude_modules": ["model.layers.*"]}, r"lora.exclude_modules: no linear layer is left"),
        ("nf4", {"quant_format": "nvfp4"}, r"lora.quant_format: nvfp4, but the checkpoint .*set it to nf4"),
        ("nf4", {"quant_format": "nf4", "quant_group_size": 32}, r"lora.quant_group_size: 32, .*set it to 64"),
        ("nf4", {"quant_format": "nf4", "exclude_modules": ["o_proj"]}, r"lora.exclude_modules: the checkpoint is"),
        ({"quant_method": "gptq"}, {}, r"model.model_path: .*quant_method 'gptq' is not supported"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_option(stored, lora, told, tmp_path, mesh):
    # Catches a run that fails in its first step, or trains over other weights than were asked for.
    write_model(tmp_path)
    if stored:
        config = CONFIGS.get(stored) if isinstance(stored, str) else stored
        write_config(tmp_path, HF_CONFIG | {"quantization_config": config})
    with pytest.raises(ValueError, match=re.compile(told, re.DOTALL)):
        build(tmp_path, mesh, **lora)


def test_groups_of_a_checkpoint_that_do_not_fit_cannot_be_changed(tmp_path, mesh):
    # Catches advice to choose another group size, which is refused, too.
    write_config(tmp_path, HF_CONFIG | {"intermediate_size": 96, "quantization_config": CONFIGS["nf4"]})
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(
        ValueError, match=r"^model.model_path: 1 layers do not fit nf4: .*start from the original model"
    ):
        build(tmp_path, mesh, quant_format="nf4")


def test_group_sizes_are_the_same_where_they_are_written_twice():
    # The configuration cannot import what the kernels say. Catches a default that the kernels do not know.
    assert GROUP_SIZES == KERNEL_GROUP_SIZES


def test_latents_in_block_fp8_are_read_exactly(tmp_path: Path, mesh) -> None:
    """Catches a last block with fewer rows than others, which takes another scale, what is not quantised, and an export
    that refuses, or leaves as codes, the layer that predicts further tokens."""
    sizes = {"q_lora_rank": 48, "kv_lora_rank": 96, "qk_nope_head_dim": 24, "qk_rope_head_dim": 40, "v_head_dim": 40}
    sizes |= {"hidden_size": 160, "intermediate_size": 200, "moe_intermediate_size": 136, "first_k_dense_replace": 1}
    shape = hf_config("deepseek_v3", **sizes)
    write_config(tmp_path, shape)
    shapes = source_shapes(read_architecture(ModelConfig(model_path=str(tmp_path))).recipes(merge_qkv=False))
    generator = torch.Generator().manual_seed(0)
    further = "model.layers.2.mlp.up_proj.weight"
    dense = {name: torch.randn(each, generator=generator) for name, each in (shapes | {further: (200, 160)}).items()}
    stored: dict[str, Tensor] = {}
    scheme = QuantScheme("block_fp8", 128)
    for name, weight in dense.items():
        if not name.endswith(("_proj.weight", "_mqa.weight")):
            stored[name] = weight
            continue
        stored |= stored_tensors(name.removesuffix(".weight"), weight, scheme)
        scales = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        dense[name] = stored[name].float() * scales[: weight.shape[0], : weight.shape[1]]
    assert stored["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape == (136, 160)
    save_file(stored, tmp_path / "model.safetensors")
    write_config(tmp_path, shape | {"quantization_config": quantization_config(scheme)})
    module = build(tmp_path, mesh, enable_lora=False, enable_qlora=False)
    recipes = read_architecture(ModelConfig(model_path=str(tmp_path))).recipes(merge_qkv=True)
    for name, parameter in module.named_parameters():
        for source, tensor in recipes[name].split(parameter.detach()).items():
            assert torch.equal(tensor, dense[source]), source
    with Rest.of(read_architecture(ModelConfig(model_path=str(tmp_path)))).groups() as groups:
        copied = {name: tensor for group in groups for name, tensor in group.make().items()}
    assert copied.keys() == {further}
    assert torch.equal(copied[further], dense[further].bfloat16())
