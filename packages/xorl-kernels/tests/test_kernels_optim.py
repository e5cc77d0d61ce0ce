"""Optimizer updates: the random bits, rounding by them, and the Triton kernels against their plain twins."""

import os
import subprocess
import sys
from itertools import product

import pytest
import torch
from torch import Tensor

from xorl.kernels import optim
from xorl.kernels.optim.noise import draw

HYPER = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
DTYPES = [torch.float32, torch.bfloat16]
# Odd, of several blocks of the kernels, and across the index at which the counter's upper half begins.
COUNT = 3001
FIRST = 2**32 - 1500
# All elements follow each other; or they are 100 of the 1,000 columns of a matrix.
COLUMNS = ((0, 0), (100, 1000))


def noise(step: int = 7, key: int = 12345, first: int = FIRST) -> optim.Noise:
    return optim.Noise(key, first, torch.tensor(step))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ],
)
def test_random_words_are_those_of_philox(counter: tuple[int, int], key: int, words: tuple[int, int]) -> None:
    # Catches a wrong constant or carry, after which nothing is known of the bits' quality. Known answers of Random123.
    low, high = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in optim.philox2x32(low, high, key, num_rounds=10)) == words


def test_bits_differ_by_element_step_and_key_and_not_by_the_cut() -> None:
    # Catches parameters, steps or shards that draw the same bits, and shards that draw others than the whole.
    whole = torch.stack(draw(noise(), 0, 4096))
    assert whole.unique().numel() > 8180
    torch.testing.assert_close(torch.stack(draw(noise(first=FIRST + 1000), 0, 96)), whole[:, 1000:1096], rtol=0, atol=0)
    rows = torch.stack(draw(optim.Noise(12345, FIRST, torch.tensor(7), 100, 1000), 150, 300))
    in_rows = [whole[:, 1050:1100], whole[:, 2000:2100], whole[:, 3000:3100], whole[:, 4000:4050]]
    torch.testing.assert_close(rows, torch.cat(in_rows, dim=1), rtol=0, atol=0)
    streams = [whole[0], whole[1], draw(noise(step=8), 0, 4096)[0], draw(noise(key=12346), 0, 4096)[0]]
    halves = [half for words in streams for half in (words & 0xFFFF, words >> 16)]
    table = torch.stack(halves).double()
    assert (table.mean(dim=1) / 65535 - 0.5).abs().max() < 4 * (1 / 12 / 4096) ** 0.5
    assert (table.corrcoef() - torch.eye(len(halves))).abs().max() < 5 / 4096**0.5


@pytest.mark.parametrize("value", [1.001, -3.1415927, 1e-20, 65504.3])
def test_rounding_is_unbiased(value: float) -> None:
    # Catches rounding that drifts: to nearest, towards zero, or with odds that are off.
    count = 1 << 16
    values = torch.full((count,), value)
    rounded = optim.round_stochastically(values, draw(noise(), 0, count)[0] & 0xFFFF).double()
    below, above = rounded.min(), rounded.max()
    assert (above - below) / abs(value) < 2**-7
    share = (value - below) / (above - below)
    deviation = (above - below) * (share * (1 - share) / count) ** 0.5
    assert abs(rounded.mean() - values[0].double()) < 4 * deviation


def test_what_bf16_holds_is_kept() -> None:
    # Catches weights that move without an update, and a NaN or an infinity that turns into a number.
    held = torch.tensor([0.0, 1.0, -2.5, float("inf"), -float("inf"), float("nan")])
    for bits in (0, 1, 0xFFFF):
        rounded = optim.round_stochastically(held, torch.full((6,), bits))
        torch.testing.assert_close(rounded.float(), held, rtol=0, atol=0, equal_nan=True)


