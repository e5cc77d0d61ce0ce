"""Context parallelism: documents of a row stay apart, and sizes that do not fit are refused. See test_layouts, too."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from layouts import LAYOUTS, NUM_BINS, mesh_for, run_config, write_models
from table_of_runs import Options
from xorl.core.loss import LossOutput, cross_entropy
from xorl.core.nn.ulysses import check_heads
from xorl.kernels.layout import SequenceLayout
from xorl.train.build import build_engine
from xorl.train.model_source import read_architecture
from xorl.train.verify import batches_of


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_document_does_not_change_the_others(run_ranks, tmp_path: Path, world_size: int) -> None:
    # Catches keys of another document, which a loss over all tokens may hide.
    models = ("llama", "mistral", "qwen3_moe")
    write_models(tmp_path)
    names = {2: ("ulysses 2", "ring 2"), 4: ("ulysses 4", "ring 4", "dp 2, ring 2", "ring 2, ulysses 2")}[world_size]

    def outputs(model: str, options: Options) -> list[tuple[Tensor, Tensor]]:
        """The final hidden states of this rank's tokens and the documents of these, for each changed document."""
        config = run_config(tmp_path, model, options)
        mesh = mesh_for(config)
        architecture = read_architecture(config.model)
        engine = build_engine(config, architecture, mesh, torch.device("cpu"))
        [batch, *_] = batches_of(0, NUM_BINS, architecture.config.vocab_size, config, mesh)
        document = torch.arange(len(batch.lengths)).repeat_interleave(batch.cu_seqlens.diff())
        found: list[tuple[Tensor, Tensor]] = []

        def keep(hidden: Tensor, weight: Tensor, targets: dict[str, Tensor], _: SequenceLayout) -> LossOutput:
            found.append((hidden, targets["document"]))
            return cross_entropy(hidden, weight, targets)

        for changed in range(-1, 5):  # -1 changes nothing; all ranks have as many passes
            ids = torch.where(document == changed, batch.input_ids + 1, batch.input_ids)
            given = replace(batch, input_ids=ids % architecture.config.vocab_size, targets={"document": document})
            with torch.no_grad():
                engine.forward(given, keep)
        return found

    def largest_changes() -> dict[tuple[str, str], tuple[float, float]]:
        """For each layout and model, the largest relative changes of other documents and of the changed one."""
        changes = {}
        for layout in names:
            for model in models:
                (before, document), *after = outputs(model, LAYOUTS[layout].train)
                moved = [((hidden - before).norm(dim=-1) / before.norm(dim=-1), document) for hidden, _ in after]
                others = [
                    rows[of != changed].max() for changed, (rows, of) in enumerate(moved) if (of != changed).any()
                ]
                own = [rows[of == changed].max() for changed, (rows, of) in enumerate(moved) if (of == changed).any()]
                changes[layout, model] = float(max(others)), float(min(own, default=torch.ones(())))
        return changes

    for changes in run_ranks(largest_changes, world_size):
        for (layout, model), (others, own) in changes.items():
            assert others <= (1e-6 if "moe" in model else 0.0), (layout, model)
            assert own > 0, (layout, model)


def test_sizes_that_heads_cannot_be_shared_by_name_the_nearest_that_works() -> None:
    # Catches a run that fails in its first step.
    for num_ranks in (1, 2, 4, 8):
        check_heads(8, 4, num_ranks)
    with pytest.raises(ValueError, match=r"ulysses: 3 .* 8 heads with 4 .* works is 2"):
        check_heads(8, 4, 3)
