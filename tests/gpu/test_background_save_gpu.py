"""A save in the background copies and writes beside the GPU's work, and copies before the next change."""

from pathlib import Path

import pytest
import torch

from tiny_runs import Tensors
from xorl.ckpt import BackgroundWriter, Checkpointer

pytestmark = pytest.mark.gpu


def make_state(seed: int) -> dict[str, Tensors]:
    generator = torch.Generator("cuda").manual_seed(seed)
    weight = torch.randn(4096, 2048, generator=generator, device="cuda")
    tensors = {"weight": weight, "half": weight.bfloat16(), "turned": weight.T, "step": torch.tensor(float(seed))}
    return {"model": Tensors(tensors)}


def test_the_copy_ends_before_the_next_change(tmp_path: Path) -> None:
    # Catches a copy that reads what the next step has written, in page-locked memory that is used again.
    background, checkpointer = BackgroundWriter(), Checkpointer(tmp_path)
    state = make_state(0)
    for step in (1, 2, 3):
        expected = make_state(step)["model"]
        with torch.no_grad():
            for name, tensor in state["model"].items():
                if name != "turned":  # shares the memory of weight
                    tensor.copy_(expected[name])
            checkpointer.save(step, state, background=background)
            busy = torch.randn(4096, 4096, device="cuda")
            for _ in range(20):
                busy = busy @ busy / 64
            background.before_change()
            for tensor in state["model"].values():
                tensor.zero_()
        background.finish()
        loaded = make_state(9)
        checkpointer.load(tmp_path / f"global_step_{step}", loaded)
        for name, tensor in expected.items():
            assert torch.equal(loaded["model"][name], tensor), (step, name)
    background.close()


def test_files_are_written_while_the_gpu_works(tmp_path: Path) -> None:
    # Catches a writer that waits for the work of the following steps: DCP's own does, to copy ahead from a GPU.
    background, checkpointer = BackgroundWriter(), Checkpointer(tmp_path)
    checkpointer.save(1, make_state(0), background=background)
    background.finish()  # what the first save initialises
    checkpointer.save(2, make_state(0), background=background)
    for _ in range(10):
        torch.cuda._sleep(1_000_000_000)  # cycles: half a second at 2 GHz
    background.finish()
    assert not torch.cuda.current_stream().query()
    background.close()
