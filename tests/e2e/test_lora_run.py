"""A run that trains adapters: what stands in its checkpoints, how it is resumed, exported and gone on from."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lora_runs import NUM_STEPS, config_of, eval_losses, last, run, write_data
from saved_models import save_model
from tiny_models import hf_config
from xorl.ckpt import read_manifest
from xorl.ckpt.layout import verify
from xorl.config import LoadedConfig
from xorl.kernels.quant.block_fp8 import quantize_block_fp8
from xorl.train import build_run
from xorl.train.export.folder import export_folder
from xorl.train.export.saved import export_saved

WEIGHTS = "adapter_model.safetensors"
KINDS: dict[str, dict[str, object]] = {
    "plain": {"lora_rank": 4, "lora_alpha": 8},
    "dora": {"lora_rank": 4, "use_dora": True, "use_rslora": True, "modules_to_save": ["model.norm"]},
    "head and patterns": {
        "lora_target_modules": ["q_proj", "down_proj", "lm_head", "embed_tokens"],
        "rank_pattern": {"down_proj": 2, "0.self_attn.q_proj": 3},
    },
}

# Of the models in `folder`.
EXPERT_TARGETS: dict[str, dict[str, object]] = {
    "base": {},
    "mixture": {"lora_target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base` and `mixture`, models of transformers, and `data.jsonl`, in which a token is the one before plus one."""
    root = tmp_path_factory.mktemp("lora")
    save_model(root / "base")
    mixture = hf_config("qwen3_moe", moe_intermediate_size=32, num_key_value_heads=4, head_dim=16)
    save_model(root / "mixture", mixture)
    write_data(root)
    return root


@pytest.mark.multi
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_leaves_what_others_read_and_goes_on_from_it(kind: str, folder: Path, tmp_path: Path, run_ranks) -> None:
    # Catches adapters at one shard of each matrix, keys that load as nothing, and a start from other values.
    output = tmp_path / "output"
    loaded = config_of(folder, output, KINDS[kind])
    run_ranks(lambda: run(loaded), 2)
    checkpoint = last(output)
    assert WEIGHTS in verify(checkpoint).files
    losses = eval_losses(output)
    assert losses[NUM_STEPS] < losses[0]

    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    merged = PeftModel.from_pretrained(base, checkpoint).merge_and_unload().state_dict()
    exported = AutoModelForCausalLM.from_pretrained(export_folder(checkpoint)).state_dict()
    torch.testing.assert_close(exported, merged, rtol=0, atol=1e-5)

    # From the checkpoint's own base, by the command, and as the adapter alone.
    export_saved(str(output), str(tmp_path / "merged"), merge=True, verify=True)
    again = export_saved(str(output), str(tmp_path / "adapter"), verify=True)
    torch.testing.assert_close(load_file(again / WEIGHTS), load_file(checkpoint / WEIGHTS), rtol=0, atol=0)

    further = config_of(folder, tmp_path / "further", {"adapter_path": str(again)}, max_steps=1)
    run_ranks(lambda: run(further), 1)
    assert eval_losses(tmp_path / "further")[0] == pytest.approx(losses[NUM_STEPS], rel=1e-6)
    content = [
        json.loads((path / "adapter_config.json").read_text()) for path in (again, last_of(tmp_path / "further"))
    ]
    assert content[0] == content[1]


def last_of(output: Path) -> Path:
    return output / "checkpoints" / (output / "checkpoints" / "latest").read_text().strip()


@pytest.mark.multi
def test_adapters_alone_are_enough_to_resume_and_to_export(folder: Path, tmp_path: Path, run_ranks) -> None:
    # Catches base weights in checkpoints that should hold none, and a resumed run that lacks what they left out.
    lora = {**KINDS["dora"], "save_lora_only": True}
    whole = config_of(folder, tmp_path / "whole", lora, save_steps=2)
    run_ranks(lambda: run(whole), 2)
    # As if the run had been ended after its second step.
    (tmp_path / "cut" / "checkpoints").mkdir(parents=True)
    (tmp_path / "whole" / "checkpoints" / "global_step_2").rename(tmp_path / "cut" / "checkpoints" / "global_step_2")
    saved = set(read_manifest(tmp_path / "cut" / "checkpoints" / "global_step_2").tensors)
    held = {name for name in saved if name.startswith("model.")}
    assert {name for name in held if ".adapter." not in name} == {"model.model.norm.weight"}
    resumed = config_of(folder, tmp_path / "cut", lora, save_steps=2, load_checkpoint_path="auto")
    run_ranks(lambda: run(resumed), 2)
    folders = [last(tmp_path / name) for name in ("whole", "cut")]
    torch.testing.assert_close(*(load_file(path / WEIGHTS) for path in folders), rtol=0, atol=0)

    names = sorted(path.name for path in export_folder(folders[0]).iterdir())
    assert names == ["README.md", "adapter_config.json", WEIGHTS]
    torch.testing.assert_close(
        load_file(export_folder(folders[0]) / WEIGHTS), load_file(folders[0] / WEIGHTS), rtol=0, atol=0
    )
    export_saved(str(export_folder(folders[0])), str(tmp_path / "merged"), merge=True, verify=True)


