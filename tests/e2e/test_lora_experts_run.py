"""Runs that train adapters on experts, each alone or shared: checkpoints, exports in every form, and going on."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import lora_runs
from lora_runs import NUM_STEPS, eval_losses, last, run, write_data
from saved_models import save_model
from tiny_models import hf_config
from xorl.cli.export import app
from xorl.config import LoadedConfig
from xorl.train.export.folder import export_folder
from xorl.train.export.saved import export_saved
from xorl.train.export.source import open_saved
from xorl.train.export.verify import VerificationError, verify_adapter

pytestmark = pytest.mark.multi
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
EP = {"data_parallel_mode": "fsdp2", "expert_parallel_size": 2}
TARGETS = {
    "qwen3_moe": ["q_proj", "gate_proj", "up_proj", "down_proj"],
    "mixtral": ["q_proj", "w1", "w2", "w3"],
    # PEFT cannot adapt dense layers and shared experts under the same names as experts.
    "glm4_moe": ["q_proj", "experts.gate_proj", "experts.up_proj", "experts.down_proj"],
}
NUM_EXPERTS = {"qwen3_moe": 4, "mixtral": 4, "glm4_moe": 8}
ALL, OUTER = {"moe_shared_lora": True}, {"moe_hybrid_shared_lora": True}
# By name: the model, options of lora, the form that is written, and another that it is exported in.
RUNS: dict[str, tuple[str, dict[str, object], str, str]] = {
    "per_expert": ("glm4_moe", {}, "per_expert", "peft"),
    "peft": ("mixtral", {"moe_lora_format": "peft"}, "peft", "per_expert"),
    "sglang": ("mixtral", OUTER, "sglang", "peft"),
    "outer, peft": ("qwen3_moe", {**OUTER, "moe_lora_format": "peft"}, "peft", "sglang"),
    "all": ("qwen3_moe", ALL, "per_expert", "peft"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers of each type, and `data.jsonl`, in which a token is the one before plus one."""
    root = tmp_path_factory.mktemp("lora")
    for model_type in TARGETS:
        save_model(root / model_type, hf_config(model_type))
    write_data(root)
    return root


def config_of(folder: Path, output: Path, base: str, lora: Mapping[str, object], **options: object) -> LoadedConfig:
    if "adapter_path" not in lora:
        lora = {"lora_rank": 4, "lora_alpha": 6, "lora_target_modules": TARGETS[base], **lora}
    return lora_runs.config_of(folder, output, lora, base=base, router_aux_loss_coef=0.0, **options)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_leaves_what_others_read_and_goes_on_from_it(name: str, folder: Path, tmp_path: Path, run_ranks) -> None:
    # Catches factors at one rank's share, files that lose what was trained or shared, and a start from other values.
    base, lora, form, other = RUNS[name]
    output = tmp_path / "output"
    loaded = config_of(folder, output, base, lora, **EP, save_steps=2)
    run_ranks(lambda: run(loaded), 2)
    losses = eval_losses(output)
    assert losses[NUM_STEPS] < losses[0]
    assert form_of(last(output)) == form

    export_saved(str(output), str(tmp_path / "merged"), merge=True, verify=True)
    written, wanted = (
        load_file(path / "model.safetensors") for path in (tmp_path / "merged", export_folder(last(output)))
    )
    torch.testing.assert_close(written, wanted, rtol=0, atol=1e-6)
    adapter = export_saved(str(output), str(tmp_path / "adapter"), verify=True)
    torch.testing.assert_close(load_file(adapter / WEIGHTS), load_file(last(output) / WEIGHTS), rtol=0, atol=0)
    result = CliRunner().invoke(
        app, [str(adapter), "--output", str(tmp_path / "other"), "--verify", "--moe-lora-format", other]
    )
    assert result.exit_code == 0, result.output
    assert form_of(tmp_path / "other") == other

    # From either form the same adapter is trained on, with what its experts share.
    lengths: list[dict[str, tuple[int, ...]]] = []
    for start in (adapter, tmp_path / "other"):
        further = config_of(folder, tmp_path / "further", base, {"adapter_path": str(start)}, max_steps=1)
        lengths += run_ranks(lambda further=further: run(further), 1)
        assert eval_losses(tmp_path / "further")[0] == pytest.approx(losses[NUM_STEPS], rel=1e-5)
        shutil.rmtree(tmp_path / "further")
    assert lengths[0] == lengths[1]
    experts = {key: shape[0] for key, shape in lengths[0].items() if "layers.1" in key and "experts" in key}
    outer = {key for key in experts if key.endswith(("down_proj.lora_B", "w2.lora_B"))} | {
        key for key in experts if key.endswith("lora_A") and "down_proj" not in key and "w2" not in key
    }
    sizes = {key: {"lora_A": 4, "lora_B": 32 if key in outer else 24}[key.rpartition(".")[2]] for key in experts}
    shared = outer if "moe_hybrid_shared_lora" in lora else experts if "moe_shared_lora" in lora else ()
    assert experts == {key: size if key in shared else NUM_EXPERTS[base] * size for key, size in sizes.items()}


