"""What an adapter file may say, and what is said of one that is another's or not whole."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from xorl.lora import AdapterBank, AdapterSpec, inject, peft
from xorl.lora.peft.config import shared_value, shortest_names
from xorl.lora.peft.layout import keys_of
from xorl.lora.peft.merged import AdapterValues, fold

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


def held(shapes):
    return peft.InMemoryTensors({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})


def shapes(module="layers.0.q_proj", a=(2, 8), b=(4, 2), **others):
    a_key, b_key, _ = keys_of(module)
    return held({a_key: a, b_key: b} | {key.replace("__", "."): shape for key, shape in others.items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 0}, "rank must be at least 1, got 0"),
        ({"lora_alpha": 0}, "alpha must be above 0"),
        ({"rank_pattern": {"k_proj": 0}}, "k_proj.*must be at least 1"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"use_qalora": True}, "use_qalora is set"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model's weights"),
        ({"modules_to_save": "lm_head"}, "modules_to_save must be a list of names, got 'lm_head'"),
        ({"lora_dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"use_rslora": "false"}, "use_rslora must be true or false, got 'false'"),
    ],
)
def test_settings_that_cannot_be_computed_are_refused_by_name(changes, message):
    # Catches an adapter of another kind that is read as if it were a plain one.
    with pytest.raises(ValueError, match=message):
        peft.AdapterConfig.from_json(CONFIG | changes)


def test_a_configuration_returns_as_it_was():
    # Catches a setting that is written under another name than it is read by, or as what JSON is not.
    spec = AdapterSpec(
        4,
        6.5,
        targets=("k_proj", "q_proj"),
        use_rslora=True,
        use_dora=True,
        dropout=0.1,
        rank_pattern={"k_proj": 2},
        alpha_pattern={"k_proj": 3.0},
        modules_to_save=("lm_head",),
    )
    config = peft.AdapterConfig(spec, base="org/base", fan_in_fan_out=True)
    assert peft.AdapterConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (shapes(a=(3, 8)), "but the rank in adapter_config.json is 2"),
        (shapes(b=(4, 3)), "but the rank in adapter_config.json is 2"),
        (shapes(a=(16,)), "both must be matrices"),
        (held({keys_of("q_proj")[0]: (2, 8)}), "missing lora_B"),
        (shapes(base_model__model__q_proj__lora_A__default__weight=(2, 8)), "not a tensor name that PEFT writes"),
        (shapes(_orig_mod__q_proj__lora_A__weight=(2, 8)), "does not start with PEFT's prefix base_model.model."),
        (shapes(base_model__model__lm_head__weight=(4, 8)), r"modules_to_save \[\] does not name"),
        (
            shapes(base_model__model__layers__0__q_proj__lora_magnitude_vector=(4,)),
            "use_dora in adapter_config.json is false",
        ),
        (held({}), "the file has no tensors"),
    ],
)
def test_files_that_are_not_whole_are_refused(tensors, message):
    # Catches a shard, a half or a state dict with wrappers' names that would load as no adapter at all.
    with pytest.raises(ValueError, match=message):
        peft.read_layout(peft.AdapterConfig.from_json(CONFIG), tensors)


def test_an_adapter_for_another_base_is_told_by_names_and_shapes():
    # Catches an adapter that is put on a model of another size, or of which half the layers are missing.
    layout = peft.read_layout(
        peft.AdapterConfig.from_json(CONFIG | {"modules_to_save": ["norm"]}),
        shapes(base_model__model__norm__weight=(8,)),
    )
    assert peft.differences(layout, {"layers.0.q_proj.weight": (4, 8), "norm.weight": (8,)}) == []
    told = peft.differences(layout, {"layers.0.q_proj.weight": (6, 8)})
    assert told == [
        "layers.0.q_proj: the adapter is for a weight of [4, 8], the base has [6, 8]",
        "norm.weight: the base does not have this tensor",
    ]
    assert peft.differences(layout, {"norm.weight": (8,)}) == ["layers.0.q_proj: the base does not have this layer"]


Q_PROJ = dict(zip(keys_of("layers.0.q_proj")[:2], ((2, 8), (4, 2)), strict=True))
TWO_LAYERS = {f"layers.{layer}.{name}.weight": (4, 8) for layer in (0, 1) for name in ("q_proj", "v_proj")}


@pytest.mark.parametrize(
    ("changes", "absent"),
    [
        ({}, ["layers.1.q_proj"]),
        ({"target_modules": ["q_proj", "v_proj"]}, ["layers.0.v_proj", "layers.1.q_proj", "layers.1.v_proj"]),
        ({"target_modules": r".*\.q_pro."}, ["layers.1.q_proj"]),
        ({"exclude_modules": ["layers.1.q_proj"]}, []),
        ({"exclude_modules": r".*\.1\..*"}, []),
        ({"layers_to_transform": 0}, []),
        ({"layers_to_transform": [0, 1], "layers_pattern": "layers"}, ["layers.1.q_proj"]),
        ({"layers_to_transform": [1], "layers_pattern": ["blocks"]}, []),
        ({"target_modules": "all-linear"}, []),
        ({"target_modules": None}, []),
        ({"modules_to_save": ["lm_head", "score"], "exclude_modules": ["1.q_proj"]}, ["lm_head.weight"]),
        ({"target_modules": ["0.q_proj", "lm_head"], "modules_to_save": ["lm_head"]}, ["lm_head.weight"]),
        ({"target_modules": ["0.q_proj"], "modules_to_save": ["orm"]}, ["norm.weight"]),
    ],
)
def test_a_file_without_what_its_configuration_names_is_told(changes, absent):
    """Catches an adapter of which a layer, a projection or a module trained whole was lost, and which loads as if not.

    Catches, too, a file that is refused because PEFT's other ways to choose layers are not understood.
    """
    layout = peft.read_layout(peft.AdapterConfig.from_json(CONFIG | changes), shapes())
    told = peft.differences(layout, {**TWO_LAYERS, "norm.weight": (8,), "lm_head.weight": (9, 8)})
    assert [problem.partition(":")[0] for problem in told] == absent


@pytest.mark.parametrize(
    "targets", [["all-linear"], "all", [".*q_proj"], "q_proj", ["v_proj"], ["all"], "layers.0", ["1.q_proj"]]
)
def test_a_file_with_more_than_its_configuration_names_is_told(targets):
    """Catches an adapter that is applied here and that PEFT ignores, such as one whose targets are another tool's."""
    config = peft.AdapterConfig.from_json(CONFIG | {"target_modules": targets})
    told = peft.differences(peft.read_layout(config, shapes()), {"layers.0.q_proj.weight": (4, 8), "norm.weight": (8,)})
    assert [problem for problem in told if problem.startswith("layers.0.q_proj: the file has an adapter")], told
    assert 'list "q_proj" there' in told[0]