@pytest.mark.multi
def test_a_run_does_not_go_on_with_another_model(folder: Path, tmp_path: Path, run_ranks) -> None:
    # Catches adapters that are scaled otherwise from one step to the next, or laid over a base of the same shapes.
    lora, resume = {**KINDS["plain"], "save_lora_only": True}, {"load_checkpoint_path": "auto"}
    run_ranks(lambda: run(config_of(folder, tmp_path, lora, max_steps=1)), 1)
    save_model(folder / "other", seed=1)
    save_model(folder / "longer" / "base", hf_config() | {"rope_theta": 500.0}, seed=2)
    scaled = (
        ({**lora, "lora_alpha": 4}, "lora.lora_alpha: 4.0, but the adapters in .* were trained with 8.0"),
        ({**lora, "use_rslora": True}, "lora.use_rslora: True"),
        ({**lora, "alpha_pattern": {"q_proj": 1}}, "lora.alpha_pattern: .*q_proj.*, but the adapters .* with {}"),
    )
    loaded = [(config_of(folder, tmp_path, changed, **resume), said) for changed, said in scaled]
    other = config_of(folder, tmp_path, lora, base="other", **resume)
    loaded.append((other, "was trained over .*base with the fingerprint .*other, which model.model_path names"))
    # Catches a list of tensors in place of the option that the user changed.
    begun = r"train.load_checkpoint_path: .*global_step_1 was saved with "
    for changed, options, said in (
        ({**lora, "lora_rank": 2}, {}, r"lora.lora_rank: 4, now 2\n.*another model"),
        ({**lora, "lora_target_modules": ["q_proj"]}, {}, r"lora.lora_target_modules: \[.*\], now \[\"q_proj\"\]\n"),
        (lora, {"optimizer": "sgd"}, r'train.optimizer: "adamw", now "sgd"\n'),
    ):
        loaded.append((config_of(folder, tmp_path, changed, **resume, **options), begun + said))
    quantized = config_of(folder, tmp_path, {**lora, "enable_qlora": True}, **resume)
    loaded.append((quantized, "over a base with lora.enable_qlora: false, now true: restore the option"))
    longer = config_of(folder, tmp_path, lora, base="longer/base", **resume)
    loaded.append(
        (longer, "than the section model describes\n  rope_parameters.rope_theta: 10000.0, not 500.0\nChoose")
    )

    def refused() -> None:
        for config, said in loaded:
            with pytest.raises(ValueError, match=said):
                run(config)

    run_ranks(refused, 1)


@pytest.mark.multi
def test_weights_that_are_kept_the_other_way_are_adapted_as_peft_does(folder: Path, tmp_path: Path, run_ranks) -> None:
    # Catches a matrix [in, out] whose adapter is named for another orientation, or folded in lying down.
    save_model(folder / "turned", hf_config("gpt2"))
    output = tmp_path / "output"
    loaded = config_of(folder, output, KINDS["plain"], max_steps=1, base="turned")
    run_ranks(lambda: run(loaded), 1)
    adapter = export_saved(str(output), str(tmp_path / "adapter"), verify=True)
    assert json.loads((adapter / "adapter_config.json").read_text())["fan_in_fan_out"] is True
    export_saved(str(output), str(tmp_path / "merged"), merge=True, verify=True)


def refusal_of(loaded: LoadedConfig) -> str:
    """Why a run is not built."""
    try:
        build_run(loaded.config)
    except ValueError as error:
        return str(error)
    return "none"


@pytest.mark.multi
def test_an_adapter_of_another_base_stops_the_run(folder: Path, tmp_path: Path, run_ranks) -> None:
    # Catches an adapter that is trained on over weights that it was not made for.
    alone = {"data_parallel_mode": "none", "max_steps": 1}
    first = config_of(folder, tmp_path / "output", KINDS["plain"], **alone)
    run_ranks(lambda: run(first), 1)
    adapter = tmp_path / "output" / "checkpoints" / "global_step_1"
    runs = []
    for name, sizes in (("wide", {"intermediate_size": 64}), ("like", {})):
        save_model(tmp_path / name, hf_config(**sizes), seed=3)
        loaded = config_of(folder, tmp_path / f"from_{name}", {"adapter_path": str(adapter)}, **alone)
        model = loaded.config.model.model_copy(
            update={key: str(tmp_path / name) for key in ("model_path", "config_path", "tokenizer_path")}
        )
        runs.append(replace(loaded, config=loaded.config.model_copy(update={"model": model})))
    drawn = runs[-1].config.model.model_copy(update={"model_path": None})
    runs.append(replace(runs[-1], config=runs[-1].config.model_copy(update={"model": drawn})))
    runs.append(config_of(folder, tmp_path / "damaged", {"adapter_path": str(adapter)}, **alone))
    wide, like, random = (run_ranks(lambda loaded=loaded: refusal_of(loaded), 1)[0] for loaded in runs[:3])
    assert re.match(r"(?s)lora.adapter_path: .*which model.model_path names.*\[48, 32\], the base has \[64, 32\]", wide)
    assert re.match(r"lora.adapter_path: .* was trained over .*base with the fingerprint .*like, which model.", like)
    assert re.match(r"lora.adapter_path: .*base_model_name_or_path: .*base, and model.model_path is null", random)
    (adapter / WEIGHTS).write_bytes((adapter / WEIGHTS).read_bytes()[:-1] + b"\0")
    [damaged] = run_ranks(lambda: refusal_of(runs[3]), 1)
    assert re.match(rf"lora.adapter_path: (?s:.*){WEIGHTS} has changed", damaged)


