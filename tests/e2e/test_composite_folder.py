"""Folders of composite models: the text model trains as in transformers, and exports keep everything else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from composites import COMPOSITES, make_composite, read_folder, read_json, save_folder, write_composite
from image_runs import opened
from tiny_models import hf_config
from tiny_runs import run_values, write_rows
from xorl.ckpt import CheckpointError, SafetensorsSource, export_hf, load_weights
from xorl.config import config_from_mapping
from xorl.core.models import SPECS, Decoder, spec_for
from xorl.kernels.layout import SequenceLayout
from xorl.lora.peft import InMemoryTensors
from xorl.train.architecture import Architecture, read_config
from xorl.train.cut_down import CUT
from xorl.train.export.rest import Rest
from xorl.train.export.saved import export_saved
from xorl.train.model_source import read_architecture
from xorl.train.run import run_training
from xorl.train.verify import Verification

LENGTHS = [23, 1, 40, 9]
PROCESSOR = {"preprocessor_config.json": '{"size": 28}', "processor_config.json": '{"patch_size": 14}'}
FOLDERS = [("gemma3", False), ("gemma3 untied", True), ("ministral3", False), ("mistral", True), ("qwen3_5", False)]
# In fp32, transformers' own logits are off by 2.8e-5, ours by 1.7e-5, and its gradients of decays by up to 6e-4.
LOGIT_TOLERANCE_OF, GRADIENT_TOLERANCE_OF = {"qwen3_5": 6e-5}, {"qwen3_5": 1e-3}
IN_FP32 = (".A_log", ".dt_bias")


def load(folder: Path) -> tuple[Decoder, Architecture]:
    architecture = replace(read_config("base", folder / "config.json", folder), origin=str(folder))
    decoder = architecture.spec.build(architecture.config)
    view = architecture.spec.checkpoint_view(architecture.config, SafetensorsSource(folder))
    load_weights(dict(decoder.named_parameters()), architecture.recipes(merge_qkv=True), view, mode="all_ranks")
    return decoder, architecture


def require_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name].dtype != wanted[name].dtype] == []
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("label", COMPOSITES)
def test_the_text_model_is_that_of_transformers_on_text_alone(label: str, renamed: bool, tmp_path: Path) -> None:
    """Catches a tied head read from the wrong level, another part's tensor taken for the text's, and documents of a row
    that see each other."""
    decoder, architecture = load(write_composite(label, tmp_path, renamed=renamed))
    model = make_composite(label)
    assert decoder.config.tie_word_embeddings == (model.lm_head.weight is model.get_input_embeddings().weight)
    ids = torch.randint(80, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    labels = torch.cat([torch.cat((row[1:], torch.tensor([-100]))) for row in ids.split(LENGTHS)])
    wanted = torch.cat([model(row[None]).logits[0] for row in ids.split(LENGTHS)])
    found = decoder(ids, SequenceLayout.from_lengths(LENGTHS))
    assert (found - wanted).abs().max() <= LOGIT_TOLERANCE_OF.get(label, 1e-5)
    for logits in (found, wanted):
        F.cross_entropy(logits, labels, reduction="sum").backward()
    recipes, parameters = architecture.recipes(merge_qkv=True), dict(model.named_parameters())
    for name, parameter in decoder.named_parameters():
        for source, gradient in recipes[name].split(parameter.grad).items():
            error = (gradient - parameters[source].grad).norm() / parameters[source].grad.norm()
            assert error <= GRADIENT_TOLERANCE_OF.get(label, 1e-4), source


def export(base: Path, folder: Path, *, arranges: bool = False, **options: object) -> Rest:
    """Writes the text model of a folder with the tensors of the other parts; returns these."""
    decoder, architecture = load(base)
    rest = Rest.of(architecture)
    options |= {"hf_config": architecture.hf_config, "rename": rest.in_file}
    options |= {"arrange": rest.arrange} if arranges else {}
    with rest.groups() as copied:
        recipes = architecture.recipes(merge_qkv=True)
        export_hf(dict(decoder.named_parameters()), recipes, folder, copied=copied, **options)
    return rest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("label", "renamed"), FOLDERS)
def test_a_folder_returns_bit_for_bit(label: str, renamed: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Catches tensors of other parts that are dropped, cast or renamed, and a config.json of the text model alone."""
    base = write_composite(label, tmp_path / "base", renamed=renamed)
    rest = export(base, tmp_path / "ours", dtype=dtype, max_shard_bytes=60e3)
    wanted = read_folder(base)
    assert any("vision" in name or "visual" in name for name in rest.unused)
    cast = {
        name: tensor if name in rest.unused or name.endswith(IN_FP32) else tensor.to(dtype)
        for name, tensor in wanted.items()
    }
    require_same(read_folder(tmp_path / "ours"), cast)
    assert read_json(tmp_path / "ours") == {**read_json(base), "dtype": str(dtype).removeprefix("torch.")}
    opened(tmp_path / "ours")


