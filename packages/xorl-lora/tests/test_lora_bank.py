"""A bank of adapters: each is what it would be alone, whoever shares its batches, its memory and its device."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from members import Members
from tiny_decoders import summed_loss
from tiny_models import hf_config
from xorl.core.models import Decoder
from xorl.core.parallel.compile import compile_layers
from xorl.kernels.layout import SequenceLayout
from xorl.lora import Adam, AdapterBank, AdapterSpec, adapters
from xorl.lora.snapshot import AdapterSnapshot

SIZES = hf_config("llama", vocab_size=37, hidden_size=24, intermediate_size=40, attention_bias=True)
WITH_HEAD = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")
MEMBERS = {
    "r4": AdapterSpec(rank=4, alpha=8.0, targets=WITH_HEAD),
    "r64": AdapterSpec(rank=64, alpha=32.0),
    "rs": AdapterSpec(rank=8, alpha=8.0, targets=WITH_HEAD, use_rslora=True),
    "mlp": AdapterSpec(rank=16, targets=("gate_up_proj", "down_proj")),
    "attention": AdapterSpec(rank=5, targets=("q_proj", "v_proj")),
    "patterns": AdapterSpec(rank=6, rank_pattern={"k_proj": 12}, alpha_pattern={"up_proj": 3.0}),
    "head": AdapterSpec(rank=32, targets=("lm_head",)),
    "all": AdapterSpec(rank=24),
}
# The document of one token, whose q and k have gradients of rounding alone, is for an adapter that has neither.
LENGTHS = (9, 2, 14, 5, 7, 3, 1, 6)


ALL = Members(SIZES, MEMBERS, LENGTHS, {"targets": WITH_HEAD, "num_resident": 8, "max_rank": 64})
decoder, bank_over, fill, run_mixed = ALL.decoder, ALL.bank_over, ALL.fill, ALL.run_mixed


def values_of(bank: AdapterBank, name: str) -> dict[str, Tensor]:
    found = {f"{layer}.lora_A": part.A for layer, part in bank.adapters(name).items()}
    return found | {f"{layer}.lora_B": part.B for layer, part in bank.adapters(name).items()}


def loss_of(model: Decoder, lengths: Sequence[int], seed: int = 0) -> Tensor:
    ids = torch.randint(37, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return summed_loss(model, ids, lengths)


@pytest.mark.parametrize("order", [tuple(MEMBERS), ("head", "r64", "all", "r4", "patterns", "attention", "rs", "mlp")])
def test_each_gradient_of_a_mixed_batch_is_that_of_a_run_alone(order):
    """Catches tokens that meet another's matrices, ranks and scales that leak, and a gradient in the wrong slot."""
    model = decoder()
    bank = bank_over(model)
    fill(bank)
    run_mixed(bank, model, order).backward()
    for name in MEMBERS:
        ALL.check_gradients(bank, name)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_head_that_is_not_finite_is_its_own_adapters_matter(value):
    """Catches logits and gradients of others that are NaN for an adapter in the pass, or only beside it in memory."""
    model = decoder()
    bank = bank_over(model)
    names = ("r4", "head", "rs")
    fill(bank, names)
    ids = torch.arange(30) % 37

    def logits() -> list[Tensor]:
        bank.activate([(name, 10) for name in names])
        with torch.no_grad():
            return list(model(ids, SequenceLayout.from_lengths([10, 10, 10])).split(10))

    before = logits()
    loss = run_mixed(bank, model, ("r4", "rs"))
    with torch.no_grad():
        bank.adapters("head")["lm_head"].B[3, 0] = value
    after = logits()
    assert after[1].isnan().all()
    for index in (0, 2):
        assert torch.equal(after[index], before[index])
    again = run_mixed(bank, model, ("r4", "rs"))
    assert torch.equal(again, loss)
    again.backward()
    for name in ("r4", "rs"):
        assert all(gradient.isfinite().all() for gradient in bank.gradients(name).values())


