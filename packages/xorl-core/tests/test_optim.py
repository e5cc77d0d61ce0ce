"""Optimizers, clipping and optimizer state on one process."""

import math
import re
from itertools import accumulate, pairwise
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from xorl.core.nn.share import Share
from xorl.core.nn.tensor import TensorRanks
from xorl.core.optim import Fp32Accumulation, MuonOptions, build_optimizer, gradient_scale, scale_and_clip_
from xorl.core.optim.decay import LocalRows, undecayed
from xorl.core.optim.matrices import Division, Matrix, _joined, plan_rounds
from xorl.core.optim.muon import _MatrixStack, lr_ratio
from xorl.core.optim.newton_schulz import orthogonalisation_flops, orthogonalise
from xorl.kernels.layout import RankGroup


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))


OPTIMIZERS = ["adamw", "sgd", "anyprecision_adamw", "muon"]


def built(name: str, module: nn.Module, **options: object) -> torch.optim.Optimizer:
    """An optimizer; muon has the first layer's matrix as two of 1 and 2 rows, and the last one's."""
    muon = MuonOptions({"0.weight": (1, 2), "2.weight": (2,)}, lr=0.02) if name == "muon" else None
    options = {"lr": 0.1, "weight_decay": 0.1, "muon": muon, **options}
    return build_optimizer(name, module.named_parameters(), **options)


def with_gradients(module: nn.Module, scale: float = 1.0) -> nn.Module:
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter) * scale
    return module


def test_gradients_are_divided_once_then_clipped_by_one_norm() -> None:
    # Catches clipping before the division, and a norm per parameter.
    module = with_gradients(model(), 10.0)
    expected = [p.grad.clone() / 7 for p in module.parameters()]
    norm = torch.cat([g.flatten() for g in expected]).norm()
    assert norm > 1.0
    measured = scale_and_clip_(list(module.parameters()), torch.tensor(7.0), 1.0)
    torch.testing.assert_close(measured, norm)
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient / (norm + 1e-6))


@pytest.mark.parametrize("max_norm", [None, 0.0, 1e9])
def test_unclipped_gradients_are_only_divided(max_norm: float | None) -> None:
    # Catches a clip coefficient above one.
    module = with_gradients(model())
    expected = [p.grad.clone() / 2 for p in module.parameters()]
    scale_and_clip_(list(module.parameters()), 2.0, max_norm)
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scale_is_folded_into_the_step(name: str, dtype: torch.dtype) -> None:
    # Catches an optimizer, or a group of one, that steps with gradients that are neither divided nor clipped.
    folded, divided = model().to(dtype), model().to(dtype)
    for parameter, twin in zip(folded.parameters(), divided.parameters(), strict=True):
        # In fp32, so that the twin's division rounds nothing away that the folded one keeps.
        twin.grad_dtype = parameter.grad_dtype = torch.float32
        parameter.grad = torch.randn(parameter.shape) * 10
        twin.grad = parameter.grad.clone()
    optimizers = built(name, folded, state_dtype=torch.float32), built(name, divided, state_dtype=torch.float32)
    for _ in range(2):
        before = [parameter.grad.clone() for parameter in folded.parameters()]
        assert torch.cat([gradient.flatten() for gradient in before]).norm() > 7
        norm, optimizers[0].grad_scale = gradient_scale(list(folded.parameters()), torch.tensor(7.0), 1.0)
        torch.testing.assert_close([parameter.grad for parameter in folded.parameters()], before, rtol=0, atol=0)
        torch.testing.assert_close(scale_and_clip_(list(divided.parameters()), 7.0, 1.0), norm)
        for optimizer in optimizers:
            optimizer.step()
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-3}
        for parameter, twin in zip(folded.parameters(), divided.parameters(), strict=True):
            torch.testing.assert_close(parameter, twin, **tolerance)
            parameter.grad, twin.grad = parameter.data.float() * 9, parameter.data.float() * 9


