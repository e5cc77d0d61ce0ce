"""The weights of a placed model as other tools name them, with adapters folded in and quantised ones dequantised."""

from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from layouts import LAYOUTS, ONE_PROCESS, engine_for, run_config, weights_of, write_models
from ranks import Launch, Launches
from table_of_runs import NO_OPTIONS, QLORA, RUNS
from xorl.lora import Adapter, AdapterBank, AdapterSpec, adapters
from xorl.lora.quantized import QuantizedLayer, read_rows
from xorl.train.model_source import read_architecture
from xorl.train.verify import _draw

BANK = "an adapter of a bank"
# By kind: the section lora.
KINDS = {
    "adapters": RUNS["qwen3, tied LoRA"].lora,
    "adapters over quantised weights": QLORA,
    BANK: NO_OPTIONS,
}
# Ranks that share matrices hold no banks.
CASES = [case for case in product(KINDS, ("fsdp 2", "tp 2", "pp 2")) if case != (BANK, "tp 2")]


def sent(folder: Path, kind: str, layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(what is sent, what should be: on one rank, each weight by the formula)."""
    config = run_config(folder, "qwen3", LAYOUTS[layout].train if layout else ONE_PROCESS, KINDS[kind])
    engine = engine_for(config)
    module = engine.model.module
    _draw(module)
    found: dict[str, Adapter] = adapters(module)
    if kind == BANK:
        bank = AdapterBank(module, num_resident=2, max_rank=4, device=torch.device("cpu"))
        bank.add("a", AdapterSpec(rank=3, alpha=8, targets=("q_proj", "v_proj", "down_proj")))
        found = bank.adapters("a")
        # As if trained: with B at zero nothing would be folded in.
        for name, each in found.items():
            for parameter in each.parameters().values():
                generator = torch.Generator().manual_seed(sum(map(ord, name)))
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    made = weights_of(engine, config, found)
    if layout:
        return made, {}
    wanted: dict[str, Tensor] = {}
    for native, recipe in read_architecture(config.model).recipes(merge_qkv=True).items():
        layer = module.get_submodule(native.rpartition(".")[0])
        dense = read_rows(layer) if isinstance(layer, QuantizedLayer) else getattr(layer, native.rpartition(".")[2])
        wanted |= {name: part.detach().clone() for name, part in recipe.split(dense).items()}
    for name, adapter in found.items():
        change = adapter.scale * adapter.B.detach() @ adapter.A.detach()
        wanted[f"{name}.weight"] += change.T if "embed" in name else change
    return made, wanted


@pytest.fixture(scope="module")
def found(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    folder = write_models(tmp_path_factory.mktemp("models"))
    cells = {(kind, ""): (1, partial(sent, folder, kind, "")) for kind in KINDS}
    return launch(cells | {(kind, layout): (2, partial(sent, folder, kind, layout)) for kind, layout in CASES})


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_weights_are_merged_and_dequantised_on_every_placement(kind: str, layout: str, found: Launches) -> None:
    # Catches a base sent without its adapter, a merge into other rows or columns than the rank's own, a file of one
    # stage's tensors, and codes sent as weights.
    [(alone, wanted)], [(placed, _), (other, _)] = found(kind, ""), found(kind, layout)
    assert not other, "rank 0 alone keeps what is gathered"
    assert alone.keys() == wanted.keys() == placed.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(alone[name], tensor, rtol=1e-6, atol=1e-6, msg=name)
        torch.testing.assert_close(placed[name], alone[name], rtol=0, atol=1e-7, msg=name)
