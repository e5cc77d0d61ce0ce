"""Adapters are continued, resumed and merged over the weights that they were trained over, wherever these are."""

import shutil
from pathlib import Path

import pytest

from lora_runs import config_of, run, write_data
from saved_models import save_model
from tiny_models import hf_config
from xorl.train.export.folder import export_folder
from xorl.train.export.saved import export_saved

SHAPE = hf_config(hidden_size=64, intermediate_size=64)
LORA: dict[str, dict[str, object]] = {
    "plain": {"save_lora_only": True, "lora_rank": 4},
    "quantised": {"save_lora_only": True, "lora_rank": 4, "enable_qlora": True, "quant_format": "nf4"},
}


@pytest.mark.multi
def test_a_base_that_changed_is_noticed_and_one_that_moved_is_not_refused(
    tmp_path: Path, run_ranks, caplog: pytest.LogCaptureFixture
) -> None:
    # Catches adapters that are trained on, resumed or merged over other weights in the folder of their base.
    write_data(tmp_path)
    base = tmp_path / "base"
    save_model(base, SHAPE)
    save_model(tmp_path / "divided", SHAPE, max_shard_size="40KB")
    assert len(list((tmp_path / "divided").glob("*.safetensors"))) > 1

    def go(name: str, base: str = "base", max_steps: int = 1, **options: object) -> None:
        lora = {**LORA[name], **({"adapter_path": options.pop("adapter")} if "adapter" in options else {})}
        run(config_of(tmp_path, tmp_path / name, lora, base, max_steps=max_steps, **options))

    def train_both() -> None:
        for name in LORA:
            go(name)
            # The same tensors under another name, in several files.
            go(name, "divided", max_steps=2, load_checkpoint_path="auto")

    run_ranks(train_both, 1)
    adapter = export_folder(tmp_path / "plain" / "checkpoints" / "global_step_2")
    exported = export_saved(str(adapter), str(tmp_path / "exported"))

    shutil.rmtree(base)
    save_model(base, SHAPE, seed=1)

    def refuse() -> None:
        for name in LORA:
            with pytest.raises(
                ValueError, match=r"global_step_2 does not .*divided with the fingerprint \w+, but .*base"
            ):
                go(name, max_steps=3, load_checkpoint_path="auto")
        for start in (adapter, exported):
            with pytest.raises(ValueError, match=r"adapter_path: .* with the fingerprint \w+, but those in .*base"):
                go("plain", adapter=str(start), output_dir=str(tmp_path / "further"))

    run_ranks(refuse, 1)
    # The recorded base is `divided`, which is as it was.
    export_saved(str(tmp_path / "quantised"), str(tmp_path / "merged"), merge=True)
    shutil.rmtree(tmp_path / "divided")
    base.rename(tmp_path / "divided")
    for start in (tmp_path / "quantised", adapter, exported):
        with pytest.raises(ValueError, match=r"PATH: .* with the fingerprint .*name with --base"):
            export_saved(str(start), str(tmp_path / "other"), merge=True)
    export_saved(str(exported), str(tmp_path / "other"), base=str(tmp_path / "divided"), merge=True)
    assert "--base: the adapter in" in caplog.text