def named_state(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, torch.Tensor]:
    states = ((name, optimizer.state[parameter]) for name, parameter in module.named_parameters())
    return {f"{name}.{key}": tensor for name, state in states for key, tensor in state.items()}


def test_states_of_adamw_are_those_of_torch() -> None:
    # Catches names, shapes or dtypes by which earlier checkpoints could no longer be resumed.
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = with_gradients(model().to(dtype)), with_gradients(model().to(dtype))
        optimizers = built("adamw", ours), torch.optim.AdamW(theirs.parameters(), fused=True)
        states = []
        for module, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.step()
            state = named_state(optimizer, module)
            states.append({name: (tensor.shape, tensor.dtype) for name, tensor in state.items()})
        assert states[0] == states[1]


def test_weight_decay_leaves_out_named_modules_and_parameters() -> None:
    # Catches norms and biases that are decayed although the options exclude them.
    module = model()
    optimizer = build_optimizer(
        "adamw", module.named_parameters(), lr=0.1, weight_decay=0.5, no_decay_modules=["1"], no_decay_params=["bias"]
    )
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    named = {name: decay[id(p)] for name, p in module.named_parameters()}
    assert named == {
        "0.weight": 0.5, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 0.5, "2.bias": 0.0,
    }  # fmt: skip


def test_parameters_without_weight_decay_are_named_as_the_tensors_that_they_stack() -> None:
    # Catches a parameter that is decayed because its name in checkpoints is another one.
    stacked = {"0.weight": [("a", 2), ("b", 1)], "1.weight": [("c", 3)]}
    optimizer = build_optimizer(
        "adamw", model().named_parameters(), lr=0.1, weight_decay=0.5, stacked=stacked, never_decayed=["0.weight"]
    )
    [free] = [group for group in optimizer.param_groups if not group["weight_decay"]]
    assert len(free["params"]) == 1


NAMES = [
    f"layers.{layer}.{leaf}"
    for layer in range(12)
    for leaf in (
        "input_layernorm.weight",
        "q_norm.weight",
        "v_proj.weight",
        "v_proj.bias",
        "mlp.gate.weight",
        "mlp.0.gate_proj.weight",
    )
] + ["norm.weight", "embed_tokens.weight"]


