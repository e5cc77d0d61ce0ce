"""What the methods of a bank refuse: runs, hyperparameters and files of another kind."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from xorl.lora import Adam, AdapterBank, AdapterSpec, inject
from xorl.lora.inject import adapter_parameters, load_adapter_state_dict
from xorl.lora.peft import load_adapter, save_adapter


def small_bank():
    bank = AdapterBank(nn.Sequential(nn.Linear(8, 8)), num_resident=2, max_rank=2, device="cpu")
    bank.add("a", AdapterSpec(rank=2))
    return bank


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([("a", 10), (None, 0)], "runs: the number of tokens of None must be at least 1, got 0"),
        ([("a", 2.5)], r"runs: the number of tokens of 'a' must be an integer, got 2\.5"),
        ([("a", 3), (None, 2), ("a", 3)], "runs: the tokens of 'a' must be adjacent, but it has 2 runs"),
        ({"a": 8}, r"runs must be a list of \(adapter, number of tokens\), such as \[\('a', 8\)\], got {'a': 8}"),
        (("a", 8), r"runs must be a list of \(adapter, number of tokens\)"),
    ],
)
def test_runs_are_refused_by_the_names_of_adapters(runs, message):
    """Catches a message about slots, and an error of unpacking that names no argument."""
    with pytest.raises(ValueError, match=message):
        small_bank().activate(runs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Adam(lr=-1), "lr must be at least 0, got -1"),
        (lambda: Adam(lr=1, weight_decay=-0.1), "weight_decay must be at least 0, got -0.1"),
        (lambda: Adam(lr="1e-3"), "lr must be a number, got '1e-3'"),
        (lambda: Adam(lr=1, weight_decay=float("inf")), "weight_decay must be a finite number, got inf"),
        (lambda: Adam(lr=1, betas=0.9), r"betas must be two numbers, got 0\.9"),
        (
            lambda: torch.optim.Adam([torch.zeros(1, requires_grad=True)]),
            "adam must be a xorl.lora.adam.Adam, got a torch.optim.adam.Adam",
        ),
    ],
)
def test_hyperparameters_of_a_step_are_checked(make, message):
    """Catches torch's optimizer in place of hyperparameters, and values that turn adapters into NaN."""
    bank = small_bank()
    with pytest.raises(ValueError, match=message):
        bank.step("a", make())


def test_a_file_of_another_kind_is_told_from_a_snapshot(tmp_path):
    """Catches a message that names a missing key to those who load PEFT's file."""
    save_file({"base_model.model.0.lora_A.weight": torch.zeros(2, 8)}, path := tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"not an adapter saved by a bank: .* PEFT's file, .*peft\.load_adapter"):
        small_bank().load("b", path)


