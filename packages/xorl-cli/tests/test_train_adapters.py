"""What the lora section makes of a model: adapters, errors that name the option, and the work that is counted."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from local_options import Options, local_config
from tiny_decoders import tiny_decoder
from tiny_models import hf_config, write_config
from xorl.config.local import LoraConfig, ModelConfig
from xorl.core.mesh import Mesh
from xorl.core.models import SPECS, Decoder
from xorl.core.nn import LayerKernels
from xorl.kernels.attention.reference import eager_attention
from xorl.kernels.layout import SequenceLayout
from xorl.lora import adapters
from xorl.train.adapters.inject import add_adapters, flops_of
from xorl.train.build import build_engine
from xorl.train.model_source import read_architecture

SIZES = hf_config(vocab_size=50)
FAMILY = SPECS["Qwen3ForCausalLM"]


def decoder() -> Decoder:
    return tiny_decoder(SIZES, kernels=LayerKernels(attention=eager_attention))


def with_adapters(**lora: object) -> Decoder:
    model = decoder()
    add_adapters(model, LoraConfig.model_validate({"enable_lora": True, **lora}), FAMILY)
    return model


@pytest.mark.parametrize(
    "lora",
    [
        {"lora_target_modules": ["o_proj", "down_proj"]},
        {"lora_target_modules": ["o_proj"], "modules_to_save": ["down_proj"]},
    ],
)
def test_work_that_is_counted_is_the_work_that_is_done(lora: dict) -> None:
    # Catches an MFU that counts gradients of frozen weights, or leaves out those of adapters.
    model = with_adapters(**lora)
    lengths = [9, 4]
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(50, (13,)), SequenceLayout.from_lengths(lengths)).sum().backward()
    assert counter.get_total_flops() == flops_of(model.config, model)(lengths)


def test_targets_are_the_family_s_own_where_none_are_named() -> None:
    # Catches a default that adapts nothing, or the head too.
    names = {name.rpartition(".")[2] for name in adapters(with_adapters())}
    assert names == set(FAMILY.adapter_targets)
    assert {name.rpartition(".")[2] for name in adapters(with_adapters(lora_target_modules="all-linear"))} == names


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"lora_target_modules": ["qproj"]}, r"^lora\.lora_target_modules: .*'qproj'.*'q_proj'"),
        ({"rank_pattern": {"qproj": 4}}, r"^lora\.rank_pattern: 'qproj' does not match any"),
        ({"alpha_pattern": {"(": 4.0}}, r"^lora\.alpha_pattern: '\(' is not a valid regular expression"),
        ({"modules_to_save": ["head"]}, r"^lora\.modules_to_save: 'head' matches no module"),
        ({"use_dora": True, "lora_target_modules": ["embed_tokens"]}, r"^lora\.use_dora: .*embed_tokens"),
        ({"moe_shared_lora": True}, r"^lora\.moe_shared_lora: the targets name no layer of experts"),
        ({"moe_hybrid_shared_lora": True}, r"^lora\.moe_hybrid_shared_lora: the targets name no layer of experts"),
        ({"moe_lora_format": "peft"}, r"^lora\.moe_lora_format: only adapters on experts have forms"),
    ],
)
def test_an_error_begins_with_the_option_at_fault(lora: dict, message: str) -> None:
    # Catches a message about a field that the user has never seen.
    with pytest.raises(ValueError, match=message):
        with_adapters(**lora)


def test_an_adapter_beside_the_weights_is_not_passed_over(tmp_path: Path) -> None:
    """Catches a run on the base alone of a folder in which transformers applies an adapter, without a word."""
    folder = write_config(tmp_path / "model", SIZES)
    read_architecture(ModelConfig(model_path=str(folder)))
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model\.model_path: .*model holds an adapter beside .*lora\.adapter_path"):
        read_architecture(ModelConfig(model_path=str(folder)))
    read_architecture(ModelConfig(model_path=str(folder)), adapter_path=str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds no config\.json; it is an adapter: .*lora\.adapter_path"):
        read_architecture(ModelConfig(model_path=str(folder)))


def test_generation_follows_the_base_and_the_entries_of_the_run(tmp_path: Path) -> None:
    """Catches an export that generates with the stop tokens of another folder, or without those that were set."""
    base, other = (write_config(tmp_path / name, {**SIZES, "eos_token_id": 1}) for name in ("base", "other"))
    (base / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.6}')
    stops = {"eos_token_id": [1, 3]}

    def generation(**model: object) -> Mapping[str, object]:
        return read_architecture(ModelConfig.model_validate(model)).generation

    assert generation(model_path=str(base))["eos_token_id"] == [1, 2]
    assert generation(model_path=str(base), tokenizer_path=str(other))["eos_token_id"] == [1, 2]
    assert generation(model_path=str(base), config_path=str(other))["eos_token_id"] == [1, 2]
    assert generation(config_path=str(base))["temperature"] == 0.6
    assert generation(model_path=str(base), foundation=stops) == {**stops, "temperature": 0.6}
    assert generation(model_path=str(other), foundation=stops) == {}


class Trained:
    """The parameters of a model as its optimizer has them, on one rank."""

    def __init__(self, folder: Path, mesh: Mesh, model: Options = {}, lora: Options = {}, **train: object):  # noqa: B006 - not changed
        plain = {"data_parallel_mode": "none", "enable_mixed_precision": False, "enable_gradient_checkpointing": False}
        config = local_config({"config_path": str(folder), **model}, lora=lora, weight_decay=0.5, **plain, **train)
        engine = build_engine(config, read_architecture(config.model), mesh, torch.device("cpu"))
        self.groups = engine.optimizer.param_groups
        self.names = {parameter: name for name, parameter in engine.model.module.named_parameters()}

    def names_in(self, is_meant: Callable[[dict], object] = lambda group: True) -> set[str]:
        """The names of parameters in some of the groups."""
        return {self.names[one] for group in self.groups if is_meant(group) for one in group["params"]}

    @property
    def free(self) -> set[str]:
        """The parameters that weight decay leaves alone."""
        return self.names_in(lambda group: not group["weight_decay"])


@pytest.mark.parametrize("merge_qkv", [True, False])
def test_weight_decay_of_adapters_goes_by_the_names_of_checkpoints(merge_qkv: bool, tmp_path: Path, mesh: Mesh) -> None:
    """Catches `v_proj` that frees the adapters of q, which is stored in the same module, or `up_proj` those of gate."""
    targets = ["q_proj", "v_proj", "gate_proj", "up_proj"]
    lora = {"enable_lora": True, "lora_target_modules": targets, "use_dora": True}
    options = {"model": {"merge_qkv": merge_qkv}, "lora": lora, "no_decay_modules": ["v_proj", "up_proj"]}
    trained = Trained(write_config(tmp_path, SIZES), mesh, **options)
    assert not any(group["row_decays"] for group in trained.groups)
    assert {name.split(".")[-2] for name in trained.free} == {"v_proj", "up_proj"}
    assert len(trained.free) == 2 * 2 * 3


def test_scalars_of_activations_are_not_decayed_and_are_no_matrices(tmp_path: Path, mesh: Mesh) -> None:
    """Catches an activation that weight decay changes, scalars that Muon orthogonalises, and constants that train."""
    trained = Trained(write_config(tmp_path, hf_config("apertus")), mesh, optimizer="muon")
    activations = [f"model.layers.{index}.mlp.activation" for index in range(2)]
    assert trained.free == {f"{path}.{name}" for path in activations for name in ("alpha_p", "alpha_n")}
    assert not any("matrices" in group for group in trained.groups if not group["weight_decay"])
    constants = {f"{path}.{name}" for path in activations for name in ("beta", "eps")}
    assert trained.names_in() | constants == set(trained.names.values())
    assert not trained.names_in() & constants


def test_decays_of_recurrences_are_not_decayed_and_taps_are_no_matrices(tmp_path: Path, mesh: Mesh) -> None:
    """Catches weight decay that makes states forget at another rate, and taps that Muon orthogonalises."""
    trained = Trained(write_config(tmp_path, hf_config("qwen3_5_text")), mesh, optimizer="muon")
    assert trained.free == {f"model.layers.0.linear_attn.decay.{name}" for name in ("A_log", "dt_bias")}
    matrices = trained.names_in(lambda group: "matrices" in group)
    projections = {name.split(".")[-2] for name in matrices if ".linear_attn." in name}
    assert projections == {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"}
