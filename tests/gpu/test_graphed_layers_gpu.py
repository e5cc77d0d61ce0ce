"""Whole layers in CUDA graphs on a GPU: rows of many kinds give the losses and norms of layers that are launched."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiny_models import hf_config, write_config
from xorl.config import config_from_mapping
from xorl.core import runtime
from xorl.core.loss import cross_entropy
from xorl.core.mesh import Mesh
from xorl.core.parallel import apply
from xorl.core.parallel.graphed import LayerGraphs
from xorl.data.batch import Document, collate
from xorl.train.build import build_engine
from xorl.train.engine import Engine
from xorl.train.model_source import read_architecture
from xorl.train.startup import parallel_dims

pytestmark = pytest.mark.gpu

SHAPE = {"hidden_size": 256, "num_hidden_layers": 3, "head_dim": 64, "num_attention_heads": 4, "vocab_size": 512}
MODELS = {
    "dense": hf_config(**SHAPE, num_key_value_heads=2, intermediate_size=512),
    "windows": hf_config(
        "gemma3_text",
        **SHAPE,
        num_key_value_heads=2,
        intermediate_size=512,
        sliding_window=32,
        sliding_window_pattern=2,
    ),
    "experts": hf_config(
        "qwen3_moe", **SHAPE, num_key_value_heads=2, moe_intermediate_size=128, num_experts=16, mlp_only_layers=[0]
    ),
}
# Rows of 256 tokens; the numbers of documents round to 1, 4 or 8, and the longest to 128 or 256.
ROWS = [[100, 90, 66], [128, 100, 28], [70, 120, 66], [30, 30, 30, 40, 60, 66], [200, 40, 16], [80, 100, 76], [256]]


@pytest.fixture(autouse=True)
def place() -> Iterator[None]:
    """This process alone."""
    runtime.init("cuda")
    yield
    runtime.shutdown()


def engine_of(folder: Path, name: str, *, enable_cuda_graphs: bool) -> Engine:
    write_config(folder / name, MODELS[name])
    runtime.seed_everything(0)
    config = config_from_mapping(
        {
            "model": {"config_path": str(folder / name)},
            "data": {"datasets": [{"path": "unused"}]},
            "train": {
                "output_dir": str(folder / "out"),
                "data_parallel_mode": "none",
                "param_dtype": "bf16",
                "optimizer": "anyprecision_adamw",
                "enable_compile": True,
                "enable_gradient_checkpointing": True,
                "enable_cuda_graphs": enable_cuda_graphs,
            },
        }
    ).config
    mesh = Mesh(parallel_dims(config, 1), "cuda")
    return build_engine(config, read_architecture(config.model), mesh, torch.device("cuda"))


def steps(engine: Engine) -> list[Tensor]:
    """The loss and the gradient's norm of steps of two micro-batches."""
    found: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    for first, second in zip(ROWS * 3, ROWS[1:] * 4, strict=False):
        batches = []
        for lengths in (first, second):
            ids = torch.randint(512, (sum(lengths),), generator=generator).split(lengths)
            documents = [Document(each.numpy(), each.numpy()) for each in ids]
            batches.append(collate(documents, pad_to_multiple_of=256))
        losses = engine.forward_backward(batches, cross_entropy)
        found += [losses.loss_sum / losses.divisor, engine.optim_step(1e-3, losses.divisor).grad_norm]
    return [each.detach().float().cpu() for each in found]


@pytest.mark.parametrize("name", MODELS)
def test_steps_in_graphs_are_those_of_launched_layers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Catches values of another row or layer, kernels that launch for the lengths of the captured row, and empty
    # documents that a kernel cannot compute.
    made: list[LayerGraphs] = []

    def graphs() -> LayerGraphs:
        made.append(LayerGraphs())
        return made[-1]

    monkeypatch.setattr(apply, "LayerGraphs", graphs)
    expected = steps(engine_of(tmp_path, name, enable_cuda_graphs=False))
    found = steps(engine_of(tmp_path, name, enable_cuda_graphs=True))
    # The backward pass of FlashAttention adds up in any order.
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-3, atol=1e-4)
    # Three layers, which are captured for rows of 1, 4 and 8 documents, of up to 128 and 256 tokens.
    assert 3 <= len(made[0]) <= 3 * 5


def test_graphs_end_with_their_model(tmp_path: Path) -> None:
    # Catches memory that the graphs of an earlier model hold.
    def train() -> None:
        steps(engine_of(tmp_path, "experts", enable_cuda_graphs=True))

    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    train()
    torch.compiler.reset()
    before = held()
    train()
    torch.compiler.reset()
    assert held() <= before + 2**20