def test_experts_are_missing_only_where_the_file_has_others():
    """Catches a lost expert, and a file of PEFT that is refused although PEFT adapts no stacked experts by names."""
    names = [f"layers.0.mlp.experts.{expert}.{leaf}" for expert in (0, 1) for leaf in ("gate_proj", "up_proj")]
    base = {**{f"{name}.weight": (4, 8) for name in names}, "layers.0.q_proj.weight": (4, 8)}
    content = CONFIG | {"target_modules": ["q_proj", "gate_proj", "up_proj"]}
    config = peft.AdapterConfig.from_json(content | {"peft_version": "0.21.2"})
    assert peft.differences(peft.read_layout(config, shapes()), base) == []
    assert len(peft.differences(peft.read_layout(peft.AdapterConfig.from_json(content), shapes()), base)) == len(names)
    stacked = peft.AdapterConfig.from_json(
        CONFIG | {"target_parameters": ["experts.gate_up_proj"], "peft_version": "1"}
    )
    assert len(peft.differences(peft.read_layout(stacked, shapes()), base)) == len(names)
    with_three = {key: (2, 8) if "lora_A" in key else (4, 2) for name in names[:3] for key in keys_of(name)[:2]}
    told = peft.differences(peft.read_layout(config, held({**with_three, **Q_PROJ})), base)
    assert [problem.partition(":")[0] for problem in told] == [names[3]]


def test_a_number_that_chooses_layers_may_also_be_that_of_an_expert():
    """Catches a file of one layer that is refused because its experts have other numbers than the layer."""
    names = [f"layers.{layer}.mlp.experts.{expert}.up_proj" for layer in (0, 1) for expert in (0, 1)]
    config = peft.AdapterConfig.from_json(CONFIG | {"target_modules": ["up_proj"], "layers_to_transform": [1]})
    of_layer_1 = {key: (2, 8) if "lora_A" in key else (4, 2) for name in names[2:] for key in keys_of(name)[:2]}
    assert (
        peft.differences(peft.read_layout(config, held(of_layer_1)), {f"{name}.weight": (4, 8) for name in names}) == []
    )


