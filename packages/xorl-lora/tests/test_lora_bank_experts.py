"""A bank of adapters on experts: each is what it would be alone, whoever shares its batches."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from members import Members
from tiny_decoders import summed_loss
from tiny_models import hf_config
from xorl.core.models import Decoder, spec_for
from xorl.kernels.quant import QuantFormat, QuantScheme
from xorl.lora import Adam, AdapterBank, AdapterSpec, adapter_parameters, inject
from xorl.lora.peft import adapter_tensors
from xorl.lora.quantize import quantizable_layers, quantize_layers
from xorl.lora.quantized import quantized_rows
from xorl.lora.spec import ExpertSharing

SIZES = hf_config("glm4_moe", vocab_size=37, hidden_size=24)
TARGETS = ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
MEMBERS = {
    "all": AdapterSpec(rank=4, alpha=8.0, targets=TARGETS),
    "attention": AdapterSpec(rank=5, targets=("q_proj",)),
    "ranks": AdapterSpec(rank=3, targets=("up_proj", "down_proj"), rank_pattern={"up_proj": 6}, use_rslora=True),
    "down": AdapterSpec(rank=8, targets=("down_proj",), alpha_pattern={"experts.down_proj": 3.0}),
    "gate": AdapterSpec(rank=2, targets=("gate_proj",)),
    "up": AdapterSpec(rank=7, targets=("up_proj", "v_proj")),
    "large": AdapterSpec(rank=8, targets=TARGETS),
    "both": AdapterSpec(rank=1, targets=("gate_proj", "down_proj"), use_rslora=True),
}
LENGTHS = (9, 2, 14, 5, 7, 3, 11, 6)


ALL = Members(SIZES, MEMBERS, LENGTHS, {"targets": TARGETS, "num_resident": 8, "max_rank": 8})
decoder, bank_over, fill, run_mixed = ALL.decoder, ALL.bank_over, ALL.fill, ALL.run_mixed


def files_of(*held: object) -> dict[str, Tensor]:
    return {key: tensor for group in adapter_tensors(*held) for key, tensor in group.make().items()}


def assert_same_files(own: Decoder, bank: AdapterBank, name: str) -> None:
    alone, banked = files_of(own), files_of(own, bank.adapters(name))
    torch.testing.assert_close(banked, alone, rtol=0, atol=0)


@pytest.mark.parametrize(
    "batches", [[tuple(MEMBERS)], [("up", "down", "all"), ("large", "both"), ("ranks", "attention", "gate")]], ids=len
)
def test_each_gradient_of_a_mixed_batch_is_that_of_a_run_alone(batches: list[tuple[str, ...]]) -> None:
    # Catches tokens that meet another adapter's experts, ranks and scales that leak, and gradients in the wrong slot.
    model = decoder()
    bank = bank_over(model)
    fill(bank)
    total = torch.zeros(())
    for names in batches:
        loss = run_mixed(bank, model, names)
        loss.backward()
        total += loss.detach()
    for name in MEMBERS:
        total -= ALL.check_gradients(bank, name)[1].detach()
    assert total.abs() < 1e-3


def test_a_row_of_one_adapter_is_a_run_of_a_model_with_it() -> None:
    # Catches a single adapter that is read from another slot, and files that differ from those of a model with it.
    model = decoder()
    bank = bank_over(model)
    fill(bank)
    for name in MEMBERS:
        loss = run_mixed(bank, model, (name,))
        loss.backward()
        own, wanted = ALL.check_gradients(bank, name)
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
        assert_same_files(own, bank, name)
    bank.activate([(None, LENGTHS[0])])
    assert torch.equal(ALL.run(model, "all"), ALL.run(decoder(), "all"))


def test_training_together_is_training_alone(tmp_path: Path) -> None:
    # Catches shared step counts and clipping, and states of experts that paging or a file loses.
    model, tight_model = decoder(), decoder()
    bank = bank_over(model)
    tight = bank_over(tight_model, num_resident=2, host_limit=1, folder=tmp_path / "store")
    for each in (bank, tight):
        fill(each)
    hyper = ALL.adams()
    for _ in range(3):
        for _ in range(2):
            run_mixed(bank, model, tuple(MEMBERS)).backward()
        for name in MEMBERS:
            bank.step(name, hyper[name], divisor=3.0, max_norm=1.0)
            for _ in range(2):
                run_mixed(tight, tight_model, (name,)).backward()
            tight.step(name, hyper[name], divisor=3.0, max_norm=1.0)
    for name in MEMBERS:
        parameters = ALL.trained_alone(name, 3)
        tight.save(name, tmp_path / name)
        other = bank_over(decoder())
        other.load(name, tmp_path / name)
        for tensors in (bank.snapshot(name).tensors(), other.snapshot(name).tensors()):
            for key, parameter in parameters.items():
                torch.testing.assert_close(tensors[key], parameter.detach(), rtol=1e-4, atol=2e-6, msg=key)


@pytest.mark.parametrize("quant_format", ["nf4", "nvfp4", "block_fp8"])
def test_a_bank_over_quantised_experts_trains_as_an_adapter_alone(quant_format: QuantFormat) -> None:
    # Catches sizes that are read from the shape of the codes.
    sizes = {**SIZES, "hidden_size": 32, "moe_intermediate_size": 32}
    family = spec_for(sizes)
    spec = AdapterSpec(rank=4, alpha=8.0, targets=TARGETS)
    ids = torch.arange(24) % 37

    def base() -> Decoder:
        with torch.device("meta"):
            model = family.build(family.config_from_hf(sizes))
        quantize_layers(model, quantizable_layers(model, (), "exclude"), QuantScheme(quant_format, 16))
        model.to_empty(device="cpu")
        model.init_weights(0, targets=quantized_rows(model))
        return model.train()

    def loss_of(model: Decoder) -> Tensor:
        return summed_loss(model, ids, [10, 14], ids.roll(-1))

    alone, banked = base(), base()
    inject(alone, spec, seed=3)
    bank = bank_over(banked)
    bank.add("one", spec, seed=3)
    optimizer = torch.optim.AdamW(adapter_parameters(alone).values(), lr=1e-2, weight_decay=0.0)
    for _ in range(2):
        bank.activate([("one", len(ids))])
        losses = [loss_of(model) for model in (alone, banked)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
        for loss in losses:
            loss.backward()
        optimizer.step()
        bank.step("one", Adam(lr=1e-2, weight_decay=0.0), divisor=1)


@pytest.mark.parametrize("sharing", ["outer", "all"])
def test_experts_share_factors_in_a_bank_as_alone(sharing: ExpertSharing) -> None:
    # Catches gradients of a shared factor that miss some experts, and a file that differs from that of a model with it.
    model = decoder()
    bank = bank_over(model, expert_sharing=sharing)
    specs = {
        name: replace(spec, expert_sharing=sharing) if name != "attention" else spec for name, spec in MEMBERS.items()
    }
    members = replace(ALL, specs=specs)
    members.fill(bank)
    run_mixed(bank, model, tuple(MEMBERS)).backward()
    run_mixed(bank, model, ("all",)).backward()
    for name in MEMBERS:
        own, _ = members.check_gradients(bank, name, times=2 if name == "all" else 1)
        assert_same_files(own, bank, name)
    with pytest.raises(ValueError, match="expert_sharing is 'none': all adapters of this bank have"):
        bank.add("other", AdapterSpec(rank=4, targets=TARGETS))


def test_a_bank_on_experts_alone_is_seen():
    """Catches a second bank, or adapters of `inject`, in place of those that only experts have."""
    model = decoder()
    bank_over(model, targets=("gate_proj", "up_proj", "down_proj"))
    with pytest.raises(ValueError, match="already has adapters; create the bank on a model without"):
        bank_over(model)
    with pytest.raises(ValueError, match="belongs to a bank"):
        inject(model, AdapterSpec(rank=2))