@pytest.mark.parametrize(
    ("entries", "leaves", "num_chosen"),
    [
        ({"modules": ["norm"]}, {"input_layernorm.weight", "q_norm.weight", "norm.weight"}, 25),
        ({"modules": ["gate"]}, {"mlp.gate.weight"}, 12),
        ({"modules": ["mlp.gate"]}, {"mlp.gate.weight"}, 12),
        ({"modules": ["mlp"]}, {"mlp.gate.weight", "mlp.0.gate_proj.weight"}, 24),
        ({"modules": ["embed"]}, {"embed_tokens.weight"}, 1),
        ({"modules": ["layers.1"], "params": ["ias"]}, None, 6 + 11),
        ({"params": ["bias"]}, {"v_proj.bias"}, 12),
    ],
)
def test_names_select_parts_that_end_with_them(entries: dict, leaves: set[str] | None, num_chosen: int) -> None:
    """Catches a router's name that frees all gate projections, and layer 1 that brings layers 10 and 11."""
    chosen = undecayed(NAMES, entries.get("modules", ()), entries.get("params", ()))
    assert len(chosen) == num_chosen
    if leaves is not None:
        assert {re.sub(r"^layers\.\d+\.", "", name) for name in chosen} == leaves


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("first", [0, 3])
def test_tensors_that_are_stacked_are_decayed_by_their_own_names(name: str, first: int) -> None:
    """Catches rows of q and k that lose their decay with v's, and ranks that count the rows of the whole parameter.

    Random bits of the rows are as without the option.
    """
    stacked = {"qkv.weight": [("q_proj.weight", 6), ("k_proj.weight", 4), ("v_proj.weight", 4), ("o.weight", 2)]}
    held = slice(first, 12)

    def stepped(**options: object) -> Tensor:
        torch.manual_seed(0)
        whole = torch.randn(16, 8)
        module = nn.ModuleDict({"qkv": nn.Linear(8, 12 - first, bias=False)})
        module["qkv"].weight.data = whole[held].clone()
        matrices = {"qkv.weight": (6 - first, 4, 2)}
        optimizer = build_optimizer(
            name,
            module.named_parameters(),
            lr=0.1,
            muon=MuonOptions(matrices) if name == "muon" else None,
            shares={"qkv.weight": Share(16, ((first, 12),))},
            stacked=stacked,
            **{"weight_decay": 0.5, **options},
        )
        module["qkv"].weight.grad = torch.randn(16, 8)[held].clone()
        optimizer.step()
        return module["qkv"].weight.detach()

    expected = stepped()
    expected[10 - first :] = stepped(weight_decay=0.0)[10 - first :]
    found = stepped(no_decay_modules=["v_proj"])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_unmatched_no_decay_name_is_an_error() -> None:
    # Catches a misspelt exclusion that is silently ignored.
    with pytest.raises(ValueError, match="nrom"):
        build_optimizer("adamw", model().named_parameters(), lr=0.1, weight_decay=0.1, no_decay_modules=["nrom"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_found_inf_skips_the_update_and_the_step_count(name: str) -> None:
    # Catches an optimizer that does not read the flag that guards against NaN.
    module = with_gradients(model())
    before = [p.detach().clone() for p in module.parameters()]
    optimizer = built(name, module)
    optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(1.0)
    for parameter in module.parameters():
        parameter.grad.fill_(float("nan"))
    optimizer.step()
    for parameter, value in zip(module.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=0)
    assert all(state["step"].item() == 0 for state in optimizer.state.values() if "step" in state)
    assert all(not state["exp_avg"].any() for state in optimizer.state.values() if "exp_avg" in state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "anyprecision_adamw", "muon"])
def test_state_is_created_without_changing_parameters_and_continues_to_the_bit(name: str, dtype: torch.dtype) -> None:
    # Catches a resumed optimizer whose moments, step counts or roundings differ from those of a run without a stop.
    module, twin = model().to(dtype), model().to(dtype)
    optimizer = built(name, module)
    for seed in range(3):
        torch.manual_seed(seed)
        with_gradients(module)
        optimizer.step()
        optimizer.zero_grad()
    saved = {name: tensor.clone() for name, tensor in named_state(optimizer, module).items()}
    assert saved["0.weight.step"] == 3

    twin.load_state_dict(module.state_dict())
    other = built(name, twin)
    other.materialise()
    state = named_state(other, twin)
    assert set(state) == set(saved)
    torch.testing.assert_close(dict(twin.state_dict()), dict(module.state_dict()), rtol=0, atol=0)
    for name, tensor in state.items():
        tensor.copy_(saved[name])
    for owner, owners_optimizer in ((module, optimizer), (twin, other)):
        torch.manual_seed(9)
        with_gradients(owner)
        owners_optimizer.step()
    torch.testing.assert_close(dict(twin.state_dict()), dict(module.state_dict()), rtol=0, atol=0)


def test_gradients_in_half_precision_are_divided_by_the_exact_number() -> None:
    # Catches a divisor that is rounded to bf16 first: 2**-1 times 1/3 is off by a thousandth in every element alike.
    module = with_gradients(model().bfloat16())
    before = torch.cat([p.grad.double().flatten() for p in module.parameters()])
    scale_and_clip_(list(module.parameters()), 3.0, None)
    after = torch.cat([p.grad.double().flatten() for p in module.parameters()])
    assert ((after * 3 - before) / before).abs().max() <= 2**-8
    torch.testing.assert_close((after @ before) / (before @ before), torch.tensor(1 / 3).double(), rtol=5e-4, atol=0)


def test_states_in_fp32_are_those_of_adamw() -> None:
    # Catches a bias correction, decay or epsilon in another place than torch's.
    module, twin = model(), model()
    ours, theirs = built("anyprecision_adamw", module, state_dtype=torch.float32), built("adamw", twin)
    for seed in range(5):
        for owner, optimizer in ((module, ours), (twin, theirs)):
            torch.manual_seed(seed)
            with_gradients(owner)
            optimizer.step()
    torch.testing.assert_close(dict(module.state_dict()), dict(twin.state_dict()), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("micro_batches", [1, 8, 512])
def test_gradients_of_half_precision_add_up_in_fp32(micro_batches: int) -> None:
    # Catches sums in bf16, which stand still at 256 equal terms and lose about their root's worth of bits before.
    layer = nn.Linear(64, 64, bias=False).bfloat16()
    accumulation = Fp32Accumulation(list(layer.parameters()))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(micro_batches, 4, 64, generator=generator).bfloat16()
    for rows in inputs:
        with accumulation.micro_batch():
            layer(rows).sum().backward()
    exact = inputs.double().sum(dim=(0, 1))
    error = ((layer.weight.grad.double() - exact) / exact).norm() / 64
    # Each micro-batch's gradient is rounded once, by up to 2**-8 of it, and independently of the others.
    assert error < 2**-8 / micro_batches**0.5
    assert layer.weight.grad.dtype == (torch.bfloat16 if micro_batches == 1 else torch.float32)


def test_orthogonalisation_is_that_of_torch_and_of_each_matrix() -> None:
    # Catches wrong coefficients, a norm over the batch, and a tall matrix worked on from its long side.
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 8, 20), (2, 20, 8), (1, 7, 7), (2, 1, 5)):
        batch = torch.randn(shape, generator=generator)
        together = orthogonalise(batch, 5)
        for matrix, result in zip(batch, together, strict=True):
            torch.testing.assert_close(result, orthogonalise(matrix[None], 5)[0])
            theirs = torch.optim._muon._zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
            assert (orthogonalise(matrix[None].bfloat16(), 5)[0] - theirs).norm() / theirs.norm() < 2e-2
            values = torch.linalg.svdvals(result)
            assert values.max() < 1.3
            assert values.median() > 0.6
    assert not orthogonalise(torch.zeros(1, 3, 4), 5).any()


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_that_of_torch_on_each_logical_matrix(adjust_lr: str, nesterov: bool) -> None:
    # Catches momentum, decay or learning rate that are not torch's, and matrices that are orthogonalised as one.
    torch.manual_seed(0)
    fused, other = nn.Parameter(torch.randn(40, 24)), nn.Parameter(torch.randn(24, 40))
    parts = [nn.Parameter(part.clone()) for part in (*fused.detach().split([8, 32]), other.detach())]
    options = MuonOptions(
        {"fused": (8, 32), "other": (24,)}, lr=0.05, momentum=0.9, nesterov=nesterov, adjust_lr=adjust_lr
    )
    named = [("fused", fused), ("other", other)]
    ours = build_optimizer("muon", named, lr=0.1, weight_decay=0.5, state_dtype=torch.float32, muon=options)
    theirs = torch.optim.Muon(parts, lr=0.05, weight_decay=0.5, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjust_lr)
    start = torch.cat([part.detach().flatten() for part in parts])
    assert [group["lr_scale"] for group in ours.param_groups] == [0.5]
    for group in ours.param_groups:
        group["lr"] = 0.1 * group["lr_scale"]
    for _ in range(3):
        fused.grad, other.grad = torch.randn_like(fused), torch.randn_like(other)
        for part, gradient in zip(parts, (*fused.grad.split([8, 32]), other.grad), strict=True):
            part.grad = gradient.clone()
        ours.step()
        theirs.step()
    moved = torch.cat([fused.detach().flatten(), other.detach().flatten()]) - start
    expected = torch.cat([part.detach().flatten() for part in parts]) - start
    # torch iterates in bf16, and what is between the singular values' 0.7 and 1.2 depends on that.
    assert (moved - expected).norm() / expected.norm() < 2e-2