def test_a_row_of_one_adapter_is_a_run_of_a_model_with_it():
    """Catches a single adapter that is read from another slot, and layers that are left out though it is on them."""
    model = decoder()
    bank = bank_over(model)
    fill(bank)
    for name in MEMBERS:
        loss = run_mixed(bank, model, (name,))
        loss.backward()
        _, wanted = ALL.check_gradients(bank, name)
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    bank.copy("r4", "copied")
    copied = bank.snapshot("copied")
    assert torch.equal(copied.values[""], bank.snapshot("r4").values[""])
    assert copied.step == 0
    bank.activate([("copied", LENGTHS[ALL.index("r4")])])
    torch.testing.assert_close(ALL.run(model, "r4"), ALL.run(ALL.alone("r4")[0], "r4"))


def test_training_together_is_training_alone():
    """Catches shared step counts, learning rates, clipping and weight decay, and padding that moves."""
    model = decoder()
    bank = bank_over(model)
    fill(bank)
    hyper = ALL.adams()
    for step in range(3):
        # Some sit a step out, so that counts differ.
        names = [name for index, name in enumerate(MEMBERS) if step != 1 or index % 2]
        for _ in range(2):
            run_mixed(bank, model, names).backward()
        for name in names:
            bank.step(name, hyper[name], divisor=3.0, max_norm=1.0)
    for index, name in enumerate(MEMBERS):
        values = values_of(bank, name)
        for key, parameter in ALL.trained_alone(name, 3 if index % 2 else 2).items():
            torch.testing.assert_close(values[key].detach(), parameter.detach(), rtol=1e-4, atol=2e-6, msg=key)


def test_one_adapter_is_trained_and_others_keep_every_bit():
    """Catches a forward, backward or optimizer step that touches values, states or gradients of another adapter."""
    model = decoder()
    bank = bank_over(model)
    fill(bank, ("r4", "mlp"))
    run_mixed(bank, model, ("r4", "mlp")).backward()
    bank.step("mlp", Adam(lr=1e-2))
    run_mixed(bank, model, ("mlp",)).backward()
    before = {key: value.clone() for key, value in bank.gradients("mlp").items()}
    snapshot = bank.snapshot("mlp")
    run_mixed(bank, model, ("r4",)).backward()
    bank.step("r4", Adam(lr=1e-2))
    assert all(torch.equal(before[key], value) for key, value in bank.gradients("mlp").items())
    after = bank.snapshot("mlp").tensors()
    assert all(torch.equal(value, after[key]) for key, value in snapshot.tensors().items())


def test_a_gradient_that_is_not_finite_harms_nobody():
    """Catches a diverged adapter that spoils the others in its batch, and an update with such a gradient."""
    model = decoder()
    bank = bank_over(model, targets="all-linear")
    fill(bank, ("attention", "mlp"))
    with torch.no_grad():
        next(iter(values_of(bank, "mlp").values())).fill_(float("nan"))
    held = bank.snapshot("mlp").tensors()
    run_mixed(bank, model, ("attention", "mlp")).backward()
    outcomes = {name: bank.step(name, Adam(lr=1e-2)) for name in ("attention", "mlp")}
    assert [outcome.skipped.item() for outcome in outcomes.values()] == [0, 1]
    kept = bank.snapshot("mlp").tensors()
    assert all(torch.equal(value.nan_to_num(), kept[key].nan_to_num()) for key, value in held.items())
    assert kept["step"] == 0