def test_a_step_does_not_go_uphill():
    """Catches a negative divisor, which turns descent into ascent, and limits of the norm that make all values NaN."""
    with pytest.raises(ValueError, match="max_norm must be a finite number, got nan"):
        small_bank().step("a", Adam(lr=1e-3), max_norm=float("nan"))
    for wrong in ({"divisor": -1}, {"max_norm": -1.0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be at least 0, got -1"):
            small_bank().step("a", Adam(lr=1e-3), **wrong)
    for divisor in (float("inf"), torch.tensor(float("inf")), torch.ones(2)):
        with pytest.raises(ValueError, match=r"divisor:? must be"):
            small_bank().step("a", Adam(lr=1e-3), divisor=divisor)


@pytest.mark.parametrize("num_resident", [1, 2])
def test_rows_of_an_adapter_that_has_left_the_device_are_not_those_of_another(num_resident):
    """Catches another tenant's weights in the slot of an assignment that still holds."""
    model = nn.Sequential(nn.Linear(8, 8))
    bank = AdapterBank(model, num_resident=num_resident, max_rank=2, device="cpu")
    for name in ("a", "b", "c"):
        bank.add(name, AdapterSpec(rank=2))
    x = torch.randn(3, 8)
    for use in (bank.adapters, bank.zero_grad, lambda name: bank.step(name, Adam(lr=0.1))):
        bank.activate([("a", 3)])
        model(x)
        for name in ("b", "c"):
            use(name)
        with pytest.raises(ValueError, match=r"'a' has left the device since .* activate the rows"):
            model(x)
    bank.activate([("a", 3)])
    model(x)
    bank.remove("a")
    with pytest.raises(ValueError, match="'a' has left the device"):
        model(x)


def test_layers_with_hooks_are_not_replaced():
    """Catches hooks that are lost with the layer, so that the model's outputs change."""
    model = nn.Sequential(nn.Linear(8, 8))
    handle = model[0].register_forward_hook(lambda module, inputs, output: output * 0)
    with pytest.raises(ValueError, match=r"targets: 0 has hooks, .*; remove them"):
        inject(model, AdapterSpec(rank=2))
    with pytest.raises(ValueError, match="targets: 0 has hooks"):
        AdapterBank(model, num_resident=1, max_rank=2, device="cpu")
    handle.remove()
    inject(model, AdapterSpec(rank=2))


def test_values_of_adapters_are_of_floating_point():
    """Catches adapters that are truncated to integers."""
    model = nn.Sequential(nn.Linear(8, 8))
    inject(model, AdapterSpec(rank=2))
    state = {name: parameter.long() for name, parameter in adapter_parameters(model).items()}
    with pytest.raises(ValueError, match=r"is torch\.int64, not of floating point"):
        load_adapter_state_dict(model, state)


def test_a_file_without_a_module_that_was_trained_whole_is_refused(tmp_path):
    """Catches a module that keeps its old weights, as if the adapter had never trained it."""
    spec = AdapterSpec(rank=2, targets=("0",), modules_to_save=("1",))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    inject(model, spec)
    save_adapter(model, spec, tmp_path, base=None, task_type=None)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert "base_model.model.1.weight" in tensors
    del tensors["base_model.model.1.weight"]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(
        ValueError, match=r"1\.weight: modules_to_save in adapter_config.json names its module, but the file lacks it"
    ):
        load_adapter(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), tmp_path)


def test_seeds_are_integers():
    """Catches a seed read from a file as text, or as 7.0, which draws other adapters than 7."""
    for seed in ("7", 7.0, True, None):
        with pytest.raises(ValueError, match="seed must be an integer, got "):
            small_bank().add("b", AdapterSpec(rank=2), seed=seed)
        model = nn.Sequential(nn.Linear(8, 8))
        with pytest.raises(ValueError, match="seed must be an integer, got "):
            inject(model, AdapterSpec(rank=2), seed=seed)
        assert type(model[0]) is nn.Linear


def test_the_folder_of_a_bank_is_no_file(tmp_path):
    """Catches an error in the first step that needs the folder."""
    (path := tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"folder must be a folder, but .*file is a file"):
        AdapterBank(nn.Sequential(nn.Linear(8, 8)), num_resident=2, max_rank=2, device="cpu", host_limit=1, folder=path)


def test_names_that_nobody_could_activate_are_refused():
    """Catches an adapter named None, which stands for no adapter."""
    for name in (None, 3):
        with pytest.raises(ValueError, match="name must be a str, got a "):
            small_bank().add(name, AdapterSpec(rank=2))
        with pytest.raises(ValueError, match="to must be a str, got a "):
            small_bank().copy("a", name)
        with pytest.raises(ValueError, match="name must be a str, got a "):
            (bank := small_bank()).restore(name, bank.snapshot("a"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_sharing": "outside"}, "expert_sharing: 'outside' is not one of 'none', 'outer', 'all'"),
        ({"host_limit": 1.5, "folder": "x"}, r"host_limit must be an integer, got 1\.5"),
    ],
)
def test_options_of_a_bank_are_checked(options, message):
    """Catches a misspelt choice that acts as another."""
    with pytest.raises(ValueError, match=message):
        AdapterBank(nn.Sequential(nn.Linear(8, 8)), num_resident=2, max_rank=2, device="cpu", **options)


def test_a_model_of_a_bank_gets_no_other_adapters():
    """Catches adapters that take the place of the bank's."""
    model = nn.Sequential(nn.Linear(8, 8))
    AdapterBank(model, num_resident=2, max_rank=2, device="cpu")
    with pytest.raises(ValueError, match=r"belongs to a bank: add adapters to it with AdapterBank\.add"):
        inject(model, AdapterSpec(rank=2))