def test_learning_rates_of_matrices_follow_their_shape() -> None:
    # Catches rows and columns that are swapped.
    assert [lr_ratio("original", *shape) for shape in ((4, 16), (16, 4), (5, 5))] == [1.0, 2.0, 1.0]
    assert [lr_ratio("match_rms_adamw", *shape) for shape in ((4, 16), (16, 4))] == [0.8, 0.8]


def test_only_named_matrices_are_orthogonalised() -> None:
    # Catches embeddings, heads, norms or biases in muon's hands, and a rate of their own that reaches the others.
    module = model()
    optimizer = built("muon", module)
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = {
        names[parameter]: (round(group["lr_scale"], 6), "matrices" in group)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert groups == {
        name: (0.2, True) if name in ("0.weight", "2.weight") else (1.0, False) for name in names.values()
    }


def test_matrices_are_shared_out_evenly_in_bounded_batches() -> None:
    # Catches a rank with twice the work of another, a matrix that nobody or two ranks work on, and batches that do not
    # fit into memory. The shapes are those of 36 layers of Qwen3-8B, on 2 x 4 ranks.
    stacked = [(6144, 4096, (4096, 1024, 1024)), (4096, 4096, (4096,)), (24576, 4096, (12288, 12288))]
    matrices = []
    for index in range(36 * 4):
        rows, columns, counts = [*stacked, (4096, 12288, (4096,))][index % 4]
        division = Division(rows, columns, num_chunks=4)
        matrices += [Matrix(index, division, *ends) for ends in pairwise([0, *accumulate(counts)])]
    rounds = plan_rounds(matrices, 2, 4, batch_elements=1 << 27)
    work: dict[tuple[int, int], int] = dict.fromkeys(rounds[0], 0)
    for batches in rounds:
        for owner, batch in batches.items():
            assert len({matrix.shape for matrix in batch}) <= 1
            assert sum(rows * columns for rows, columns in (matrix.shape for matrix in batch)) <= 1 << 27
            work[owner] += sum(orthogonalisation_flops(*matrix.shape, 5) for matrix in batch)
    shared = [matrix for batches in rounds for batch in batches.values() for matrix in batch]
    assert len(shared) == len(matrices)
    assert set(shared) == set(matrices)
    assert len(work) == 8
    assert sum(work.values()) == pytest.approx(475e12, rel=0.02)
    assert max(work.values()) < 1.05 * sum(work.values()) / 8
    assert len(rounds) < 30


def test_experts_stay_on_the_ranks_that_hold_them() -> None:
    # Catches experts that are sent to another rank and back, replicas that all do the same work, and one call for each
    # expert in place of one for each parameter.
    stacks = [(256 * 768, 2048, 768), (128 * 2048, 768, 2048)]
    matrices = [
        Matrix(index, Division(num_rows, columns, num_chunks=4), start, start + rows)
        for index, (num_rows, columns, rows) in enumerate(stacks)
        for start in range(0, num_rows, rows)
    ]
    rounds = plan_rounds(matrices, 2, 4, batch_elements=1 << 40)
    for (_, shard), batch in [item for batches in rounds for item in batches.items()]:
        assert {matrix.division.holder(matrix.start, matrix.stop) for matrix in batch} == {shard}
        assert len(batch) * 8 in (128, 256)
        assert len(_joined(batch)) == 1
    assert {matrix for batches in rounds for batch in batches.values() for matrix in batch} == set(matrices)


def shares_of_ranks(kind: str, num_ranks: int) -> tuple[Share | None, ...]:
    """What ranks hold of a parameter of 10 x 6 that stacks matrices of 3 and 7 rows; `copies`: two hold the same."""
    all_ranks = [TensorRanks(RankGroup(rank, num_ranks, "")) for rank in range(num_ranks)]
    return {
        "whole": (None,),
        "rows": tuple(ranks.rows_of([3, 7]) for ranks in all_ranks),
        "columns": tuple(ranks.columns_of(10, 6) for ranks in all_ranks),
        "copies": tuple(ranks.rows_of([3, 7]) for ranks in all_ranks for _ in range(2)),
    }[kind]


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", ["whole", "rows", "columns", "copies"])
def test_every_element_of_a_matrix_is_held_and_sent_by_one_shard(kind: str, num_chunks: int) -> None:
    # Catches elements that two shards send or none, where ranks do not divide them, and a place in the neighbour.
    for num_ranks in (1,) if kind == "whole" else (2, 3):
        division = Division(10, 6, shares_of_ranks(kind, num_ranks), num_chunks)
        for start, stop in ((0, 3), (3, 10)):
            matrix = Matrix(0, division, start, stop)
            sent, held = torch.zeros(matrix.shape), torch.zeros(matrix.shape)
            for shard in range(num_chunks * len(division.shares)):
                boxes = list(division.boxes(start, stop, shard))
                assert sum(math.prod(box.shape) for box in boxes) == matrix.size_on(shard)
                assert matrix.size_from(shard) == (0 if matrix.is_copy(shard) else matrix.size_on(shard))
                for box in boxes:
                    box.cut(held).add_(1)
                    box.cut(sent).add_(not matrix.is_copy(shard))
            assert (sent == 1).all()
            assert (held == (2 if kind == "copies" else 1)).all()


@pytest.mark.parametrize("name", ["adamw", "anyprecision_adamw", "sgd"])
def test_half_precision_parameters_step_after_several_micro_batches(name: str) -> None:
    # Catches gradients accumulated in fp32 that the optimizer cannot take, in this step or in the one after.
    parameter = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = build_optimizer(name, [("weight", parameter)], lr=0.1, weight_decay=0.0)
    accumulation = Fp32Accumulation([parameter])
    for _ in range(2):
        for _ in range(3):
            with accumulation.micro_batch():
                (parameter * 2).sum().backward()
        assert parameter.grad is not None
        assert parameter.grad.float().tolist() == [6.0] * 8
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert (parameter < 1).all()


def test_the_noise_of_a_row_is_that_of_its_place_in_the_whole_weight() -> None:
    """Catches rounding under Muon that depends on which rows a rank holds."""
    rows = [LocalRows(range(4), first=30, columns=(3, 3), decay=None)]
    state, group = {"step": torch.zeros(())}, {"weight_decay": 0.0}
    held = _MatrixStack(torch.zeros(4, 3), state, (4,), (None,), key=7, local_rows=rows, group=group)
    assert [noise.first for row in range(4) for _, _, noise in held.parts(row, 4)] == [30, 33, 36, 39]


def test_a_stage_has_the_weight_decay_of_the_whole_model() -> None:
    # Catches an entry that selects by a part of a name, because the names that end with it are on another stage.
    names = ["layers.0.att.weight", "layers.1.attn.weight"]
    for own in ([names[0]], [names[1]], []):
        named = [(name, torch.nn.Parameter(torch.ones(2, 2))) for name in own]
        optimizer = build_optimizer("adamw", named, lr=0.1, weight_decay=0.5, no_decay_modules=["att"], all_names=names)
        decays = [group["weight_decay"] for group in optimizer.param_groups for _ in group["params"]]
        assert decays == [0.0 if name == names[0] else 0.5 for name in own]


def test_a_stage_without_gradients_adds_up_where_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches a sum of norms on the host of a stage that trains nothing, for which the GPUs of the others wait.
    reduced: list[str] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: reduced.append(tensor.device.type))
    stages = cast(dist.ProcessGroup, object())
    norm, scale = gradient_scale([], 2.0, 1.0, stages=stages, device=torch.device("meta"))
    assert [*reduced, norm.device.type, scale.device.type] == ["meta"] * 3


def test_groups_say_what_may_have_weight_decay_if_there_is_none_yet() -> None:
    # Catches a decay that is set later, as clients of the service do, on parameters that must have none.
    optimizer = build_optimizer("adamw", model().named_parameters(), lr=0.1, weight_decay=0.0, never_decayed=["1.bias"])
    assert [(group["decays"], len(group["params"])) for group in optimizer.param_groups] == [(True, 5), (False, 1)]
