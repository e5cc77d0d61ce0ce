"""Weights arrive in parameters exactly, in any size of bucket, or not at all."""

import logging
import threading
import time

import pytest
import torch
from safetensors.torch import save_file

from xorl.ckpt import CheckpointError, SafetensorsSource, load, load_weights
from xorl.ckpt.transfer import stream_buckets


@pytest.fixture
def source(tmp_path, hf_tensors):
    save_file(hf_tensors, tmp_path / "model.safetensors")
    return SafetensorsSource(tmp_path)


def empty_params(recipes, dtype=torch.float32):
    return {name: torch.full(recipe.shape, torch.nan, dtype=dtype) for name, recipe in recipes.items()}


def expected(hf_tensors, dtype):
    merged = torch.cat([hf_tensors[name] for name in "qkv"])
    made = {"embed": hf_tensors["wte"], "qkv": merged, "bias": hf_tensors["b"], "conv": hf_tensors["c"].T}
    made |= {"left": hf_tensors["s"][:, :3].T, "right": hf_tensors["s"][:, 3:].T}
    return {name: tensor.to(dtype) for name, tensor in made.items()}


@pytest.mark.parametrize("mode", ["broadcast", "all_ranks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 20, 64, 1 << 20])
def test_every_value_arrives_whatever_the_bucket(mode, dtype, bucket_bytes, source, recipes, hf_tensors):
    # Catches rows lost or doubled at the border of a bucket, a parameter, or a source tensor.
    params = empty_params(recipes, dtype)
    report = load_weights(params, recipes, source, mode=mode, bucket_bytes=bucket_bytes)
    torch.testing.assert_close(params, expected(hf_tensors, dtype), rtol=0, atol=0)
    assert report.num_tensors == 6
    assert report.bytes_read == sum(tensor.nbytes for tensor in hf_tensors.values())


def test_several_threads_read_and_buckets_arrive_in_order():
    # Catches a disk that is read by one thread, and a bucket that is handed over before an earlier one.
    together = threading.Barrier(2)

    def fill(index: int, buffer: torch.Tensor) -> None:
        together.wait(timeout=30)
        time.sleep(0.01 * (index % 2 == 0))
        buffer.fill_(index)

    buckets = stream_buckets([8] * 6, fill, torch.device("cpu"))
    assert [int(bucket[0]) for bucket in buckets] == list(range(6))


def test_progress_says_how_much_is_left(source, recipes, caplog, monkeypatch):
    # Catches minutes without a word, and bytes that are counted twice.
    monkeypatch.setattr(load, "PROGRESS_S", 0.0)
    with caplog.at_level(logging.INFO, "xorl.ckpt.load"):
        load_weights(empty_params(recipes), recipes, source, mode="all_ranks", bucket_bytes=64)
    lines = [line for line in caplog.messages if line.startswith("event=weights_loading gib=")]
    assert len(lines) > 3
    assert lines[-1].endswith("left_s=0")
    assert all(" of=0.00 gib_per_s=" in line for line in lines)


def test_parameters_of_a_module_are_filled_in_place(source, hf_tensors, recipes):
    # Catches a copy that autograd refuses, or that replaces the parameter.
    embedding = torch.nn.Embedding(11, 4)
    load_weights({"embed": embedding.weight}, recipes, source, mode="all_ranks")
    assert torch.equal(embedding.weight, hf_tensors["wte"].float())
    assert embedding.weight.requires_grad


def test_differences_are_listed_before_anything_is_written(source, recipes):
    # Catches a model that trains on weights that were loaded in part.
    params = empty_params(recipes)
    kind = type(recipes["embed"])
    wrong = {
        "embed": kind(("wte",), (12,), (4,)),
        "qkv": kind(("q", "k", "w"), (4, 2, 2), (4,)),
        "bias": kind(("b",), (5,)),
    }
    params = empty_params(wrong)
    with pytest.raises(CheckpointError) as error:
        load_weights(params, wrong, source, mode="all_ranks")
    text = str(error.value)
    assert "tensors missing (1): w" in text
    assert "with a different shape (1): wte: [11, 4] in the file, [12, 4] in the model" in text
    assert "that no parameter uses (3): c, s, v" in text
    assert "the weights contain 7 tensors: b, c, k, q, s, ..." in text
    assert all(param.isnan().all() for param in params.values())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_of_quantised_weights_are_not_taken_for_weights(dtype, tmp_path, hf_tensors, recipes):
    # Catches a model that is trained from the codes of another one, whose scales are elsewhere or lost.
    save_file(hf_tensors | {"k": hf_tensors["k"].to(dtype)}, tmp_path / "model.safetensors")
    params = empty_params(recipes)
    with pytest.raises(CheckpointError, match=r"of integers or fp8 \(1\): k \("):
        load_weights(params, recipes, SafetensorsSource(tmp_path), mode="all_ranks")
    assert all(param.isnan().all() for param in params.values())


def test_tensors_nobody_wants_are_ignored_only_by_name(source, recipes):
    # Catches weights that are dropped in silence.
    del recipes["conv"], recipes["bias"], recipes["left"], recipes["right"]
    params = empty_params(recipes)
    with pytest.raises(CheckpointError, match=r"no parameter uses \(2\): c, s"):
        load_weights(params, recipes, source, mode="all_ranks", ignore=lambda name: name == "b")
    report = load_weights(params, recipes, source, mode="all_ranks", ignore=lambda name: name in "bcsx")
    assert report.ignored == ("b", "c", "s")


def test_recipes_may_be_more_than_this_rank_holds(source, recipes, hf_tensors):
    # Catches a pipeline stage that is told that the other stages' weights are left over.
    params = empty_params({"qkv": recipes["qkv"]})
    load_weights(params, recipes, source, mode="all_ranks")
    assert torch.equal(params["qkv"], expected(hf_tensors, torch.float32)["qkv"])


def test_parameters_that_cannot_be_filled_are_named(source, recipes):
    # Catches parameters that no recipe knows, of another shape than it makes, or without storage.
    params = empty_params(recipes)
    params["extra"] = torch.zeros(2)
    params["bias"] = torch.zeros(6)
    params["embed"] = params["embed"].to("meta")
    with pytest.raises(CheckpointError) as error:
        load_weights(params, recipes, source, mode="all_ranks")
    for part in (
        "extra: no recipe builds this parameter",
        "bias: its shape is [6], but its recipe builds [5]",
        "embed: it is on the meta",
    ):
        assert part in str(error.value)


def test_unknown_mode_and_missing_source_are_refused(source, recipes):
    # Catches a misspelt option that falls back to something.
    with pytest.raises(CheckpointError, match="'all-ranks' is unknown; use one of broadcast, all_ranks"):
        load_weights(empty_params(recipes), recipes, source, mode="all-ranks")
    with pytest.raises(CheckpointError, match="rank 0 was given no weights"):
        load_weights(empty_params(recipes), recipes, None, mode="broadcast")


def test_error_while_reading_names_the_cause(source, recipes):
    # Catches an error that stays on the reading thread.
    class Broken(type(recipes["embed"])):
        def read(self, source, start, stop):
            raise OSError("the disk is gone")

    recipes["bias"] = Broken(("b",), (5,))
    with pytest.raises(RuntimeError, match="could not load the weights: OSError: the disk is gone"):
        load_weights(empty_params(recipes), recipes, source, mode="all_ranks", bucket_bytes=16)


@pytest.mark.gpu
@pytest.mark.parametrize("bucket_bytes", [64, 4096])
def test_pinned_copies_bring_the_same_values(bucket_bytes, tmp_path, recipes):
    # Catches a buffer that is filled again while it is still copied or used.
    kind = type(recipes["embed"])
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{i}": torch.randn(97, 33, generator=generator).bfloat16() for i in range(40)}
    save_file(tensors, tmp_path / "model.safetensors")
    many = {name: kind((name,), (97,), (33,)) for name in tensors}
    params = {name: torch.full((97, 33), torch.nan, device="cuda") for name in tensors}
    load_weights(params, many, SafetensorsSource(tmp_path), mode="all_ranks", bucket_bytes=bucket_bytes)
    for name, tensor in tensors.items():
        assert torch.equal(params[name].cpu(), tensor.float())