def test_small_updates_of_bf16_weights_add_up() -> None:
    # Catches rounding to nearest, under which a weight of 1 never moves by 1e-4.
    param, grad = torch.ones(2000, dtype=torch.bfloat16), torch.ones(2000)
    state = [torch.zeros(2000, dtype=torch.bfloat16) for _ in range(2)]
    options = {**HYPER, "lr": 1e-4, "weight_decay": 0.0, "grad_scale": None, "skip": torch.zeros(())}
    for step in range(1, 101):
        lists = [[tensor] for tensor in (param, grad, *state, torch.tensor(step))]
        optim.adamw_(*lists, **options, noises=[noise(step)])
    assert param.float().mean() == pytest.approx(1 - 100e-4, abs=4e-4)
    assert state[1].float().mean() == pytest.approx(1 - 0.999**100, rel=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_decay_below_the_resolution_of_fp32_is_kept_in_the_mean(dtype: torch.dtype) -> None:
    # Catches a factor of 1 - decay, which in fp32 is 1 for a decay of 1e-8: the decay has to be part of the update.
    count, num_steps, decay = 1 << 16, 20, 1e-8
    generator = torch.Generator().manual_seed(3)
    start = 1 + torch.rand(count, generator=generator)
    grads = torch.randn(num_steps, count, generator=generator)
    off = torch.zeros(())
    weights: dict[str, list[Tensor]] = {"adamw_": [], "descend_": []}
    for each in (decay, 0.0):
        by_adamw, by_descent, *state = (
            start.clone(),
            start.clone(),
            *(torch.zeros(count, dtype=dtype) for _ in range(2)),
        )
        options = {**HYPER, "lr": 1e-4, "weight_decay": each * 1e4, "grad_scale": None, "skip": off}
        for step, grad in enumerate(grads):
            drawn = noise(step)
            lists = [[tensor] for tensor in (by_adamw, grad, *state)]
            optim.reference.adamw_(*lists, **options, corrections=torch.ones(1, 2), noises=[drawn])
            optim.descend_(by_descent, grad, decay=each, rate=1e-4, grad_scale=None, skip=off, noise=drawn)
        for name, found in (("adamw_", by_adamw), ("descend_", by_descent)):
            weights[name].append(found.double())
    for name, (decayed, kept) in weights.items():
        assert ((kept - decayed) / start).mean().item() == pytest.approx(num_steps * decay, rel=0.1), name


def cases() -> list[tuple[str, list[Tensor], dict[str, object]]]:
    """(name, tensors, options) of calls of the kernels of one tensor, in every combination of dtypes."""
    made: list[tuple[str, list[Tensor], dict[str, object]]] = []
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(COUNT, generator=generator) for _ in range(3))
    scaled = {"grad_scale": torch.tensor(3.0), "skip": torch.zeros(()), "noise": noise()}
    for first in DTYPES:
        for second in DTYPES:
            for third in DTYPES:
                for nesterov in (False, True):
                    options = {"momentum": 0.95, "nesterov": nesterov, **scaled}
                    made.append(("momentum_", [a.to(first), b.to(second), c.to(third)], options))
            made.append(("descend_", [a.to(first), b.to(second)], {"decay": 0.01, "rate": 0.02, **scaled}))
            # Far less than fp32 resolves, so that the noise decides about what is lost.
            made.append(("descend_", [a.to(first), b.to(second)], {"decay": 1e-8, "rate": 1e-9, **scaled}))
            plain = {**scaled, "noise": None}
            made.append(("descend_", [a.to(first), b.to(second)], {"decay": 0.01, "rate": 0.02, **plain}))
    unscaled = {**scaled, "grad_scale": None}
    made.append(("momentum_", [a.clone(), b, None], {"momentum": 0.95, "nesterov": True, **unscaled}))
    return made


def assert_kernels_match(kernels: object, device: str = "cpu") -> None:
    """Each kernel gives its twin's results: fp32 to rounding, bf16 to the same random decision but for ties of it."""
    for number, (name, tensors, options) in enumerate(cases()):
        options = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in options.items()}
        if options["noise"] is not None:
            options["noise"] = optim.Noise(12345, FIRST, torch.tensor(7, device=device), *COLUMNS[number % 2])
        wanted, got, untouched = (
            [None if tensor is None else tensor.clone().to(device) for tensor in tensors] for _ in range(3)
        )
        getattr(optim.reference, name)(*wanted, **options)
        getattr(kernels, name)(*got, **options)
        getattr(kernels, name)(*untouched, **{**options, "skip": torch.ones((), device=device)})
        for index, before in enumerate(tensors):
            if before is None:
                continue
            where = f"{name} tensor {index} {before.dtype}"
            # Triton's interpreter cuts where the GPU rounds to nearest: only what we round ourselves is alike.
            is_cut = (name, index) == ("momentum_", 2) or options["noise"] is None
            assert_alike(got[index], wanted[index], where, is_cut=is_cut)
            assert untouched[index].cpu().equal(before), f"{where} is changed by a step that is skipped"


def assert_alike(got: Tensor, wanted: Tensor, where: str, *, is_cut: bool) -> None:
    if wanted.dtype == torch.bfloat16:
        assert is_cut or (got != wanted).sum() <= 2e-3 * wanted.numel(), where
        torch.testing.assert_close(got.float(), wanted.float(), rtol=2**-7, atol=1e-6, msg=where)
    else:
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=1e-6, msg=where)