def test_passes_that_fail_leave_gradients_as_they_were():
    """Catches half of a failed call in the next step, of an adapter with and one without earlier gradients."""
    model = decoder()
    bank = bank_over(model, num_resident=2)
    fill(bank, ("r4", "mlp"))
    run_mixed(bank, model, ("r4",)).backward()
    before = {key: value.clone() for key, value in bank.gradients("r4").items()}

    def failing_pass() -> None:
        with bank.gradients_kept(("r4", "mlp")):
            run_mixed(bank, model, ("r4", "mlp")).backward()
            bank.add("rs", MEMBERS["rs"])  # one of them leaves the device
            raise ValueError("in the second micro-batch")

    with pytest.raises(ValueError, match="in the second"):
        failing_pass()
    assert all(torch.equal(before[key], value) for key, value in bank.gradients("r4").items())
    assert not any(value.any() for value in bank.gradients("mlp").values())


def test_paged_adapters_come_back_to_the_bit(tmp_path: Path):
    """Catches states, counts and waiting gradients that eviction loses, in memory and on disk."""
    roomy_model, tight_model = decoder(), decoder()
    options = {"targets": "all-linear"}  # a head's sums are over all slots, and round as their number is
    roomy = bank_over(roomy_model, **options)
    tight = bank_over(tight_model, num_resident=2, host_limit=1, folder=tmp_path, **options)
    names = ("patterns", "mlp", "all", "attention", "r64")
    for bank in (roomy, tight):
        fill(bank, names)
    for step in range(4):
        for bank, model in ((roomy, roomy_model), (tight, tight_model)):
            for name in names:
                run_mixed(bank, model, (name,)).backward()
            for name in reversed(names[step % 2 :]):
                bank.step(name, Adam(lr=1e-2))
    assert len(tight.resident) == 2
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    for name in names:
        wanted, got = roomy.snapshot(name).tensors(), tight.snapshot(name).tensors()
        assert wanted.keys() == got.keys()
        assert all(torch.equal(value, got[key]) for key, value in wanted.items()), name
    for name in names:
        tight.remove(name)
    assert not list(tmp_path.iterdir())


def test_the_adapter_that_was_not_used_for_longest_leaves():
    """Catches an eviction of what the same pass needs, or of what was just used."""
    model = decoder()
    bank = bank_over(model, num_resident=3)
    fill(bank, ("r4", "mlp", "rs"))
    run_mixed(bank, model, ("r4",))
    bank.add("head", MEMBERS["head"])
    assert set(bank.resident) == {"rs", "r4", "head"}
    run_mixed(bank, model, ("rs", "mlp", "head"))
    assert set(bank.resident) == {"rs", "mlp", "head"}
    with pytest.raises(ValueError, match="4 adapters in one pass, but the bank holds only 3"):
        run_mixed(bank, model, ("rs", "mlp", "head", "r4"))


def test_an_adapter_that_cannot_come_back_takes_no_room():
    """Catches a slot that is lost with each failure, and one that is taken for the adapter that failed to come."""
    bank = bank_over(decoder(), num_resident=1)
    fill(bank, ("r4",))
    wanted = bank.snapshot("r4").tensors()
    fill(bank, ("mlp",))
    away = bank._store.get("r4")
    bank._store.drop("r4")
    short = {kind: flat[:1] for kind, flat in away.values.items()}
    bank._store.put("r4", AdapterSnapshot(away.spec, away.step, away.names, short))
    for _ in range(2):
        with pytest.raises(RuntimeError):
            bank.zero_grad("r4")
    bank._store.drop("r4")
    bank._store.put("r4", away)
    fill(bank, ("attention",))
    bank.zero_grad("r4")
    got = bank.snapshot("r4").tensors()
    assert all(torch.equal(value, got[name]) for name, value in wanted.items())


