"""The parts of `xorl bench`: shapes, peers, and what is made of the measured steps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from local_options import local_config
from xorl.cli.bench_config import SHAPES, Documents, SyntheticRun, shapes, write_config
from xorl.config import load_config
from xorl.core.models import spec_for
from xorl.kernels.attention import AttentionRequest, resolve_attention
from xorl.kernels.layout import SequenceLayout
from xorl.train.bench import report
from xorl.train.bench.kernel_summary import summarise
from xorl.train.bench.peers import Peer, _restored, register_attention
from xorl.train.bench.report import BenchRecord, Measurement
from xorl.train.bench.runner import _config_in
from xorl.train.data import prepare_data

PARAMETERS = {
    "gemma3-4b": 3.880,
    "glm-4.5-air-2-layers": 5.925,
    "gpt-oss-20b-4-layers": 4.451,
    "llama3-70b": 70.554,
    "llama3-8b": 8.030,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.721,
    "qwen3-8b": 8.191,
    "qwen3.5-9b-4-layers": 2.899,
    "qwen3-30b-a3b": 30.532,
    "qwen3-30b-a3b-12-layers": 8.100,
}


def run_of(model: str = "tiny", documents: Documents = "single", tokens_per_step: int | None = None) -> SyntheticRun:
    return SyntheticRun(model, 512, documents, 2, tokens_per_step, num_ranks=2, num_steps=3, on_gpu=False)


@pytest.mark.parametrize("name", shapes())
def test_shapes_are_those_of_the_models_they_are_named_for(name: str) -> None:
    # Catches a wrong width or vocabulary, by which every figure of the model would be another model's.
    values = json.loads((SHAPES / f"{name}.json").read_text())
    spec = spec_for(values)
    with torch.device("meta"):
        model = spec.build(spec.config_from_hf(values))
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert billions == pytest.approx(PARAMETERS.get(name, 0.0), abs=1e-3)


def test_ranks_that_read_the_same_data_count_once() -> None:
    # Catches half as many tokens a step as were asked for, with a pipeline of two stages.
    assert replace(run_of(tokens_per_step=8192), num_sharing=2).accumulation == 8


@pytest.mark.parametrize("documents", ["single", "packed"])
def test_a_made_configuration_is_valid_and_fills_its_steps(documents: Documents, tmp_path: Path) -> None:
    # Catches presets that the configuration refuses, and data of other lengths than were asked for.
    path = write_config(run_of(documents=documents, tokens_per_step=8192), tmp_path)
    config = load_config(path).config
    assert config.train.gradient_accumulation_steps == 4
    data = prepare_data(config, vocab_size=512).train
    lengths = data.documents.lengths
    assert (lengths.min(), lengths.max()) == (512, 512) if documents == "single" else lengths.min() >= 256
    assert len(data.bins) >= 3 * 4 * 2 * 2


def test_a_benchmark_uploads_nothing(tmp_path: Path) -> None:
    """Catches a dataset that is uploaded since somebody measured how fast a run of it would be."""
    push = ("--data.push_dataset_to_hub=org/name", "--data.hf_use_auth_token=true")
    config = load_config(write_config(run_of(), tmp_path), push).config
    assert config.data.push_dataset_to_hub == "org/name"
    built = _config_in(tmp_path / "own", config)
    assert (built.data.push_dataset_to_hub, built.train.output_dir) == (None, str(tmp_path / "own"))


def test_tokens_that_no_micro_batch_divides_are_refused(tmp_path: Path) -> None:
    # Catches a step of another size than the record says.
    with pytest.raises(ValueError, match="not a multiple of 2048"):
        write_config(run_of(tokens_per_step=5000), tmp_path)
    with pytest.raises(ValueError, match=r"expected one of .*tiny"):
        write_config(run_of(model="tinny"), tmp_path)


def test_peers_are_known_by_their_parts() -> None:
    # Catches a peer that is measured without what its name promises.
    assert Peer.parse("transformers").parts == frozenset()
    assert Peer.parse("transformers-liger-fa4").parts == {"liger", "fa4"}
    for name in ("transformer", "transformers-lger", "transformers-fa4-fa4"):
        with pytest.raises(ValueError, match="use transformers, followed by"):
            Peer.parse(name)


@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size", "ulysses_parallel_size"])
def test_a_peer_is_left_out_where_each_rank_would_compute_all_of_it(option: str) -> None:
    # Catches a comparison with a trainer that computes the same rows on several ranks.
    reason = Peer.parse("transformers").unavailable_reason(local_config(**{option: 2}), cast(Any, None))
    assert reason == "peers run with data parallelism alone"


def test_what_a_peer_changes_in_a_module_is_undone() -> None:
    # Catches the peer after it being measured with its kernels.
    before, forward = report._short, report.BenchRecord.ratios
    report.BenchRecord.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
    with _restored(report):
        report._short = str.upper
        report.BenchRecord.forward = None  # pyright: ignore[reportAttributeAccessIssue]
    assert report._short is before
    assert report.BenchRecord.forward is forward  # pyright: ignore[reportAttributeAccessIssue]
    del report.BenchRecord.forward  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("shape", "lengths"), [("tiny", [5, 9, 2]), ("tiny-gpt-oss", [16])])
def test_xorls_attention_in_a_peer_is_the_peers_own(shape: str, lengths: list[int]) -> None:
    # Catches heads and tokens that are swapped on the way, documents that see each other, and sinks that get lost.
    # transformers' own mask has no documents for some families.
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  (seconds, for this test alone)

    values = json.loads((SHAPES / f"{shape}.json").read_text())
    attention = resolve_attention("sdpa", AttentionRequest("cpu", torch.float32, head_dim=64))
    layout = SequenceLayout.from_lengths(lengths)
    ids = torch.arange(16)[None] * 7 % 512
    logits = []
    for name in ("eager", register_attention(attention)):
        torch.manual_seed(0)
        config = AutoConfig.for_model(values["model_type"], **{k: v for k, v in values.items() if k != "model_type"})
        model = AutoModelForCausalLM.from_config(config, attn_implementation=name)
        torch.nn.init.normal_(model.get_submodule("model.embed_tokens").weight)
        logits.append(
            model(input_ids=ids, position_ids=layout.positions[None], xorl_layout=layout, use_cache=False).logits
        )
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def step_at(step: int, rate: float, more_tokens: int) -> dict[str, float | None]:
    counts = {"step": step, "num_tokens": 4096 + step * more_tokens}
    return {**counts, "tokens_per_s": rate, "mfu": None, "time_s": 4096 / rate, "comm_s": 0.25}


def record_of(*rates: tuple[str, list[float]], more_tokens: int = 0) -> BenchRecord:
    """Rounds of systems by name and tokens/s, the first step of each being warm-up; each step has more_tokens more."""
    return BenchRecord(
        name="name",
        command="xorl bench",
        environment={"gpus": None, "driver": None, "torch": "2.11"},
        work=report.Workload("A", 10**9, 2, 4096.0, 512, 300.5, 1, 4),
        config={
            "train": {"optimizer": "muon", "enable_compile": True, "expert_parallel_size": 2},
            "model": {"attn_implementation": "auto"},
            "lora": {"enable_lora": True, "lora_rank": 8, "lora_target_modules": None, "enable_qlora": False},
        },
        peers="torch's fused AdamW, products in bf16",
        start={"process": 2.0, "first_step": 3.5},
        warmup=1,
        steps=len(rates[0][1]) - 1,
        measurements=[
            Measurement(
                system,
                [step_at(step, rate, more_tokens) for step, rate in enumerate(own)],
                60.0,
                70.0 + index,
            )
            for index, (system, own) in enumerate(rates)
        ],
        absent={"transformers-liger": "liger_kernel is not installed"},
        kernels=None,
    )


def test_ratios_are_of_medians_and_leave_the_warm_up_out(tmp_path: Path) -> None:
    # Catches warm-up in the medians, a ratio turned upside down, or rounds compared with another's.
    record = record_of(
        ("xorl", [1.0, 100.0, 110.0]),
        ("peer", [1.0, 50.0, 50.0]),
        ("xorl", [1.0, 120.0, 130.0]),
        ("peer", [9.0, 60.0, 70.0]),
    )
    (ratio, least, greatest) = record.ratios()["peer"]
    assert (ratio, least, greatest) == pytest.approx((115 / 55, 125 / 65, 105 / 50))
    assert record.spreads("xorl")["tokens_per_s"].median == 115
    assert record.peak_gib("xorl") == (60.0, 72.0)
    report.write_record(record, tmp_path, tmp_path / "record.md")
    report.write_record(record, tmp_path, tmp_path / "record.md")
    written = json.loads((tmp_path / "bench.json").read_text())
    assert written["command_to_first_step_s"]["total"] == 5.5
    assert written["systems"]["peer"]["rounds"][1][2]["tokens_per_s"] == 70.0
    text = (tmp_path / "record.md").read_text()
    assert text.count("\n## name, ") == 2
    assert "| xorl | 115 [108, 122] |" in text
    assert "| 2.091 x [1.923, 2.100 by round] |" in text
    assert "; expert_parallel_size 2, optimizer muon" in text
    assert "; peers: torch's fused AdamW, products in bf16. Medians of" in text
    assert "transformers-liger did not run: liger_kernel is not installed." in text


def test_packs_that_a_library_sees_first_are_in_no_figure() -> None:
    # Catches a peer measured while it loads kernels for each new number of tokens, which makes xorl look faster.
    rounds = [("xorl", [1.0, 90.0]), ("peer", [1.0, 10.0]), ("xorl", [1.0, 110.0]), ("peer", [1.0, 100.0])]
    record = record_of(*rounds, more_tokens=1)
    assert record.ratios()["peer"] == pytest.approx((1.1, 1.1, 1.1))
    assert (record.spreads("peer")["tokens_per_s"].median, record.peak_gib("xorl")) == (100, (60.0, 72.0))
    assert "in 2 rounds, the first of which is not counted" in report.to_markdown(record)
    alone = record_of(*rounds[:2], more_tokens=1)
    assert alone.ratios()["peer"] == pytest.approx((9, 9, 9))
    assert "in 1 round," in report.to_markdown(alone)


def test_a_profiled_step_is_summed_up_by_operator_where_there_is_no_gpu() -> None:
    # Catches a summary that is empty on a CPU, or counts what an operator calls twice.
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(3):
            torch.ones(64, 64) @ torch.ones(64, 64)
    summary = summarise(recorded)
    assert {kernel.name: kernel.count for kernel in summary.kernels}["aten::mm"] == 3
    assert 0 < summary.busy_ms <= summary.span_ms * 1.01
