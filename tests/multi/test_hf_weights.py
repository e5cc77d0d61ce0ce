"""The weights of a placed model as other tools name them, with adapters folded in and quantised ones dequantised."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from layouts import mesh_for, write_weights
from local_options import local_config
from tiny_models import hf_config, write_config
from xorl.ckpt import SafetensorsSource
from xorl.config import Config
from xorl.core.mesh import Mesh, ParallelDims
from xorl.lora import Adapter, AdapterBank, AdapterSpec, adapter_parameters, adapters, load_adapter_state_dict
from xorl.lora.quantized import QuantizedLayer, read_rows
from xorl.train.build import build_engine
from xorl.train.export.hf_weights import hf_groups
from xorl.train.model_source import read_architecture

HF_CONFIG = hf_config(hidden_size=64, intermediate_size=192, num_hidden_layers=1)
CPU = torch.device("cpu")
LORA = {"enable_lora": True, "lora_rank": 3, "lora_target_modules": ["q_proj", "v_proj", "down_proj"]}
QLORA = {**LORA, "enable_qlora": True, "quant_format": "nf4"}
KINDS: dict[str, tuple[dict[str, object], bool]] = {
    # kind: (section lora, whether the adapter is a bank's)
    "adapters": (LORA, False),
    "adapters over quantised weights": (QLORA, False),
    "an adapter of a bank": ({}, True),
}


def config_of(folder: Path, lora: dict[str, object], num_ranks: int) -> Config:
    train = {"enable_mixed_precision": False, "enable_gradient_checkpointing": False}
    return local_config(folder, lora=lora, **train, data_parallel_mode="none" if num_ranks == 1 else "fsdp2")


def values(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drawn as if trained: with B at zero nothing would be folded in."""
    generator = torch.Generator().manual_seed(4)
    return {name: torch.randn(tensor.shape, generator=generator) * 0.1 for name, tensor in sorted(found.items())}


def sent(folder: Path, kind: str, num_ranks: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(what is sent, what should be: on one rank, each weight by the formula)."""
    lora, is_banked = KINDS[kind]
    config = config_of(folder, lora, num_ranks)
    architecture = read_architecture(config.model)
    dims = ParallelDims.resolve(config.train.data_parallel_mode, num_ranks)
    model = build_engine(config, architecture, Mesh(dims, "cpu"), CPU).model
    recipes = architecture.recipes(merge_qkv=config.model.merge_qkv)
    found: dict[str, Adapter] | None = None
    if is_banked:
        bank = AdapterBank(model.module, num_resident=2, max_rank=4, device=CPU)
        bank.add("a", AdapterSpec(rank=3, alpha=8, targets=("q_proj", "v_proj", "down_proj")))
        found = bank.adapters("a")
        drawn = values(
            {f"{name}.{leaf}": p.detach() for name, each in found.items() for leaf, p in each.parameters().items()}
        )
        for name, each in found.items():
            for leaf, parameter in each.parameters().items():
                parameter.data.copy_(drawn[f"{name}.{leaf}"])
    else:
        parameters = adapter_parameters(model.module)
        load_adapter_state_dict(model.module, values({name: p.detach() for name, p in parameters.items()}))
    groups = hf_groups(model, recipes, dtype=torch.float32, device=CPU, merged_adapters=found)
    made = {name: tensor.clone() for group in groups for name, tensor in group.make().items()}
    if num_ranks > 1:
        return made, {}
    wanted: dict[str, Tensor] = {}
    for native, recipe in recipes.items():
        layer = model.module.get_submodule(native.rpartition(".")[0])
        dense = read_rows(layer) if isinstance(layer, QuantizedLayer) else getattr(layer, native.rpartition(".")[2])
        wanted |= {name: part.detach().clone() for name, part in recipe.split(dense).items()}
    for name, adapter in (adapters(model.module) if found is None else found).items():
        wanted[f"{name}.weight"] += adapter.scale * adapter.B.detach() @ adapter.A.detach()
    return made, wanted


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_merged_and_dequantised_on_every_placement(kind: str, tmp_path: Path, run_ranks: Callable) -> None:
    # Catches a base sent without its adapter, a merge into the wrong rows of a shard, and codes sent as weights.
    write_config(tmp_path, HF_CONFIG)
    [(alone, wanted)] = run_ranks(lambda: sent(tmp_path, kind, 1), 1)
    (sharded, _), (other, _) = run_ranks(lambda: sent(tmp_path, kind, 2), 2)
    assert not other, "rank 0 alone keeps what is gathered"
    assert alone.keys() == wanted.keys() == sharded.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(alone[name], tensor, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(sharded[name], alone[name], rtol=0, atol=1e-7)


def returned(folder: Path, train: dict[str, object]) -> dict[str, Tensor]:
    """The weights of a model that was loaded from a folder, in the dtype of its files."""
    config = local_config({"model_path": str(folder)}, enable_mixed_precision=False, **train)
    architecture = read_architecture(config.model)
    model = build_engine(config, architecture, mesh_for(config), CPU).model
    recipes = architecture.recipes(merge_qkv=config.model.merge_qkv)
    groups = hf_groups(model, recipes, dtype=torch.bfloat16, device=CPU)
    return {name: tensor.clone() for group in groups for name, tensor in group.make().items()}


@pytest.mark.parametrize("train", [{"data_parallel_mode": "fsdp2"}, {"tensor_parallel_size": 2}], ids=["fsdp", "tp"])
def test_scalars_and_constants_return_bit_for_bit(train: dict[str, object], tmp_path: Path, run_ranks) -> None:
    # Catches a shard without rows that is read or gathered wrongly, and a constant that is lost, cast or of one dim.
    write_config(tmp_path / "apertus", hf_config("apertus"))
    write_weights(tmp_path, "apertus", torch.bfloat16)
    found, other = run_ranks(lambda: returned(tmp_path / "apertus", train), 2)
    assert not other, "rank 0 alone keeps what is gathered"
    source = SafetensorsSource(tmp_path / "apertus")
    assert found.keys() == set(source.names())
    assert source.shape("model.layers.0.mlp.act_fn.eps") == ()
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, source.read(name)), name
