"""Backends by name: explicit choice or error."""

import logging
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch

from xorl.kernels.attention import ATTENTION, AttentionRequest, backends, resolve_attention
from xorl.kernels.experts import EXPERTS, ExpertsRequest
from xorl.kernels.registry import Backend, Registry

CPU = AttentionRequest("cpu", torch.float32, head_dim=64)


def make_registry() -> Registry[int, str]:
    """Backends that run numbers up to a limit."""
    registry: Registry[int, str] = Registry("toy", int, preference=("fast", "slow"))
    for name, limit in (("fast", 5), ("slow", 10)):
        registry.register(
            Backend(
                name,
                load=lambda name=name: name,
                refusal=lambda n, limit=limit: None if n <= limit else f"above {limit}",
            )
        )
    return registry


def test_a_backend_that_cannot_run_says_why_and_what_can():
    """Catches a silent fall-back, and a refusal that leaves the user to guess."""
    with pytest.raises(RuntimeError, match=r"toy backend 'fast' cannot run here: above 5; these can: slow"):
        make_registry().resolve("fast", 7)
    with pytest.raises(RuntimeError, match="no other backend can either"):
        make_registry().resolve("fast", 11)


def test_a_request_of_another_operation_is_refused():
    """Catches a refusal function that fails on a field that the request does not have."""
    experts = ExpertsRequest("cpu", torch.float32, 64, 32)
    for ask in (partial(ATTENTION.resolve, "auto"), partial(ATTENTION.check, "sdpa"), ATTENTION.runnable):
        with pytest.raises(ValueError, match="attention backends take a request of type AttentionRequest, got Experts"):
            ask(experts)
    with pytest.raises(ValueError, match="experts backends take a request of type ExpertsRequest, got AttentionReq"):
        EXPERTS.resolve("auto", CPU)


def test_an_unknown_name_lists_the_known_ones():
    """Catches a KeyError as the answer to a misspelt name."""
    with pytest.raises(ValueError, match="unknown toy backend 'fats'; known: auto, fast, slow"):
        make_registry().resolve("fats", 1)


def test_auto_takes_the_first_that_runs_and_says_so_once(caplog):
    """Catches an automatic choice that nobody can see in the log, or that floods it."""
    registry = make_registry()
    with caplog.at_level(logging.DEBUG, logger="xorl.kernels.registry"):
        assert [registry.resolve("auto", n) for n in (3, 4, 7, 8)] == ["fast", "fast", "slow", "slow"]
    assert [record.getMessage() for record in caplog.records] == [
        "toy backend=fast chosen_by=auto 3",
        "toy backend=slow chosen_by=auto 7 passed_over='fast (above 5)'",
    ]
    with pytest.raises(RuntimeError, match=r"no toy backend can run 11: fast \(above 5\); slow \(above 10\)"):
        registry.resolve("auto", 11)


def test_native_attention_refuses_the_cpu_with_the_reason():
    """Catches `native` answering on a CPU with another backend, or with torch's own error in mid-training."""
    with pytest.raises(RuntimeError, match=r"'native' cannot run here: it needs a CUDA device.*these can: eager, sdpa"):
        resolve_attention("native", CPU)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (
            AttentionRequest("cuda", torch.float32, 64),
            "computes in float16 or bfloat16, but the model computes in float32",
        ),
        (AttentionRequest("cuda", torch.bfloat16, 20), "a multiple of 8 up to 256, but the model has 20"),
        (AttentionRequest("cuda", torch.bfloat16, 264), "a multiple of 8 up to 256, but the model has 264"),
    ],
)
def test_native_attention_names_what_it_lacks(request_, reason):
    """Catches a refusal that names the wrong reason."""
    with pytest.raises(RuntimeError, match=reason):
        resolve_attention("native", request_)


def test_a_backend_says_how_to_get_its_library(monkeypatch):
    """Catches a library that is missing and found out by a traceback, or a refusal that leaves the user to search."""
    monkeypatch.setattr(backends, "installed_version", lambda distribution: None)
    monkeypatch.setattr(backends, "find_spec", lambda module: None)
    for name, install in (
        ("flash_attention_2", r"uv pip install --no-build-isolation 'xorl-kernels\[fa2\]'"),
        ("flash_attention_3", "build it from the folder hopper of the flash-attention repository"),
        ("flash_attention_4", r"uv pip install 'xorl-kernels\[fa4\]'"),
    ):
        with pytest.raises(
            RuntimeError, match=f"needs a CUDA device.* is not installed.*{install}; these can: eager, sdpa"
        ):
            resolve_attention(name, CPU)


def test_a_library_that_cannot_be_imported_is_a_reason_like_any_other(caplog):
    """Catches a traceback from a library built for another torch, and `auto` stopping where it could go on."""
    registry = make_registry()

    def load():
        raise ImportError("undefined symbol: _ZN3c10")

    registry.register(Backend("broken", load=load, refusal=lambda n: None))
    with pytest.raises(RuntimeError, match=r"'broken' cannot run here: .*undefined symbol.*; these can: fast, slow"):
        registry.resolve("broken", 1)
    registry._preference = ("broken", "slow")
    with caplog.at_level(logging.DEBUG, logger="xorl.kernels.registry"):
        assert registry.resolve("auto", 1) == "slow"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith("toy backend slow is used, not broken: its library is installed but cannot be")


def test_the_extra_installs_the_version_that_the_adapter_is_written_for():
    """Catches a version raised in one place alone: the adapter would refuse what the extra installs."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    (requirement,) = project["project"]["optional-dependencies"]["fa4"]
    assert requirement.split(" ")[0] == f"flash-attn-4[cu13]=={backends.FLASH_4_VERSION}"


def test_the_names_of_the_attention_backends():
    """Catches a backend renamed or lost: the names are what users write in their configurations."""
    names = ("eager", "sdpa", "native", "flash_attention_2", "flash_attention_3", "flash_attention_4")
    assert names == ATTENTION.names
