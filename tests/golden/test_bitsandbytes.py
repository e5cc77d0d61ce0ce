"""nf4 against bitsandbytes: codes, scales and values of the same weights, and checkpoints that it wrote."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from local_options import local_config
from saved_models import save_model, save_peft_adapter
from tiny_models import hf_config
from xorl.core import runtime
from xorl.core.mesh import Mesh, ParallelDims
from xorl.kernels.quant.nf4 import dequantize_nf4, quantize_nf4
from xorl.lora.quantized import quantized_layers
from xorl.train.export.saved import export_saved
from xorl.train.model import build_model
from xorl.train.model_source import read_architecture

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="there is no bitsandbytes for this platform"
)


def test_codes_scales_and_values_are_those_of_bitsandbytes() -> None:
    # Catches a table, a rounding, an order of nibbles or of groups that another tool would read as other weights.
    # It takes seconds to import, and nothing else here needs it.
    from bitsandbytes import functional as bnb  # noqa: PLC0415

    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for group_size in (64, 128):
            normal, spread = torch.randn(2, 384, 1024, generator=generator)
            weight = (0.02 * normal * spread.exp()).to(dtype)
            weight[5, :128] = 0.0
            codes, state = bnb.quantize_4bit(weight, blocksize=group_size, quant_type="nf4", compress_statistics=False)
            ours, absmax = quantize_nf4(weight, group_size)
            assert torch.equal(ours.flatten(), codes.flatten())
            assert torch.equal(absmax.flatten(), state.absmax)
            wanted = bnb.dequantize_4bit(codes, state)
            assert torch.equal(dequantize_nf4(ours, absmax, dtype), wanted)


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_bitsandbytes_has_the_weights_that_it_has_there(nested: bool, tmp_path: Path) -> None:
    # Catches a layout of its files that the tests which write such files themselves know no better than the reader.
    from bitsandbytes import functional as bnb  # noqa: PLC0415

    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "initializer_range": 0.1}
    save_model(tmp_path / "whole", hf_config(**sizes, tie_word_embeddings=False))
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole", quantization_config=options, dtype=torch.float32, device_map="cpu"
    )
    theirs.save_pretrained(tmp_path / "stored")
    source, lora = {"model_path": str(tmp_path / "stored")}, {"enable_qlora": True, "quant_format": "nf4"}
    config = local_config(source, lora=lora, data_parallel_mode="none", enable_mixed_precision=False)
    place = runtime.init("cpu")
    try:
        mesh = Mesh(ParallelDims.resolve("none", 1), "cpu")
        architecture = read_architecture(config.model)
        model = build_model(architecture, config.model, config.train, config.lora, mesh, place.device).module
    finally:
        runtime.shutdown()
    layers = quantized_layers(model)
    assert len(layers) == 8
    # Its own product on a CPU rounds more than its weights, so these are compared.
    stacked = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for path, layer in layers.items():
        parent, _, name = path.rpartition(".")
        parts = [theirs.get_submodule(f"{parent}.{part}").weight for part in stacked.get(name, (name,))]
        wanted = torch.cat([bnb.dequantize_4bit(part.data, part.quant_state) for part in parts])
        assert (layer.dense_weight(torch.float32) - wanted).abs().max() <= 1e-6 * wanted.abs().max(), path
    _verify_an_adapter_on(tmp_path / "stored", theirs, tmp_path)


def _verify_an_adapter_on(base: Path, model: PreTrainedModel, folder: Path) -> None:
    """Catches a good adapter that `--verify` refuses because products of the quantised base are rounded on a CPU."""
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    save_peft_adapter(model, folder / "adapter", **options)
    exported = export_saved(str(folder / "adapter"), str(folder / "again"), base=str(base), verify=True)
    assert "| peft |" in (exported / "README.md").read_text()
