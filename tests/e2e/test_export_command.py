"""`xorl export` on adapters that PEFT wrote: merged, cast, verified by transformers and PEFT, and refused."""

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from saved_models import save_model, save_peft_adapter
from tiny_models import hf_config
from tiny_runs import run_values, write_counting_rows
from xorl.ckpt import Checkpointer, read_manifest
from xorl.cli.export import app
from xorl.config import config_from_mapping
from xorl.train.adapters.folder import is_same_base
from xorl.train.export.saved import export_saved
from xorl.train.export.verify import VerificationError
from xorl.train.run import run_training


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base` in bf16 and, in fp32, `adapter` on it."""
    root = tmp_path_factory.mktemp("export")
    save_model(root / "base", dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    options = {"r": 4, "lora_alpha": 8, "use_dora": True, "use_rslora": True}
    save_peft_adapter(model, root / "adapter", target_modules=["q_proj", "up_proj"], **options)
    return root


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (None, 0.05)])
def test_a_merged_model_is_what_peft_computes(
    folders: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: torch.dtype | None, limit: float
) -> None:
    # Catches a merge that rounds more than once, weights or a config.json in another precision than was asked for, and
    # a verification that does not say how close the logits are.
    caplog.set_level(logging.INFO)
    folder = export_saved(str(folders / "adapter"), str(tmp_path / "merged"), merge=True, dtype=dtype, verify=True)
    merged = AutoModelForCausalLM.from_pretrained(folder)
    assert merged.dtype == (dtype or torch.bfloat16)
    card = (folder / "README.md").read_text()
    assert "same most likely token" in card
    assert "| adapted modules, none of them zero | 4 |" in card
    assert f"| base model | {folders / 'base'} |" in card
    limits = [float(line.split("|")[2]) for line in card.splitlines() if "share of the largest logit" in line]
    assert limits[0] <= limit
    assert re.search(r"verified: .*as a share of the largest logit: [\d.e-]+, same most likely token: ", caplog.text)


def test_an_adapter_is_written_again_as_peft_reads_it(folders: Path, tmp_path: Path) -> None:
    # Catches keys, values or a configuration that PEFT takes for another adapter's.
    folder = export_saved(str(folders / "adapter"), str(tmp_path / "again"), verify=True)
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    written, wanted = (load_file(path / "adapter_model.safetensors") for path in (folder, folders / "adapter"))
    torch.testing.assert_close(written, wanted, rtol=0, atol=0)
    half = export_saved(str(folders / "adapter"), str(tmp_path / "half"), dtype=torch.bfloat16, verify=True)
    rounded = {name: tensor.bfloat16() for name, tensor in wanted.items()}
    torch.testing.assert_close(load_file(half / "adapter_model.safetensors"), rounded, rtol=0, atol=0)


@pytest.mark.parametrize(
    "selected",
    [
        {"layers_to_transform": [1]},
        {"exclude_modules": ["layers.0.self_attn.q_proj"]},
        {"target_modules": r".*\.1\..*q_proj"},
    ],
)
def test_an_adapter_on_some_layers_is_written_so_that_it_can_be_read(
    selected: dict[str, object], folders: Path, tmp_path: Path
) -> None:
    """Catches an export that names layers of which it has no adapter, and is then refused as incomplete."""
    model = AutoModelForCausalLM.from_pretrained(folders / "base", dtype=torch.float32)
    save_peft_adapter(model, tmp_path / "adapter", r=4, **{"target_modules": ["q_proj"], **selected})
    once = export_saved(str(tmp_path / "adapter"), str(tmp_path / "once"), verify=True)
    twice = export_saved(str(once), str(tmp_path / "twice"))
    assert len(load_file(twice / "adapter_model.safetensors")) == 2


def test_what_is_wrong_is_said_and_nothing_is_left(folders: Path, tmp_path: Path) -> None:
    # Catches an adapter that is folded into another model, and a folder that appears though it was not verified.
    save_model(tmp_path / "other", hf_config(hidden_size=48), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"(?s)PATH: .*--base names.*q_proj: the adapter is for a weight of"):
        export_saved(str(folders / "adapter"), str(tmp_path / "out"), base=str(tmp_path / "other"), merge=True)

    zero = tmp_path / "zero"
    zero.mkdir()
    tensors = load_file(folders / "adapter" / "adapter_model.safetensors")
    save_file({k: t * 0 if "lora_B" in k else t for k, t in tensors.items()}, zero / "adapter_model.safetensors")
    (zero / "adapter_config.json").write_text((folders / "adapter" / "adapter_config.json").read_text())
    for merge in (False, True):
        with pytest.raises(VerificationError, match="4 of 4 adapters are zero"):
            export_saved(str(zero), str(tmp_path / "out"), merge=merge, verify=True)
        assert not (tmp_path / "out").exists()

    (tmp_path / "empty").mkdir()
    (tmp_path / "served" / "service").mkdir(parents=True)
    for arguments, message in (
        ([str(tmp_path / "empty")], "is not a checkpoint, an adapter"),
        ([str(folders / "base")], "already an exported model"),
        ([str(tmp_path / "served")], "give one of its checkpoints, such as weights/MODEL/NAME"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert message in result.stderr


def test_an_adapter_of_the_hub_is_not_exported_into_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an export that lands among the snapshots of the Hub's cache, where nobody looks for it."""

    def snapshot(*_: object, **__: object) -> str:
        raise AssertionError("the Hub is not asked before there is a place to write to")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    result = CliRunner().invoke(app, ["org/adapter", "--merge"])
    assert result.exit_code == 2, result.stderr
    assert (
        "PATH: org/adapter is not a local folder; to export a Hub id, name the new folder with --output"
        in result.stderr
    )


def test_the_base_is_found_by_its_name(folders: Path, tmp_path: Path) -> None:
    # Catches an adapter whose base is looked for in the wrong place, or taken from nowhere.
    content = json.loads((folders / "adapter" / "adapter_config.json").read_text())
    assert content["base_model_name_or_path"] == str(folders / "base")
    (tmp_path / "adapter").mkdir()
    for name, value in (("adapter_model.safetensors", None), ("adapter_config.json", content)):
        source = folders / "adapter" / name
        data = source.read_bytes() if value is None else json.dumps({**value, "base_model_name_or_path": None}).encode()
        (tmp_path / "adapter" / name).write_bytes(data)
    with pytest.raises(ValueError, match=r"--base: .* does not name its base model"):
        export_saved(str(tmp_path / "adapter"), None, merge=True)
    folder = export_saved(str(tmp_path / "adapter"), None, base=str(folders / "base"), merge=True)
    assert folder == tmp_path / "adapter-merged"


def trained(folders: Path, output: Path, **lora: object) -> Path:
    """The newest checkpoint, in `output`, of a run that trained `base`, or adapters on it."""
    write_counting_rows(output.parent / "train.jsonl", 16)
    model = {"model_path": str(folders / "base")}
    options = {"data_parallel_mode": "none", "max_steps": 3, "lr": 0.02, "save_hf_weights": False}
    loaded = config_from_mapping(run_values(output.parent, output, model=model, lora=lora, **options))
    assert run_training(loaded) == 0
    return output / "checkpoints" / "global_step_3"


@pytest.mark.parametrize("lora", [{}, {"enable_lora": True, "merge_lora_interval": 2}])
def test_a_base_takes_no_place_of_weights_that_a_checkpoint_holds(
    folders: Path, tmp_path: Path, lora: dict[str, object]
) -> None:
    """Catches a base that is exported, bit for bit, as the model that was trained from it, or merged into without what
    the run had merged before."""
    checkpoint = trained(folders, tmp_path / "run", **lora)
    refused = rf"--base: {checkpoint} contains all weights of its model; remove --base"
    for merge in {False, bool(lora)}:
        with pytest.raises(ValueError, match=refused):
            export_saved(str(checkpoint), str(tmp_path / "out"), base=str(folders / "base"), merge=merge)
    exported = export_saved(str(checkpoint), str(tmp_path / "out"), merge=bool(lora), dtype=torch.float32, verify=True)
    written, base = (load_file(folder / "model.safetensors") for folder in (exported, folders / "base"))
    assert not torch.equal(
        written["model.layers.0.self_attn.q_proj.weight"], base["model.layers.0.self_attn.q_proj.weight"]
    )


def test_an_adapter_of_a_checkpoint_names_a_base_that_was_moved(folders: Path, tmp_path: Path) -> None:
    """Catches an adapter that can no longer be written alone, verified and named for its base where that has moved."""
    checkpoint = trained(folders, tmp_path / "run", enable_lora=True, lora_rank=4)
    shutil.copytree(folders / "base", tmp_path / "moved")
    exported = export_saved(str(checkpoint), str(tmp_path / "adapter"), base=str(tmp_path / "moved"), verify=True)
    config = json.loads((exported / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "moved")
    with pytest.raises(ValueError, match="remove --base"):
        export_saved(str(checkpoint), str(tmp_path / "merged"), base=str(tmp_path / "moved"), merge=True)
    save_model(tmp_path / "other", hf_config(hidden_size=48), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"PATH: .*--base names"):
        export_saved(str(checkpoint), str(tmp_path / "wrong"), base=str(tmp_path / "other"))


def test_a_checkpoint_with_a_part_of_its_model_is_not_exported_as_its_base(folders: Path, tmp_path: Path) -> None:
    """Catches a checkpoint whose missing weights are made up for by those that the run began with."""
    whole = read_manifest(trained(folders, tmp_path / "run"))
    part = Checkpointer(tmp_path / "part").save(1, {"model": torch.nn.Linear(1, 1)}, info=whole.info)
    with pytest.raises(ValueError, match=r"PATH: .* contains neither all weights of its model nor an adapter"):
        export_saved(str(part), str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("org/base", "org/base", True),
        ("org/base", "/data/base", True),
        ("org/base", "/cache/models--org--base/snapshots/0123abc", True),
        ("org/base", "org/base-instruct", False),
        ("/gone/base", "org/other", False),
    ],
)
def test_names_of_one_base_are_known_as_such(one: str, other: str, same: bool) -> None:
    # Catches an adapter that is refused on a copy of its base, or taken for that of a model of the same shapes.
    assert is_same_base(one, other) == is_same_base(other, one) == same