def form_of(folder: Path) -> str:
    content = json.loads((folder / CONFIG).read_text())
    return "peft" if "target_parameters" in content else "sglang" if "_sglang_lora_format" in content else "per_expert"


@pytest.mark.parametrize("lora", [OUTER, {**ALL, "moe_lora_format": "peft"}, {**OUTER, "merge_lora_interval": 3}])
def test_a_run_that_is_resumed_on_other_ranks_computes_the_same(
    lora: dict[str, object], folder: Path, tmp_path: Path, run_ranks
) -> None:
    # Catches shared factors that a checkpoint lacks or has once for each rank, and merges that differ between layouts.
    whole = config_of(folder, tmp_path / "whole", "qwen3_moe", lora, data_parallel_mode="none", micro_batch_size=2)
    run_ranks(lambda: run(whole), 1)
    first = config_of(folder, tmp_path / "first", "qwen3_moe", lora, **EP, save_steps=2, max_steps=NUM_STEPS)
    run_ranks(lambda: run(first), 2)
    checkpoint = str(tmp_path / "first" / "checkpoints" / "global_step_2")
    options = {"load_checkpoint_path": checkpoint, "data_parallel_mode": "none", "micro_batch_size": 2}
    again = config_of(folder, tmp_path / "again", "qwen3_moe", lora, **options)
    run_ranks(lambda: run(again), 1)
    expected = eval_losses(tmp_path / "whole")[NUM_STEPS]
    assert eval_losses(tmp_path / "first")[NUM_STEPS] == pytest.approx(expected, rel=1e-4)
    assert eval_losses(tmp_path / "again")[NUM_STEPS] == pytest.approx(expected, rel=1e-4)


def test_a_resume_with_other_sharing_is_refused(folder: Path, tmp_path: Path, run_ranks) -> None:
    # Catches a message about names of parameters that does not name the option.
    alone = {"data_parallel_mode": "none"}
    run_ranks(lambda: run(config_of(folder, tmp_path / "output", "qwen3_moe", ALL, **alone, max_steps=1)), 1)
    checkpoint = str(tmp_path / "output" / "checkpoints" / "global_step_1")
    other = config_of(folder, tmp_path / "other", "qwen3_moe", OUTER, **alone, load_checkpoint_path=checkpoint)

    def refused() -> None:
        with pytest.raises(ValueError, match=r"lora\.moe_hybrid_shared_lora: false, now true"):
            run(other)

    run_ranks(refused, 1)


@pytest.mark.parametrize("form", ["per_expert", "peft", "sglang"])
def test_what_is_not_what_was_trained_is_not_verified(form: str, folder: Path, tmp_path: Path, run_ranks) -> None:
    # Catches a file that loads, talks fluently, and has lost its training.
    lora = {**OUTER, "moe_lora_format": form, "save_lora_only": True}
    output = tmp_path / "output"
    run_ranks(lambda: run(config_of(folder, output, "qwen3_moe", lora, data_parallel_mode="none", max_steps=2)), 1)
    saved = open_saved(str(output))
    adapter = export_saved(str(output), str(tmp_path / "adapter"))
    share = verify_adapter(adapter, saved, torch.float32)["as a share of the largest logit"]
    assert isinstance(share, float)
    assert share <= 1e-5
    tensors = load_file(adapter / WEIGHTS)

    def spoiled(change: Mapping[str, torch.Tensor]) -> Path:
        save_file({**tensors, **change}, adapter / WEIGHTS)
        return adapter

    zeros = {key: tensor * 0 for key, tensor in tensors.items() if "experts" in key and "lora_B" in key}
    with pytest.raises(VerificationError, match="adapters are zero and have no effect"):
        verify_adapter(spoiled(zeros), saved, torch.float32)
    num_experts = 4
    if form == "per_expert":
        keys = [key for key in tensors if "gate_proj.lora_B" in key or "up_proj.lora_B" in key]
        turned = {key: tensors[key.replace(".0.", ".9.").replace(".1.", ".0.").replace(".9.", ".1.")] for key in keys}
    elif form == "sglang":
        turned = {key: tensor.roll(1, 0) for key, tensor in tensors.items() if "lora_B" in key and "experts" in key}
    else:
        turned = {
            key: tensor.unflatten(1, (-1, num_experts)).roll(1, 2).flatten(1)
            for key, tensor in tensors.items()
            if "lora_B" in key and "experts" in key
        }
    with pytest.raises(VerificationError):
        verify_adapter(spoiled(turned), saved, torch.float32)
    verify_adapter(spoiled({}), saved, torch.float32)