@pytest.mark.parametrize("is_stacked", [False, True])
def test_experts_return_as_they_were_read(is_stacked: bool, tmp_path: Path) -> None:
    """Catches experts that are exported in another form than that of the files, and layers for further tokens that are
    dropped: programs that read the files might not read the export."""
    base = write_composite("qwen3_5_moe", tmp_path / "base")
    tensors = read_folder(base)
    if is_stacked:
        for layer in (f"model.language_model.layers.{index}.mlp.experts" for index in range(3)):
            of_experts = [
                {part: tensors.pop(f"{layer}.{expert}.{part}_proj.weight") for part in ("gate", "up", "down")}
                for expert in range(4)
            ]
            tensors[f"{layer}.gate_up_proj"] = torch.stack([torch.cat((e["gate"], e["up"])) for e in of_experts])
            tensors[f"{layer}.down_proj"] = torch.stack([e["down"] for e in of_experts])
    tensors |= {"mtp.fc.weight": torch.randn(3, 5), "mtp.layers.0.mlp.experts.gate_up_proj": torch.randn(2, 4, 3)}
    save_folder(base, tensors)
    export(base, tmp_path / "ours", arranges=True)
    require_same(read_folder(tmp_path / "ours"), tensors)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("label", "num_ranks", "mode"), [("gemma3", 2, "fsdp2"), ("ministral3", 2, "ddp"), ("mistral", 1, "none")]
)
def test_a_run_trains_the_text_and_copies_the_rest(
    label: str, num_ranks: int, mode: str, tmp_path: Path, run_ranks
) -> None:
    """Catches an export of a run, or of its checkpoint, without its vision tower or processor."""
    base = write_composite(label, tmp_path / "base", renamed=label == "mistral")
    for name, content in PROCESSOR.items():
        (base / name).write_text(content)
    write_rows(tmp_path / "train.jsonl", 24)
    values = run_values(
        tmp_path, tmp_path / "output", model={"model_path": str(base)}, data_parallel_mode=mode, max_steps=2
    )
    loaded = config_from_mapping(values)
    assert run_ranks(lambda: run_training(loaded), num_ranks) == [0] * num_ranks
    exported = tmp_path / "output" / "checkpoints" / "global_step_2-export"
    found, read = read_folder(exported), read_folder(base)
    assert found.keys() == read.keys()
    changed = {name for name in read if not torch.equal(found[name], read[name])}
    assert changed == {name for name in read if "language_model" in name or name == "lm_head.weight"}
    assert read_json(exported) == read_json(base)
    assert {name: (exported / name).read_text() for name in PROCESSOR} == PROCESSOR
    opened(exported)

    again = export_saved(str(tmp_path / "output"), str(tmp_path / "again"), verify=True)
    require_same(read_folder(again), found)
    # A run that starts from the checkpoint of another one knows where the rest is, too.
    second = values | {"model": {"model_path": str(tmp_path / "output")}}
    second["train"] = {**second["train"], "output_dir": str(tmp_path / "second"), "load_weights_mode": "dcp"}
    if num_ranks == 1:
        run_training(config_from_mapping(second))
        files = tmp_path / "second" / "checkpoints" / "global_step_2-export"
        opened(files)
    for file in base.glob("model*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"PATH: exports of a \w+ copy tensors from .*base, which its weights"):
        export_saved(str(tmp_path / "output"), str(tmp_path / "without"))


@pytest.mark.parametrize("label", ["gemma3", "ministral3"])
def test_default_targets_are_in_the_text_model_alone(label: str, tmp_path: Path) -> None:
    """Catches adapters on the vision tower, whose layers have the same names, and a merge that drops it."""
    base = write_composite(label, tmp_path / "base")
    write_rows(tmp_path / "train.jsonl", 24)
    run_training(
        config_from_mapping(
            run_values(
                tmp_path,
                tmp_path / "output",
                model={"model_path": str(base)},
                lora={"enable_lora": True, "lora_rank": 4},
                max_steps=2,
            )
        )
    )
    adapter = export_saved(str(tmp_path / "output"), str(tmp_path / "adapter"), verify=True)
    names = load_file(adapter / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in names)
    targets = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    assert len(targets) == 7 * 3
    merged = export_saved(str(adapter), str(tmp_path / "merged"), merge=True, verify=True)
    found, read = read_folder(merged), read_folder(base)
    changed = {name for name in read if not torch.equal(found[name], read[name])}
    assert changed == {name for name in read if "language_model" in name and "_proj" in name}
    opened(merged)


def test_layers_that_predict_further_tokens_are_copied() -> None:
    """Catches layers after the model's that are trained, refused or dropped, and a layer of the model taken for one."""
    spec = SPECS["LlamaForCausalLM"]
    names = replace(spec.checkpoint_names, unused=r"layers\.(\d+)\.|mtp\.")
    spec = replace(spec, checkpoint_names=names)
    config = spec.config_from_hf(hf_config("llama"))
    own = [name for recipe in spec.recipes(config, merge_qkv=True).values() for name in recipe.sources]
    further = ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight", "mtp.norm.weight"]
    view = spec.checkpoint_view(config, InMemoryTensors({name: torch.zeros(2, 2) for name in [*own, *further]}))
    assert list(view.unused) == further
    assert sorted(view.names()) == sorted(own)


def test_a_layout_is_verified_with_a_small_text_model(tmp_path: Path) -> None:
    """Catches a verification of the whole model, and one that draws the rest at random."""
    write_composite("gemma3", tmp_path)
    content = read_json(tmp_path)
    content["text_config"] |= {"num_hidden_layers": 12, "hidden_size": 4096, "layer_types": ["full_attention"] * 12}
    (tmp_path / "config.json").write_text(json.dumps(content))
    values = run_values(tmp_path, tmp_path / "output", model={"model_path": str(tmp_path)})
    verification = Verification.of(config_from_mapping(values).config, is_full=False)
    assert verification.architecture == "Gemma3ForConditionalGeneration"
    config = read_architecture(verification.config.model).config
    assert (config.num_layers, config.hidden_size) == (CUT["num_hidden_layers"], CUT["hidden_size"])


def test_what_cannot_be_exported_is_refused_before_training(tmp_path: Path) -> None:
    """Catches hours of training whose export lacks a part, or has one that nothing can read."""
    base = write_composite("gemma3", tmp_path / "base")
    write_rows(tmp_path / "train.jsonl", 8)
    values = run_values(tmp_path, tmp_path / "output", model={"config_path": str(base)})
    with pytest.raises(ValueError, match=r"Gemma3ForConditionalGeneration needs .* name it in model.model_path"):
        run_training(config_from_mapping(values))
    tensors = read_folder(base)
    tensors["vision_tower.head.mlp.fc1.weight_scale_inv"] = torch.ones(1, 1)
    save_folder(base, tensors)
    with pytest.raises(
        ValueError, match=r"vision_tower\.head\.mlp\.fc1\.weight_scale_inv belongs to a quantised tensor"
    ):
        Rest.of(load(base)[1])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "qwen3"}, "text_config with model_type: 'qwen3'; that of a .* one of ministral3, mistral"),
        ({"num_attention_heads": 0}, "text_config: MistralForCausalLM: num_attention_heads must be at least 1"),
    ],
)
def test_a_text_model_that_is_not_known_is_refused(changes: dict[str, object], told: str, tmp_path: Path) -> None:
    """Catches a text model read as one of another family."""
    content = read_json(write_composite("mistral", tmp_path))
    content["text_config"] |= changes
    with pytest.raises(ValueError, match=told):
        spec_for(content).config_from_hf(content)