def test_a_head_that_is_tied_is_named_as_such():
    """Catches a merge that would change embedding and head at once, and a message that does not name the tie."""
    a, b, _ = keys_of("embed_tokens", "embedding")
    config = peft.AdapterConfig.from_json(CONFIG | {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]})
    layout = peft.read_layout(config, held({a: (2, 9), b: (8, 2), "base_model.model.lm_head.weight": (9, 8)}))
    told = peft.differences(layout, {"embed_tokens.weight": (9, 8)}, tied=True)
    assert len(told) == 2
    assert all("ties its head to its embedding" in problem for problem in told)


def test_names_are_as_short_as_they_may_be():
    # Catches target_modules and patterns that mean other layers to those who read them by the ends of names.
    every = ["a.0.q", "a.1.q", "a.0.k", "a.1.k"]
    assert shortest_names(["a.0.q", "a.1.q"], every) == ("q",)
    assert shortest_names(["a.0.q", "a.0.k", "a.1.k"], every) == ("a.0.q", "k")
    assert shared_value({"a.0.q": 8, "a.1.q": 8, "a.0.k": 4, "a.1.k": 2}) == (8, {"a.1.k": 2, "a.0.k": 4})


def test_folded_rows_do_not_depend_on_how_they_are_cut():
    # Catches rows of another part of B, or norms over part of a row.
    torch.manual_seed(0)
    weight = torch.randn(10, 6, dtype=torch.bfloat16)
    adapter = AdapterValues(torch.randn(2, 6), torch.randn(10, 2), torch.rand(10) + 1, 0.5)
    whole = fold(weight, adapter)
    assert whole.dtype == torch.float32
    assert torch.allclose(whole.norm(dim=1), adapter.magnitude, atol=1e-5)
    pieces = [fold(weight[start : start + 4], adapter, start=start) for start in (0, 4, 8)]
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=1e-6)
    turned = fold(weight.t(), adapter, transposed=True)
    torch.testing.assert_close(turned.t(), whole, rtol=0, atol=1e-5)


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.norm = nn.Embedding(9, 8), nn.BatchNorm1d(8)
        self.block, self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 9)

    def forward(self, ids):
        return self.head(self.block(self.norm(self.embed(ids))))


IDS = torch.arange(9)