@pytest.mark.parametrize("others", [(), ("mlp",)], ids=["on the device", "put away"])
def test_an_adapter_that_cannot_be_restored_is_what_it_was(others: tuple[str, ...]):
    """Catches a model that is lost, optimizer and gradient with it, where a checkpoint could not be loaded into it."""
    model = decoder()
    bank = bank_over(model, num_resident=1)
    fill(bank, ("r4",))
    run_mixed(bank, model, ("r4",)).backward()
    bank.step("r4", Adam(lr=1e-2))
    run_mixed(bank, model, ("r4",)).backward()
    gradients = {key: value.clone() for key, value in bank.gradients("r4").items()}
    wanted = bank.snapshot("r4")
    unreadable = {kind: flat.to("meta") for kind, flat in wanted.values.items()}
    fill(bank, others)
    with pytest.raises(NotImplementedError):
        bank.restore("r4", AdapterSnapshot(wanted.spec, 0, wanted.names, unreadable))
    got = bank.snapshot("r4").tensors()
    assert all(torch.equal(value, got[key]) for key, value in wanted.tensors().items())
    assert all(torch.equal(value, bank.gradients("r4")[key]) for key, value in gradients.items())
    bank.restore("r4", wanted)
    assert not any(value.any() for value in bank.gradients("r4").values())
    assert bank.names == ("r4", *others)


def test_saved_adapters_go_on_to_the_bit_in_another_bank(tmp_path: Path):
    """Catches a file that lacks the optimizer, or that depends on the bank's slots and largest rank."""
    first_model, second_model = decoder(), decoder()
    first, second = bank_over(first_model), bank_over(second_model)
    small = bank_over(decoder(), num_resident=1, max_rank=16)
    fill(first, ("r4", "rs"))
    second.add("other", MEMBERS["mlp"])
    run_mixed(first, first_model, ("rs", "r4")).backward()
    first.step("rs", Adam(lr=1e-2))
    first.save("rs", tmp_path / "rs.safetensors")
    for bank in (second, small):
        bank.load("rs", tmp_path / "rs.safetensors")
    kept = small.snapshot("rs").tensors()
    assert all(torch.equal(value, kept[key]) for key, value in first.snapshot("rs").tensors().items())
    assert second.spec("rs") == MEMBERS["rs"]
    first.zero_grad("r4")
    for bank, model in ((first, first_model), (second, second_model)):
        run_mixed(bank, model, ("rs",)).backward()
        bank.step("rs", Adam(lr=1e-2))
    wanted, got = first.snapshot("rs").tensors(), second.snapshot("rs").tensors()
    assert all(torch.equal(value, got[key]) for key, value in wanted.items())
    assert wanted["step"] == 2
    (tmp_path / "rs.safetensors").write_bytes((tmp_path / "rs.safetensors").read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"rs\.safetensors is not an adapter"):
        second.load("rs", tmp_path / "rs.safetensors")
    snapshot = first.snapshot("r4")
    with pytest.raises(ValueError, match="1 problems"):
        AdapterSnapshot.of_tensors(
            snapshot.spec, snapshot.names, {k: v for k, v in snapshot.tensors().items() if k != "step"}
        )


def test_tokens_of_the_base_alone_see_no_adapter():
    """Catches a base that is not reachable once there are adapters, as a reference policy must be."""
    model = decoder()
    with torch.no_grad():
        expected = loss_of(model, [4, 6])
    bank = bank_over(model, num_resident=1)
    fill(bank, ("all",))
    bank.activate([(None, 10)])
    torch.testing.assert_close(loss_of(model, [4, 6]).detach(), expected)
    bank.activate([("all", 4), (None, 6)])
    assert not torch.allclose(loss_of(model, [4, 6]).detach(), expected)


@pytest.mark.parametrize(
    ("options", "spec", "message"),
    [
        ({"targets": ("embed_tokens",)}, None, "embed_tokens is an embedding"),
        ({"num_resident": 0}, None, "num_resident must be at least 1"),
        ({"max_rank": 0}, None, "max_rank must be at least 1"),
        ({"max_rank": "8"}, None, "max_rank must be an integer, got '8'"),
        ({"targets": "q_proj"}, None, "a tuple of names, got the string 'q_proj'"),
        ({"host_limit": 1}, None, "pass folder"),
        ({}, {"rank": 4}, "spec must be a .*AdapterSpec, got a dict"),
        ({}, AdapterSpec(rank=65), "above the bank's max_rank 64"),
        ({}, AdapterSpec(dropout=0.1), "dropout is 0.1"),
        ({}, AdapterSpec(use_dora=True), "use_dora"),
        ({"targets": ("q_proj",)}, AdapterSpec(targets=("v_proj",)), "not among the bank's targets"),
        ({}, AdapterSpec(targets=("c_proj",)), "match no layer"),
    ],
)
def test_what_a_bank_cannot_hold_is_refused_by_name(options, spec, message):
    """Catches adapters that would silently compute something else than their spec says."""
    with pytest.raises(ValueError, match=message):
        bank_over(decoder(), **options).add("new", spec or AdapterSpec())


