"""Banks of adapters on several ranks: what a sweep learns, and gradients of adapters that other ranks do not have."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tiny_models import hf_config, write_config
from tiny_runs import metrics_of, run_values
from xorl.config import Config, config_from_mapping
from xorl.core.loss import cross_entropy
from xorl.core.mesh import Mesh, ParallelDims
from xorl.data.batch import Document, collate
from xorl.lora import Adam, AdapterBank, AdapterSpec
from xorl.train.bank_engine import BankEngine, MixedBatch
from xorl.train.loop import train
from xorl.train.model import build_model
from xorl.train.model_source import read_architecture
from xorl.train.sweep.build import build_sweep

HF_CONFIG = hf_config(hidden_size=64, intermediate_size=64)
QLORA = {"enable_qlora": True, "quant_format": "nf4"}
EXPERTS = {"lora_target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}
OUTER = {**EXPERTS, "moe_hybrid_shared_lora": True, "moe_lora_format": "peft"}
LAYOUTS: dict[str, tuple[int, dict[str, object], dict[str, object]]] = {
    # name: (ranks, options of section train, of section lora)
    "none": (1, {"data_parallel_mode": "none"}, {}),
    "ddp-2": (2, {"data_parallel_mode": "ddp"}, {}),
    "zero3-2": (2, {}, {}),
    "zero2-2 recomputed": (2, {"enable_full_shard": False, "enable_gradient_checkpointing": True}, {}),
    "ulysses-2": (2, {"ulysses_parallel_size": 2}, {}),
    "ring-2": (2, {"ringattn_parallel_size": 2}, {}),
    "ddp-2 ulysses-2": (4, {"ulysses_parallel_size": 2, "data_parallel_mode": "ddp"}, {}),
    "zero3-2 ulysses-2": (4, {"ulysses_parallel_size": 2}, {}),
    "none quantised": (1, {"data_parallel_mode": "none"}, QLORA),
    "zero3-2 quantised": (2, {}, QLORA),
    "none outer": (1, {"data_parallel_mode": "none"}, OUTER),
    "ep-2 outer": (2, {"expert_parallel_size": 2}, OUTER),
    "none experts": (1, {"data_parallel_mode": "none"}, EXPERTS),
    "zero3-2 experts": (2, {}, EXPERTS),
    "ep-2 experts": (2, {"expert_parallel_size": 2}, EXPERTS),
    "ring-2 experts": (2, {"ringattn_parallel_size": 2}, EXPERTS),
}
NAMES = ("a", "b")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_config(tmp_path, HF_CONFIG)
    (tmp_path / "experts").mkdir()
    write_config(tmp_path / "experts", hf_config("qwen3_moe"))
    with (tmp_path / "train.jsonl").open("w") as file:
        for index in range(32):
            ids = [(index + offset) % 60 for offset in range(6 + index % 9)]
            file.write(json.dumps({"input_ids": ids}) + "\n")
    return tmp_path


def config_of(folder: Path, layout: str, data: dict[str, object] | None = None, name: str | None = None) -> Config:
    """data: further options of the section. name: of the output folder, by default that of the layout."""
    num_ranks, train, lora = LAYOUTS[layout]
    num_sharing = 2 if train.keys() & {"ulysses_parallel_size", "ringattn_parallel_size"} else 1
    members = [{"name": "a", "lora_rank": 3}, {"name": "b", "lora_rank": 8, "lr": 0.02, "seed": 3}]
    options = {"gradient_accumulation_steps": 4 * num_sharing // num_ranks, "max_steps": 2, "save_async": True, **train}
    values = run_values(
        folder,
        folder / (name or layout),
        model={"config_path": str(folder / "experts" if lora in (EXPERTS, OUTER) else folder)},
        data={"sample_packing_sequence_len": 32, **(data or {})},
        lora={"enable_lora": True, "sweep": members, **lora},
        **{"enable_gradient_checkpointing": False, **options},
    )
    return config_from_mapping(values).config


@pytest.mark.parametrize(
    "layouts",
    [
        ("none", "ddp-2", "zero3-2", "zero2-2 recomputed"),
        ("none quantised", "zero3-2 quantised"),
        ("none experts", "zero3-2 experts", "ep-2 experts", "ring-2 experts"),
        ("none outer", "ep-2 outer"),
    ],
)
def test_a_sweep_learns_the_same_on_every_placement(layouts: Sequence[str], folder: Path, run_ranks) -> None:
    # Catches gradients of a bank that are not summed over ranks, or are summed twice, and a base that is trained.
    found: dict[str, dict[str, Tensor]] = {}
    for layout in layouts:

        def run(layout: str = layout) -> list[str]:
            sweep = build_sweep(config_of(folder, layout))
            assert not [name for name, p in sweep.engine.model.module.named_parameters() if p.requires_grad]
            assert train(sweep) == 0
            sweep.close()
            # The same on every rank, to the bit, although each steps for itself.
            values = [sweep.engine.bank.snapshot(name).values[""] for name in NAMES]
            return [str(value.double().sum().item()) for value in values]

        sums = run_ranks(run, LAYOUTS[layout][0])
        assert all(own == sums[0] for own in sums)
        adapters = {name: folder / layout / "sweep" / name / "adapter" for name in NAMES}
        found[layout] = {
            f"{name}.{key}": value
            for name, adapter in adapters.items()
            for key, value in load_file(adapter / "adapter_model.safetensors").items()
        }
        for adapter in adapters.values():
            written = json.loads((adapter / "adapter_config.json").read_text())
            assert ("target_parameters" in written) == ("moe_lora_format" in LAYOUTS[layout][2])
    expected = found[layouts[0]]
    # An expert sees few tokens, and AdamW turns a gradient that is hardly more than rounding into a step.
    atol = 1e-4 if EXPERTS.items() <= LAYOUTS[layouts[0]][2].items() else 1e-5
    for layout in layouts[1:]:
        for key, value in expected.items():
            torch.testing.assert_close(found[layout][key], value, rtol=1e-3, atol=atol, msg=f"{layout} {key}")


def learnt(config: Config) -> tuple[dict[str, list[dict[str, float]]], dict[str, Tensor]]:
    """The metrics and the adapter of each member of a sweep; collective."""
    sweep = build_sweep(config)
    assert train(sweep) == 0
    sweep.close()
    return (
        {name: metrics_of(Path(config.train.output_dir) / "sweep" / name) for name in NAMES},
        {name: sweep.engine.bank.snapshot(name).values[""].clone() for name in NAMES},
    )


def test_members_of_ranks_that_share_rows_learn_what_one_process_teaches(folder: Path, run_ranks) -> None:
    # Catches tokens of a member that are counted by every rank that shares them, rows whose parts have other members
    # than the row, and an evaluation of parts of documents.
    held_out = {"test_datasets": [{"path": str(folder / "train.jsonl")}]}

    def runs(*layouts: str) -> dict[str, tuple[dict[str, list[dict[str, float]]], dict[str, Tensor]]]:
        return {layout: learnt(config_of(folder, layout, held_out)) for layout in layouts}

    def runs_with_a_fault() -> dict[str, tuple[dict[str, list[dict[str, float]]], dict[str, Tensor]]]:
        found, count = runs("ulysses-2", "ring-2"), BankEngine._counts

        def as_first(self: BankEngine, *args: object) -> Tensor:
            context = self.model.mesh.context
            self.model.mesh.context = replace(context, rank=0)
            try:
                return count(self, *args)
            finally:
                self.model.mesh.context = context

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BankEngine, "_counts", as_first)
            found["every rank counts"] = learnt(config_of(folder, "ulysses-2", held_out, "fault"))
        return found

    [one] = run_ranks(lambda: runs("none"), 1)
    two = run_ranks(runs_with_a_fault, 2)[0]
    four = run_ranks(lambda: runs("ddp-2 ulysses-2", "zero3-2 ulysses-2"), 4)[0]
    expected_metrics, expected = one["none"]
    for layout, (metrics, adapters) in (two | four).items():
        is_same = metrics == {
            name: [pytest.approx(line, rel=1e-5) for line in lines] for name, lines in expected_metrics.items()
        }
        if layout == "every rank counts":
            assert not is_same
            continue
        assert is_same, (layout, metrics, expected_metrics)
        for name, value in expected.items():
            torch.testing.assert_close(adapters[name], value, rtol=1e-4, atol=1e-5, msg=f"{layout} {name}")


def bank_engine(folder: Path, layout: str, names: str) -> BankEngine:
    """With adapters of increasing ranks, at most two of them on the device."""
    config, device = config_of(folder, layout), torch.device("cpu")
    dims = ParallelDims.resolve(config.train.data_parallel_mode, LAYOUTS[layout][0], shard_size=-1, replicate_size=1)
    mesh = Mesh(dims, "cpu")
    model = build_model(read_architecture(config.model), config.model, config.train, config.lora, mesh, device)
    bank = AdapterBank(model.module, num_resident=2, max_rank=4, device=device, group=mesh.loss.group)
    for seed, name in enumerate(names):
        bank.add(name, AdapterSpec(rank=2 + seed), seed=seed)
    return BankEngine(model, bank, device, flops=lambda name, lengths: 0.0)


def test_ranks_may_have_tokens_of_different_adapters(folder: Path, run_ranks) -> None:
    # Catches residency that ranks must share, and an update from one rank's tokens alone.
    def batch(seed: int) -> list[Document]:
        ids = torch.randint(0, 64, (7 + seed,), generator=torch.Generator().manual_seed(seed)).numpy()
        return [Document(ids, ids)]

    def values(layout: str, own: Sequence[Sequence[tuple[str, int]]]) -> dict[str, Tensor]:
        engine = bank_engine(folder, layout, "abc")
        mesh = engine.model.mesh
        for _ in range(2):
            mine = own[mesh.data.rank :: mesh.data.size]
            mixed = [MixedBatch.of([(name, collate(batch(seed))) for name, seed in parts]) for parts in mine]
            losses = engine.forward_backward(mixed, cross_entropy, "abc")
            for name in "cab":
                engine.optim_step(name, Adam(lr=1e-2), losses[name].num_trained_tokens, 1.0)
        return {name: engine.bank.snapshot(name).values[""].clone() for name in "abc"}

    passes = [[("a", 1), ("b", 2)], [("c", 3)], [("b", 4)], [("c", 5), ("b", 6)]]
    [expected] = run_ranks(lambda: values("none", passes), 1)
    for measured in run_ranks(lambda: values("zero3-2", passes), 2):
        for name, value in expected.items():
            torch.testing.assert_close(measured[name], value, rtol=1e-4, atol=1e-6)


def test_padding_between_adapters_is_left_out(tmp_path: Path, run_ranks) -> None:
    # Catches the experts of the last document left out instead of the padding, and statistics of routers that count
    # padding or the tokens of another adapter.
    write_config(tmp_path, hf_config("qwen3_moe"))

    def run() -> None:
        ids = {name: np.arange(length) * 7 % 64 for name, length in (("a", 5), ("b", 8))}
        parts = [(name, collate([Document(one, one)], pad_to_multiple_of=8)) for name, one in ids.items()]
        engine = bank_engine(tmp_path, "none", "ab")
        alone = {part[0]: engine.forward_backward([MixedBatch.of([part])], cross_entropy, part[0]) for part in parts}
        together = engine.forward_backward([MixedBatch.of(parts)], cross_entropy, "ab")
        for name, one in ids.items():
            expected = alone[name][name]
            torch.testing.assert_close(together[name].loss_sum, expected.loss_sum)
            assert expected.routers is not None
            assert together[name].routers is not None
            # Two layers, two experts a token.
            assert expected.routers.values[:-5].sum() == 2 * 2 * len(one)
            torch.testing.assert_close(together[name].routers.values, expected.routers.values, rtol=1e-5, atol=1e-5)

    run_ranks(run, 1)