@pytest.mark.parametrize(
    "spec",
    [
        AdapterSpec(2, 3, targets=("0",), modules_to_save=("head", "norm")),
        AdapterSpec(2, 3, targets=("0", "embed"), use_rslora=True, modules_to_save=("head",)),
        AdapterSpec(2, 3, targets=("0", "head"), use_dora=True),
    ],
)
def test_a_saved_folder_loads_into_another_model(spec, tmp_path):
    # Catches a trained weight or buffer that the folder lacks, or that is not read from it.
    model = Model()
    inject(model, spec)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model(IDS)  # changes the buffers of the norm, which belong to it
    peft.save_adapter(model, spec, tmp_path / "new" / "folder", base="org/base", task_type=None)
    other = Model()
    if "norm" not in spec.modules_to_save:
        other.norm.load_state_dict(model.norm.state_dict())
    loaded = peft.load_adapter(other, tmp_path / "new" / "folder")
    assert (loaded.rank, loaded.use_dora, set(loaded.modules_to_save)) == (2, spec.use_dora, set(spec.modules_to_save))
    torch.testing.assert_close(other.eval()(IDS), model.eval()(IDS), rtol=0, atol=1e-6)
    trained = {name for name, parameter in other.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_an_adapter_of_a_bank_is_saved(tmp_path):
    # Catches a folder without the adapter of a bank, whose parameters the model does not own.
    bank = AdapterBank(Model(), targets=("0", "head"), num_resident=1, max_rank=4, device="cpu")
    bank.add("a", AdapterSpec(2, targets=("0",)))
    peft.save_adapter(Model(), bank.spec("a"), tmp_path, task_type=None, found=bank.adapters("a"))
    assert peft.load_adapter(Model(), tmp_path).targets == ("block.0",)


def saved_folder(folder):
    model, spec = Model(), AdapterSpec(2, targets=("0",), modules_to_save=("head",))
    inject(model, spec)
    peft.save_adapter(model, spec, folder, task_type=None)
    return load_file(folder / peft.WEIGHTS_FILE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model.model.head.weight": torch.zeros(3, 8)}, r"head.weight: \[3, 8\] in the file, \[9, 8\] in the"),
        ({"base_model.model.head.scale": torch.zeros(3)}, "head.scale: the file has this tensor, and Model does not"),
        ({keys_of("block.0")[0]: torch.zeros(2, 5)}, "block.0: A and B are"),
    ],
)
def test_a_folder_that_does_not_fit_changes_nothing(changes, message, tmp_path):
    # Catches a tensor that is left out silently, a head that is replaced before an adapter is refused, and new adapters
    # and frozen weights in a model that loaded nothing.
    save_file({**saved_folder(tmp_path), **changes}, tmp_path / peft.WEIGHTS_FILE)
    model = Model(seed=1)
    model.norm.requires_grad_(False)
    modules = [type(module) for module in model.modules()]
    before = {name: (id(one), one.requires_grad, one.clone()) for name, one in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        peft.load_adapter(model, tmp_path)
    assert [type(module) for module in model.modules()] == modules
    assert [name for name, _ in model.named_parameters()] == list(before)
    for name, parameter in model.named_parameters():
        identity, is_trained, values = before[name]
        assert (id(parameter), parameter.requires_grad) == (identity, is_trained)
        assert torch.equal(parameter, values)


def test_a_parameter_that_is_trained_is_not_left_out(tmp_path):
    # Catches a trained weight that the folder does not have, because the spec is another one than was injected.
    model = Model()
    inject(model, AdapterSpec(2, targets=("0",), modules_to_save=("head",)))
    with pytest.raises(ValueError, match=r"spec: head.weight is trained, but modules_to_save does not name"):
        peft.save_adapter(model, AdapterSpec(2, targets=("0",)), tmp_path)


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    # Catches the error of a reader that does not say what the folder lacks.
    with pytest.raises(ValueError, match=f"holds no adapter in PEFT's format: it has no {peft.CONFIG_FILE}"):
        peft.load_adapter(Model(), tmp_path)
    (tmp_path / peft.CONFIG_FILE).write_text("{")
    (tmp_path / peft.WEIGHTS_FILE).write_text("no tensors")
    with pytest.raises(ValueError, match=f"folder: {tmp_path}: "):
        peft.load_adapter(Model(), tmp_path)


def test_tensors_of_the_base_and_scales_are_not_passed_over(tmp_path):
    # Catches a trained head that stays in the file, and adapters that are computed with another factor than trained.
    source = peft.InMemoryTensors(saved_folder(tmp_path))
    content = json.loads((tmp_path / peft.CONFIG_FILE).read_text())
    layout = peft.read_layout(peft.AdapterConfig.from_json(content), source)
    model = Model()
    inject(model, layout.spec)
    with pytest.raises(ValueError, match=r"tensors of the base, such as head.bias, .* use load_adapter"):
        peft.load_adapters(model, layout, source)
    for changes in ({"lora_alpha": 5}, {"use_rslora": True}):
        layout = peft.read_layout(peft.AdapterConfig.from_json(content | changes), source)
        with pytest.raises(ValueError, match=r"block.0: the adapter's scale is .* in the file, 8 in the model"):
            peft.load_adapters(model, layout, source, base_loaded=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": Model()}, r"model: Model has no adapters; call inject\(model, spec\) first"),
        ({"spec": {"rank": 2}}, "spec must be a xorl.lora.spec.AdapterSpec, got a dict"),
        ({"task_type": "CAUSALLM"}, "task_type: 'CAUSALLM' is not one of 'CAUSAL_LM'"),
        ({"form": "PEFT"}, "form: 'PEFT' is not one of 'per_expert', 'peft', 'sglang'"),
        ({"transposed": ("0",)}, "transposed: 0 is no module of Model; give full names"),
    ],
)
def test_what_cannot_be_described_is_refused(options, message):
    # Catches an error from inside, and a task that PEFT fails on when it reads the file.
    model, spec = Model(), AdapterSpec(2)
    inject(model, spec)
    with pytest.raises(ValueError, match=message):
        peft.config_of(**{"model": model, "spec": spec, "base": None, **options})


@pytest.mark.parametrize(("injected", "saved"), [("use_dora", None), (None, "use_dora"), ("use_rslora", None)])
def test_a_spec_of_other_adapters_is_not_saved(injected, saved, tmp_path):
    """Catches a file that PEFT loads with another formula than the adapters were trained with."""
    model, base = nn.Sequential(nn.Linear(8, 8)), AdapterSpec(4)
    inject(model, replace(base, **({injected: True} if injected else {})))
    with pytest.raises(ValueError, match=f"spec: {injected or saved} is "):
        peft.save_adapter(model, replace(base, **({saved: True} if saved else {})), tmp_path, task_type=None)


def test_a_model_without_memory_loads_no_adapter(tmp_path):
    """Catches values that vanish in a model on the meta device."""
    model, spec = nn.Sequential(nn.Linear(8, 8)), AdapterSpec(4)
    inject(model, spec)
    peft.save_adapter(model, spec, tmp_path, task_type=None)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="has parameters on the meta device"):
        peft.load_adapter(empty, tmp_path)