# A chunk and a part of a second, none, less than a block, and one that begins where no wide load can.
LENGTHS = ((1 << 14) + 1027, 0, 5, 3001)
KINDS = [kind for kind in product(DTYPES, repeat=4) if kind[2] == kind[3]]


def adamw_lists(dtypes: tuple[torch.dtype, ...], device: str) -> list[list[Tensor]]:
    """Parameters, gradients and both states of `LENGTHS`; the last of each begins one element into its memory."""
    generator = torch.Generator().manual_seed(1)
    lists: list[list[Tensor]] = []
    for index, dtype in enumerate(dtypes):
        values = [torch.randn(length + 1, generator=generator) for length in LENGTHS]
        values = [(value.abs() if index == 3 else value).to(device, dtype) for value in values]
        lists.append([*(value[:-1] for value in values[:-1]), values[-1][1:]])
    return lists


def assert_lists_match(kernels: object, device: str = "cpu") -> None:
    """One call for all tensors does what its twin does to each, and the sum of squares is that of all."""
    # The interpreter is slow; a GPU goes through every kind.
    for number, dtypes in enumerate(KINDS):
        for is_random, scale in ((True, None), (False, 3.0)):
            if device == "cpu" and is_random == bool(number % 2):
                continue
            step = torch.tensor(7, device=device)
            noises = [
                optim.Noise(12345 + index, FIRST + index, step, *COLUMNS[index // 2]) for index in range(len(LENGTHS))
            ]
            options = {
                **HYPER,
                "corrections": torch.rand(len(LENGTHS), 2, generator=torch.Generator().manual_seed(2)).to(device),
                "grad_scale": None if scale is None else torch.tensor(scale, device=device),
                "noises": noises if is_random else None,
            }
            wanted, got, untouched = (adamw_lists(dtypes, device) for _ in range(3))
            off, on = (torch.full((), flag, device=device) for flag in (0.0, 1.0))
            optim.reference.adamw_(*wanted, **options, skip=off)
            kernels.adamw_(*got, **options, skip=off)
            kernels.adamw_(*untouched, **options, skip=on)
            for name, left, right, kept, before in zip(
                ("param", "grad", "mean", "square"), got, wanted, untouched, adamw_lists(dtypes, device), strict=True
            ):
                for index in range(len(LENGTHS)):
                    where = f"{name} {index} of {dtypes}, random {is_random}"
                    assert_alike(left[index], right[index], where, is_cut=not is_random)
                    assert kept[index].equal(before[index]), f"{where} is changed by a step that is skipped"
        for tensors in adamw_lists(dtypes, device)[:2]:
            exact = sum(float(tensor.double().square().sum()) for tensor in tensors)
            assert kernels.square_sum(tensors).item() == pytest.approx(exact, rel=1e-6)


def assert_scaling_matches(kernels: object, device: str = "cpu") -> None:
    for dtype in DTYPES:
        values = torch.randn(COUNT, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        wanted, got, factor = values.clone(), values.clone(), torch.tensor(1 / 3, device=device)
        optim.reference.scale_(wanted, factor)
        kernels.scale_(got, factor)
        # The interpreter cuts what the GPU rounds to nearest.
        torch.testing.assert_close(got, wanted, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=0)


def assert_symmetric_products_match(dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
    """Of matrices in rows and in columns, smaller than a tile, of several, and with tiles cut by the end."""
    # The interpreter is slow; a GPU has the tiles that are measured.
    block, scale = ((16, 32, 16), 1) if device == "cpu" else ((128, 256, 64), 8)
    generator = torch.Generator().manual_seed(0)
    for (count, rows, summed), in_rows in product(((1, 8, 40), (2, 72, 24), (1, 96, 32)), (True, False)):
        shape = (rows, summed) if in_rows else (summed, rows)
        x = torch.randn(count, *(scale * size for size in shape), generator=generator).to(device, dtype)
        x = x if in_rows else x.mT
        added = torch.randn(count, scale * rows, scale * rows, generator=generator).to(device, dtype)
        added = added + added.mT
        for term, alpha, beta in ((None, 1.0, 1.0), (added, 2.0, -0.5)):
            got = triton_symmetric.symmetric_product(x, term, alpha=alpha, beta=beta, block=block)
            wide = optim.symmetric.reference(
                x.double(), None if term is None else term.double(), alpha=alpha, beta=beta
            )
            where = f"{list(x.shape)} in rows {in_rows} added {term is not None}"
            tolerance = 1e-5 if dtype == torch.float32 else 2**-8
            assert (got.double() - wide).norm() <= tolerance * wide.norm(), where
            assert torch.equal(got, got.mT), where


def test_triton_kernels_match_their_twins() -> None:
    # Catches an error in a kernel's arithmetic, masks or random bits; through Triton's interpreter.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]


def test_only_what_the_copy_engine_reads_goes_to_the_kernel() -> None:
    # Catches strides that it refuses at launch: of rows that do not begin at 16 bytes, also where a row is one element.
    half = torch.zeros(2, 64, 40, dtype=torch.bfloat16)
    assert optim.symmetric._is_supported(half)
    assert optim.symmetric._is_supported(half.mT)
    for x in (half[:, :, :36], half[:, :, :1].contiguous(), half[:, :36].mT.contiguous(), half[:, :, 1:].contiguous()):
        assert not optim.symmetric._is_supported(x), x.shape


@pytest.mark.parametrize(
    ("name", "count", "options"),
    [("momentum_", 3, {"momentum": 0.9, "nesterov": True}), ("descend_", 2, {"decay": 0.0, "rate": 0.1})],
)
def test_empty_shards_and_skipped_steps_change_nothing(name: str, count: int, options: dict[str, object]) -> None:
    # Catches a launch of no blocks, and weights that a step which is to be skipped poisons.
    function = {"momentum_": optim.momentum_, "descend_": optim.descend_}[name]
    for size, skip in ((0, 0.0), (5, 1.0)):
        tensors = [torch.full((size,), float("nan")), *(torch.ones(size) for _ in range(count - 1))]
        before = [tensor.clone() for tensor in tensors]
        function(*tensors, **options, grad_scale=None, skip=torch.tensor(skip), noise=noise())
        torch.testing.assert_close(tensors, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("is_random", [True, False])
def test_adamw_of_empty_shards_and_skipped_steps_changes_nothing(is_random: bool) -> None:
    # Catches a list whose noises no longer belong to its tensors once empty shards are left out.
    for sizes, skip in (((0, 0), 0.0), ((0, 5), 1.0), ((0, 5), 0.0)):
        lists = [[torch.full((size,), float("nan") if skip else 1.0) for size in sizes] for _ in range(4)]
        before = [[tensor.clone() for tensor in tensors] for tensors in lists]
        steps = [torch.ones((), dtype=torch.int64 if is_random else torch.float32) for _ in sizes]
        noises = [noise(), noise()] if is_random else None
        optim.adamw_(*lists, steps, **HYPER, grad_scale=None, skip=torch.tensor(skip), noises=noises)
        changes = sum(sizes) > 0 and not skip
        assert lists[0][1].equal(before[0][1]) == (not changes) or bool(skip)
        if not changes:
            torch.testing.assert_close(lists, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", ["chosen", "plain"])
def test_adamw_is_that_of_torch(dtype: torch.dtype, implementation: str) -> None:
    # Catches a bias correction, decay, epsilon or gradient scale in another place than torch's, which runs in fp64.
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1000, generator=generator).to(dtype)
    twin = torch.nn.Parameter(start.double())
    theirs = torch.optim.AdamW([twin], **HYPER)
    ours = [start.clone(), torch.zeros(1000), torch.zeros(1000)]
    if implementation == "chosen":
        ours = [start.clone(), torch.zeros_like(start), torch.zeros_like(start)]
    for step in range(1, 6):
        gradient = torch.randn(1000, generator=generator).to(dtype)
        twin.grad = gradient.double() / 3
        theirs.step()
        lists = [[ours[0]], [gradient.clone()], [ours[1]], [ours[2]]]
        options = {**HYPER, "grad_scale": torch.tensor(3.0), "skip": torch.zeros(()), "noises": None}
        if implementation == "chosen":
            optim.adamw_(*lists, [torch.tensor(float(step))], **options)
        else:
            corrections = torch.tensor([[1 - 0.9**step, 1 - 0.999**step]])
            optim.reference.adamw_(*lists, corrections=corrections, **options)
    # Rounding five updates of a hundredth to the last place of bf16 is up to half of 2**-7 of each value a step.
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2e-2}
    torch.testing.assert_close(ours[0].double(), twin.detach(), **tolerance)


if __name__ == "__main__":
    from xorl.kernels.optim import triton_lists, triton_symmetric, triton_updates

    assert_kernels_match(triton_updates, *sys.argv[1:])
    assert_lists_match(triton_lists, *sys.argv[1:])
    assert_scaling_matches(triton_updates, *sys.argv[1:])
    if sys.argv[1:]:
        assert_symmetric_products_match(torch.bfloat16, *sys.argv[1:])
        assert_symmetric_products_match(torch.float16, *sys.argv[1:])
    else:
        assert_symmetric_products_match()