def test_one_compilation_serves_every_mixture_and_one_every_single_adapter():
    """Catches adapters, splits or layers that compiled code was specialised on.

    The first layer's input has no gradient, the others' has: two of each kind in all.
    """
    compilations = 0

    def counting(graph, example_inputs):
        nonlocal compilations
        compilations += 1
        return graph

    model = decoder()
    compile_layers(list(model.layers), backend=counting, device_type="cpu")
    bank = bank_over(model, num_resident=4)
    fill(bank, ("r4", "r64", "mlp", "attention"))
    for names in (("r4", "mlp"), ("attention", "r4", "mlp", "r64")):
        run_mixed(bank, model, names).backward()
    assert compilations == 2
    for names in (("mlp",), ("r4",), ("attention",)):
        run_mixed(bank, model, names).backward()
    assert compilations == 4
    bank.add("rs", MEMBERS["rs"])
    run_mixed(bank, model, ("rs", "r64")).backward()
    run_mixed(bank, model, ("rs",)).backward()
    run_mixed(bank, model, ("mlp",)).backward()
    assert compilations == 4


def test_any_module_takes_a_bank():
    """Catches a bank that needs the decoder: rows of a batch are tokens of any module's linear layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))
    plain, x = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)), torch.randn(2, 5, 6)
    plain.load_state_dict(model.state_dict())
    bank = AdapterBank(model, num_resident=2, max_rank=4, device="cpu")
    bank.add("a", AdapterSpec(rank=2))
    bank.add("b", AdapterSpec(rank=4))
    with torch.no_grad():
        for parameter in values_of(bank, "b").values():
            parameter.fill_(0.1)
    bank.activate([("a", 5), ("b", 5)])
    y, expected = model(x), plain(x)
    torch.testing.assert_close(y[0], expected[0])
    assert not torch.allclose(y[1], expected[1])
    assert not adapters(model)


@pytest.mark.parametrize("runs", [[("a", 5), ("b", 4)], [("a", 5), ("b", 6)], [("a", 9)], [(None, 3), ("b", 8)]])
def test_a_batch_of_another_number_of_rows_is_refused(runs):
    """Catches uninitialised memory for rows that no run names, and rows that a wrong adapter computes."""
    model = nn.Sequential(nn.Linear(16, 16))
    expected = model(x := torch.randn(10, 16))
    bank = AdapterBank(model, num_resident=2, max_rank=4, device="cpu")
    bank.add("a", AdapterSpec(rank=2))
    bank.add("b", AdapterSpec(rank=2))
    torch.testing.assert_close(model(x), expected)
    bank.activate(runs)
    with pytest.raises(ValueError, match=rf"runs: AdapterBank.activate assigned {sum(n for _, n in runs)} .* got 10"):
        model(x)


def test_paths_of_a_bank_may_be_text(tmp_path):
    """Catches a str that has no method of a Path."""
    bank = AdapterBank(
        nn.Sequential(nn.Linear(8, 8)), num_resident=1, max_rank=2, device="cpu", folder=str(tmp_path / "evicted")
    )
    bank.add("a", AdapterSpec(rank=2))
    bank.save("a", str(tmp_path / "a.safetensors"))
    bank.load("b", str(tmp_path / "a.safetensors"))
    assert bank.names == ("a", "b")
