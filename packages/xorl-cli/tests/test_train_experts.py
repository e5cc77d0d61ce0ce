"""Options of mixtures of experts: what they set in the model, and that a dense model refuses them by name."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from live_bytes import LiveBytes
from local_options import local_config
from tiny_models import hf_config, write_config
from xorl.config import Config, server_config_from_mapping
from xorl.config.local import LoraConfig
from xorl.core.loss import cross_entropy
from xorl.core.mesh import Mesh
from xorl.core.nn.moe import MixtureOfExperts, Router
from xorl.core.runtime import Runtime
from xorl.kernels.layout import SequenceLayout
from xorl.lora.quantized import QuantizedExpertLinear, quantized_layers
from xorl.server.worker import base
from xorl.server.worker.base import build_base
from xorl.server.worker.worker import Worker
from xorl.train.model import EXPERT_OPTIONS, build_model, sketch_model
from xorl.train.model_source import read_architecture

VALUES = {
    "model.moe_implementation": "eager",
    "model.router_fp32": False,
    "train.router_aux_loss_coef": 0.25,
    "train.router_z_loss_coef": 0.5,
    "train.freeze_router": True,
    "train.moe_checkpoint_method": "moe_act",
    "train.expert_parallel_size": 2,
}
CORRECTING = {"train.router_correction_rate": 1e-3}
# Those of the service that are not the opposite of their default.
SERVER_VALUES = {"moe_implementation": "eager", "expert_parallel_size": 2}


def config_with(folder: Path, model_type: str, options: dict[str, object], **shape: object) -> Config:
    write_config(folder, hf_config(model_type, num_hidden_layers=4, **shape))
    mode = "fsdp2" if "train.expert_parallel_size" in options else "none"
    model: dict[str, object] = {"config_path": str(folder)}
    train: dict[str, object] = {"data_parallel_mode": mode, "enable_mixed_precision": False}
    for path, value in options.items():
        section, name = path.split(".")
        (model if section == "model" else train)[name] = value
    if "train.moe_checkpoint_method" in options:
        train["enable_gradient_checkpointing"] = True
    return local_config(model, **train)


@pytest.mark.parametrize("option", EXPERT_OPTIONS)
def test_a_dense_model_refuses_what_only_experts_have(option: str, tmp_path: Path) -> None:
    # Catches an option that is accepted and ignored.
    config = config_with(tmp_path, "qwen3", {option: {**VALUES, **CORRECTING}[option]})
    with pytest.raises(ValueError, match=re.escape(f"{option}: ") + ".*the model has no experts; leave it at"):
        sketch_model(read_architecture(config.model), config.model, config.train, config.lora)


def test_routers_without_corrections_refuse_a_rate(tmp_path: Path) -> None:
    """Catches an option that is accepted and ignored."""
    config = config_with(tmp_path, "qwen3_moe", CORRECTING)
    with pytest.raises(ValueError, match=r"train.router_correction_rate: 0.001, but the model's routers have no corr"):
        sketch_model(read_architecture(config.model), config.model, config.train, config.lora)
    config = config_with(tmp_path, "glm4_moe", CORRECTING)
    decoder = sketch_model(read_architecture(config.model), config.model, config.train, config.lora)
    assert decoder.routers.options.correction_rate == 1e-3


def test_options_reach_the_routers(tmp_path: Path) -> None:
    # Catches an option that one of the two ways to build a model forgets, and a weight of config.json that wins over
    # the option.
    coefs = {"output_router_logits": True, "router_aux_loss_coef": 0.125}
    for options, expected in (({}, (0.125, 0.0, True, True)), (VALUES, (0.25, 0.5, False, False))):
        config = config_with(tmp_path, "qwen3_moe", options, **coefs)
        architecture = read_architecture(config.model)
        decoder = sketch_model(architecture, config.model, config.train, config.lora)
        losses, routers = decoder.routers.options, [m for m in decoder.modules() if isinstance(m, Router)]
        for router in routers:
            trained = router.weight.requires_grad
            assert (losses.balance_coef, losses.z_coef, router.fp32, trained) == expected
        assert len(routers) == 4


def test_a_router_is_not_both_frozen_and_trained(tmp_path: Path) -> None:
    """Catches a router that moves although train.freeze_router says that it does not."""
    config = config_with(tmp_path, "qwen3_moe", {"train.freeze_router": True})
    lora = LoraConfig(enable_lora=True, lora_target_modules=["q_proj"], modules_to_save=["gate"])
    architecture = read_architecture(config.model)
    with pytest.raises(ValueError, match=r"lora\.modules_to_save: names the router .*train\.freeze_router: true"):
        sketch_model(architecture, config.model, config.train, lora)
    thawed = config.train.model_copy(update={"freeze_router": False})
    decoder = sketch_model(architecture, config.model, thawed, lora)
    assert all(module.weight.requires_grad for module in decoder.modules() if isinstance(module, Router))


@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
def test_corrections_are_frozen_and_in_fp32_whatever_is_trained(param_dtype: str, tmp_path: Path) -> None:
    """Catches corrections that an optimizer decays, and those that are rounded with the weights."""
    mixed = param_dtype == "bf16"
    options = {"train.param_dtype": param_dtype, "train.enable_mixed_precision": mixed}
    config = config_with(tmp_path, "glm4_moe", options)
    architecture = read_architecture(config.model)
    thawed = LoraConfig(enable_lora=True, lora_target_modules=["q_proj"], modules_to_save=["gate"])
    for lora in (config.lora, thawed):
        decoder = sketch_model(architecture, config.model, config.train, lora)
        mixtures = [module for module in decoder.modules() if isinstance(module, MixtureOfExperts)]
        assert len(mixtures) == 3
        for mixture in mixtures:
            assert mixture.gate.weight.requires_grad
            assert not mixture.correction.requires_grad
            assert mixture.correction.dtype == torch.float32


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        *(
            ("qwen3", {name: SERVER_VALUES.get(name, False)}, f"^{name}: .*the model has no experts; leave it at")
            for name in base.EXPERT_OPTIONS
        ),
        ("qwen3", {"pipeline_parallel_size": 9}, "^pipeline_parallel_size: 9 stages need at least 9 layers"),
        (
            "mixtral",
            {"enable_gradient_checkpointing": True, "enable_reentrant": True},
            "^enable_reentrant: true, but .* cannot keep the routes",
        ),
        *(
            ("mixtral", {"enable_lora": True, "lora_target_modules": [name]}, f"^lora_target_modules: .*{reason}")
            for name, reason in (
                ("experts.0.w2", "some of the experts only"),
                ("gate", "match no layer.*Routers have no adapter: leave them out"),
            )
        ),
    ],
)
def test_the_service_refuses_what_does_not_fit_the_model(
    model_type: str, options: dict[str, object], message: str, tmp_path: Path, place: Runtime
) -> None:
    # Catches an option that the service accepts and ignores, adapters that would train nothing of the experts, and an
    # error about stages that names no option.
    write_config(tmp_path, hf_config(model_type))
    values = {"config_path": str(tmp_path), "output_dir": str(tmp_path), "enable_gradient_checkpointing": False}
    config = server_config_from_mapping({**values, "enable_mixed_precision": False, **options}).config
    with pytest.raises(ValueError, match=message):
        Worker(build_base(config, place))


@pytest.mark.parametrize(
    ("exclude", "of_experts"), [(None, 4), (["experts"], 0), (["model.layers.1.mlp.experts", "o_proj"], 2)]
)
def test_the_base_of_the_service_has_quantised_experts(
    exclude: list[str] | None, of_experts: int, tmp_path: Path, place: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    # Catches experts that the service loads as they are, and a log that says nothing of them.
    caplog.set_level("DEBUG")
    write_config(tmp_path, hf_config("qwen3_moe", moe_intermediate_size=32))
    values = {"config_path": str(tmp_path), "output_dir": str(tmp_path), "enable_mixed_precision": False}
    qlora = {"enable_qlora": True, "quant_format": "nvfp4", "qlora_exclude_modules": exclude}
    config = server_config_from_mapping({**values, **qlora, "enable_gradient_checkpointing": False}).config
    layers = quantized_layers(build_base(config, place).module).values()
    assert sum(isinstance(layer, QuantizedExpertLinear) for layer in layers) == of_experts
    assert f"of_experts={of_experts} format=nvfp4_in_groups_of_16 by=xorl" in caplog.text
    assert (f"{4 - of_experts} of 4 projections of experts are not quantised" in caplog.text) == (exclude is not None)


def test_recomputed_experts_keep_less_and_compute_the_same(tmp_path: Path, place: Runtime, mesh: Mesh) -> None:
    # Catches a method that is accepted and keeps everything, or recomputes the attention too.
    ids, layout = torch.arange(512) % 61, SequenceLayout.from_lengths([200, 312])
    found: dict[str, tuple[float, torch.Tensor]] = {}
    for method in ("none", "moe_act", "layer"):
        options: dict[str, object] = {"train.enable_gradient_checkpointing": method != "none"}
        if method == "moe_act":
            options["train.moe_checkpoint_method"] = "moe_act"
        config = config_with(tmp_path, "qwen3_moe", options, vocab_size=61, moe_intermediate_size=96)
        architecture = read_architecture(config.model)
        model = build_model(architecture, config.model, config.train, config.lora, mesh, place.device)
        with LiveBytes() as live:
            output = model.forward(
                ids, layout, loss=lambda hidden, weight: cross_entropy(hidden, weight, {"labels": ids})
            )
            kept = live.held()
        output.sum.backward()
        found[method] = kept, torch.cat([p.grad.flatten() for p in model.module.parameters() if p.grad is not None])
    assert found["layer"][0] < found["moe_act"][0] < 0.8 * found["none"][0]
    for method in ("moe_act", "layer"):
        assert torch.equal(found[method][1], found["none"][1])


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
UP = "model.layers.2.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tensors: tensors.pop(UP), f"missing.*{re.escape(UP)}"),
        (lambda tensors: tensors.update({UP: tensors[UP][:-1].clone()}), rf"{re.escape(UP)}: \[31, .*in the model"),
    ],
    ids=["missing", "shape"],
)
def test_a_wrong_expert_in_a_checkpoint_is_named(
    change: Callable[[dict[str, torch.Tensor]], object], expected: str, tmp_path: Path, place: Runtime, mesh: Mesh
) -> None:
    # Catches an expert that keeps uninitialised memory because nothing was read for it.
    config = config_with(tmp_path, "qwen3_moe", {"model.model_path": str(tmp_path)}, **MOE)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    architecture = read_architecture(config.model)

    def build() -> object:
        return build_model(architecture, config.model, config.train, config.lora, mesh, place.device)

    build()
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"(?s)model.model_path.*{expected}"):
        build()


def test_more_active_experts_than_experts_are_refused(tmp_path: Path) -> None:
    # Catches a router that chooses experts which do not exist.
    config = config_with(tmp_path, "qwen3_moe", {}, **{**MOE, "num_experts_per_tok": 5})
    with pytest.raises(ValueError, match="num_experts_per_tok: 5 exceeds num_experts: 4"):
        read_architecture(config.model)