@pytest.mark.multi
def test_a_base_that_was_merged_into_is_exported_and_not_taken_for_another(
    folder: Path, tmp_path: Path, run_ranks
) -> None:
    # Catches an adapter that is put on the base as it was before adapters were merged into it.
    output = tmp_path / "output"
    merging = config_of(folder, output, {"merge_lora_interval": 2})
    run_ranks(lambda: run(merging), 2)
    merged = export_saved(str(output), str(tmp_path / "merged"), merge=True, verify=True)
    written, wanted = (load_file(path / "model.safetensors") for path in (merged, export_folder(last(output))))
    torch.testing.assert_close(written, wanted, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="--verify: an adapter is compared on its base model"):
        export_saved(str(output), str(tmp_path / "adapter"), verify=True)
    further = config_of(folder, tmp_path / "further", {"adapter_path": str(last(output))})
    [told] = run_ranks(lambda: refusal_of(further), 1)
    assert "with adapters merged into it while training" in told


@pytest.mark.multi
@pytest.mark.parametrize("base", ["base", "mixture"])
def test_adapters_over_a_quantised_base_are_for_the_base_that_they_name(
    base: str, folder: Path, tmp_path: Path, run_ranks
) -> None:
    # Catches an adapter that is held against the quantised weights of its checkpoint, which PEFT has not, and experts
    # that are exported as bytes.
    output = tmp_path / "output"
    lora = {"enable_qlora": True, "quant_format": "nf4", "quant_group_size": 16, **EXPERT_TARGETS[base]}
    qlora = config_of(folder, output, lora, base=base)
    run_ranks(lambda: run(qlora), 2)
    export_saved(str(output), str(tmp_path / "adapter"), verify=True)
    merged = export_saved(str(output), str(tmp_path / "merged"), merge=True, dtype=torch.float32, verify=True)
    written, wanted = (load_file(path / "model.safetensors") for path in (merged, export_folder(last(output))))
    torch.testing.assert_close(written, wanted, rtol=0, atol=1e-6)
    assert "nf4" in (merged / "README.md").read_text()


@pytest.mark.parametrize("enable_qlora", [True, False])
def test_adapters_on_a_quantised_checkpoint_are_merged_into_it(
    enable_qlora: bool, folder: Path, tmp_path: Path, run_ranks
) -> None:
    # Catches codes that are exported as weights, a config.json that still says they are quantised, and a model that is
    # not the one that was trained.
    stored = tmp_path / "stored"
    shutil.copytree(folder / "mixture", stored)
    content = json.loads((stored / "config.json").read_text())
    blocks = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["lm_head"]}
    (stored / "config.json").write_text(json.dumps({**content, "quantization_config": blocks}))
    tensors = load_file(stored / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantize_block_fp8(tensors[name], 16)
    save_file(tensors, stored / "model.safetensors")
    lora: dict[str, object] = {"save_lora_only": True, **EXPERT_TARGETS["mixture"]}
    if enable_qlora:
        lora |= {"enable_qlora": True, "quant_format": "block_fp8", "quant_group_size": 16}
    loaded = config_of(folder, tmp_path / "output", lora, base=str(stored))
    run_ranks(lambda: run(loaded), 1)
    merged = export_saved(str(tmp_path / "output"), str(tmp_path / "merged"), merge=True, verify=True)
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    written = load_file(merged / "model.safetensors")
    assert {tensor.dtype for name, tensor in written.items() if name.endswith("_proj.weight")} == {torch.bfloat16}
    further = config_of(folder, tmp_path / "further", {"enable_lora": False}, max_steps=1, base=str(merged))
    run_ranks(lambda: run(further), 1)
    measured, wanted = (eval_losses(tmp_path / name) for name in ("further", "output"))
    assert measured[0] == pytest.approx(wanted[NUM_STEPS], rel=1e-2)
