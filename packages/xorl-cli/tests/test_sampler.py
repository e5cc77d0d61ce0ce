"""The sampler against the decoder without a cache: what it draws, when, and what it says of it."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from sampling import CAPPED, CPU, HF_CONFIG, MIXTURE, VOCAB, decode_apart, logits_of, make_sampler, place
from xorl.core.parallel import ParallelModel
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.linear_ce import linear_cross_entropy
from xorl.lora import AdapterBank, AdapterSpec
from xorl.server.sampler import EditRules, GenerationRequest, GenerationResult
from xorl.server.sampler.blocks import BlockPool, block_keys
from xorl.server.sampler.decode import DecodePass
from xorl.server.sampler.draw import DrawRule, draw, uniform_number
from xorl.server.sampler.scheduler import Continuation, SampleScheduler

pytestmark = pytest.mark.usefixtures("place")
PROMPT = tuple(range(3, 43))


@pytest.fixture(autouse=True, params=["in one pass", "decode apart"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is here holds whether samples that grow have passes of their own, as on a GPU, or not."""
    if request.param == "decode apart":
        decode_apart(monkeypatch)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> ParallelModel:
    return place(getattr(request, "param", HF_CONFIG))


with_a_cap = pytest.mark.parametrize(
    "model", [HF_CONFIG, MIXTURE, CAPPED], ids=["dense", "experts", "capped"], indirect=True
)


def logprobs_without_cache(model: ParallelModel, tokens: tuple[int, ...], temperature: float = 1.0) -> Tensor:
    """[T, V]: of what follows each token."""
    return (logits_of(model, tokens) / temperature).log_softmax(-1)


def prompts(lengths: list[int]) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(VOCAB, (length,), generator=generator).tolist()) for length in lengths]


@with_a_cap
def test_samples_are_what_the_whole_sequence_gives_again(model: ParallelModel) -> None:
    # Catches positions, windows, blocks or rows of the cache that are off by one, for prompts of all remainders, and
    # tokens of other sequences in an expert's rows.
    requests = [
        GenerationRequest(prompt, max_tokens=21, seed=index, temperature=0.7)
        for index, prompt in enumerate(prompts([1, 2, 15, 16, 17, 33, 50]))
    ]
    for request, result in zip(requests, make_sampler(model).run(requests), strict=True):
        (sample,) = result.samples
        assert len(sample.tokens) == 21
        assert sample.finish_reason == "length"
        logprobs = logprobs_without_cache(model, request.prompt + sample.tokens, 0.7)
        for index, token in enumerate(sample.tokens):
            row = logprobs[len(request.prompt) - 1 + index]
            assert sample.logprobs[index] == pytest.approx(row[token].item(), abs=1e-4)
            share = uniform_number(request.seed, index)
            sums = row.double().exp().cumsum(0)
            assert (sums[token - 1] if token else 0) - 1e-5 <= share <= sums[token] + 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_running": 2},
        {"max_step_tokens": 7},
        {"max_step_tokens": 1},
        # 9 blocks: a sample of 40 + 30 tokens needs 5, so others must give way and begin again.
        {"cache_tokens": 144, "max_running": 6},
    ],
    ids=str,
)
def test_what_else_is_generated_changes_nothing(model: ParallelModel, options: dict[str, int]) -> None:
    # Catches noise, blocks or rows shared by mistake, and samples that are not taken up again as they were left.
    requests = [
        GenerationRequest(prompt, max_tokens=30 - 3 * index, seed=index, num_samples=2, prompt_logprobs=index % 2 == 0)
        for index, prompt in enumerate(prompts([40, 3, 17, 32, 1]))
    ]
    alone = [make_sampler(model).run([request])[0] for request in requests]
    together = make_sampler(model, **options).run(requests)
    for one, other in zip(alone, together, strict=True):
        assert [sample.tokens for sample in one.samples] == [sample.tokens for sample in other.samples]
        for mine, theirs in zip(one.samples, other.samples, strict=True):
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)
        if one.prompt_logprobs is not None:
            assert other.prompt_logprobs is not None
            np.testing.assert_allclose(one.prompt_logprobs, other.prompt_logprobs, atol=1e-4)


def test_sample_i_has_the_seed_plus_i(model: ParallelModel) -> None:
    # Catches samples of one request that are all alike, or that depend on their number.
    [three] = make_sampler(model).run([GenerationRequest(PROMPT, 12, seed=7, num_samples=3)])
    singles = make_sampler(model).run([GenerationRequest(PROMPT, 12, seed=7 + index) for index in range(3)])
    assert [sample.tokens for sample in three.samples] == [single.samples[0].tokens for single in singles]
    assert len({sample.tokens for sample in three.samples}) == 3
    parts = ()
    for size in (1, 4, 7):  # a sample in parts draws on, and does not begin its random numbers again
        part = GenerationRequest((*PROMPT, *parts), size, seed=7, num_continued=len(parts))
        parts += make_sampler(model).run([part])[0].samples[0].tokens
    assert parts == three.samples[0].tokens


def test_requests_enter_and_leave_between_steps(model: ParallelModel) -> None:
    # Catches batches that are closed until their longest sample ends.
    sampler = make_sampler(model)
    long = sampler.submit(GenerationRequest(PROMPT, 20))
    for _ in range(5):
        assert sampler.step() == []
    short = sampler.submit(GenerationRequest(PROMPT[:5], 3))
    gone = sampler.submit(GenerationRequest(PROMPT[:5], 30))
    sampler.step()
    sampler.cancel(gone)
    finished = [result.request_id for result in itertools.chain.from_iterable(sampler.step() for _ in range(14))]
    assert finished == [short, long]
    assert sampler.num_pending == 0
    assert sampler.step() == []


@with_a_cap
def test_prompt_logprobs_are_the_trainers(model: ParallelModel) -> None:
    # Catches scores that are shifted, that miss places between passes, or that the cache hides.
    sampler = make_sampler(model, max_step_tokens=11)
    sampler.run([GenerationRequest(PROMPT, 1)])
    targets = np.array([[token, -1, (token + 1) % VOCAB] for token in PROMPT[1:]])
    request = GenerationRequest(PROMPT, 0, prompt_logprobs=True, top_prompt_logprobs=3, target_tokens=targets)
    [result] = sampler.run([request])
    labels = torch.tensor([*PROMPT[1:], -100])
    with torch.no_grad():
        _, wanted = model.module(
            torch.tensor(PROMPT),
            SequenceLayout.from_lengths([len(PROMPT)]),
            lambda hidden, weight: linear_cross_entropy(hidden, weight, labels),
        )
    assert result.samples == ()
    assert np.isnan(result.prompt_logprobs[0])
    np.testing.assert_allclose(result.prompt_logprobs[1:], wanted[:-1], atol=1e-4)
    everywhere = logprobs_without_cache(model, PROMPT)[:-1]
    values, token_ids = everywhere.topk(3)
    np.testing.assert_array_equal(result.top_prompt_logprobs.token_ids, token_ids)
    np.testing.assert_allclose(result.top_prompt_logprobs.logprobs, values, atol=1e-4)
    assert np.isnan(result.target_logprobs[:, 1]).all()
    for column in (0, 2):
        wanted_column = everywhere.gather(1, torch.tensor(targets[:, column : column + 1])).squeeze(1)
        np.testing.assert_allclose(result.target_logprobs[:, column], wanted_column, atol=1e-4)


def test_a_sample_ends_with_its_stop_sequence(model: ParallelModel) -> None:
    # Catches stop sequences that are cut off, missed across steps, or found in the prompt.
    [free] = make_sampler(model).run([GenerationRequest(PROMPT, 20, temperature=0)])
    tokens = free.samples[0].tokens
    stop = tokens[4:6]
    first = next(place for place in range(20) if tokens[place : place + 2] == stop)
    requests = [
        GenerationRequest(PROMPT, 20, temperature=0, stop=((VOCAB - 1,) * 9, stop)),
        GenerationRequest((*PROMPT, *tokens[: first + 1]), 1, temperature=0, stop=(stop,)),
        GenerationRequest(PROMPT, 20, temperature=0, is_end=lambda sampled: sum(sampled) > 150),
    ]
    ended, across, summed = make_sampler(model).run(requests)
    count = next(count for count in range(20) if sum(tokens[:count]) > 150)
    assert summed.samples[0].tokens == tokens[:count]
    assert ended.samples[0].tokens == tokens[: first + 2]
    assert ended.samples[0].finish_reason == "stop"
    assert across.samples[0].finish_reason == "length"


def test_top_sample_logprobs_are_before_truncation(model: ParallelModel) -> None:
    # Catches logprobs of the truncated distribution, and of one without its temperature.
    request = GenerationRequest(PROMPT, 8, temperature=1.7, top_k=2, top_sample_logprobs=4)
    [result] = make_sampler(model).run([request])
    sample = result.samples[0]
    rows = logprobs_without_cache(model, PROMPT + sample.tokens, 1.7)[len(PROMPT) - 1 : -1]
    values, token_ids = rows.topk(4)
    np.testing.assert_array_equal(sample.top_logprobs.token_ids, token_ids)
    np.testing.assert_allclose(sample.top_logprobs.logprobs, values, atol=1e-4)
    assert all(token in ids[:2] for token, ids in zip(sample.tokens, token_ids, strict=True))


def test_draws_have_the_distribution_that_the_rules_say() -> None:
    # Catches top_k and top_p in the wrong order, off by one, or over what is not ordered.
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.0, float("-inf")])
    for temperature, top_k, top_p in ((1.0, None, 1.0), (0.5, 3, 1.0), (2.0, None, 0.6), (1.0, 4, 0.7), (1.0, 1, 1.0)):
        weights = (logits / temperature).softmax(0).double()
        order = weights.sort(descending=True, stable=True).indices
        kept = torch.zeros(6, dtype=torch.bool)
        among = order[:top_k]
        total = 0.0
        for token in among:
            kept[token] = kept[token] or total < top_p * weights[among].sum() or total == 0
            total += weights[token].item()
        wanted = (weights * kept) / (weights * kept).sum()
        count = 4000
        rules = [DrawRule(temperature, top_k, top_p, (index + 0.5) / count) for index in range(count)]
        drawn = draw(logits.expand(count, -1).contiguous(), rules, 0)
        shares = torch.bincount(drawn.tokens, minlength=6) / count
        torch.testing.assert_close(shares.double(), wanted, atol=1e-3, rtol=0)
    numbers = [uniform_number(seed, place) for seed in range(-2, 40) for place in range(40)]
    assert 0 <= min(numbers) < 0.01
    assert 0.99 < max(numbers) < 1
    assert abs(np.mean(numbers) - 0.5) < 0.03
    greatest = draw(logits[None], [DrawRule(1.0, None, 1.0, 1 - 2**-53)], 0)
    assert greatest.tokens.item() == 4  # the last token with any weight


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-39, 1e-12, 1e-6])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, 1.0), (3, 0.5)])
def test_the_lowest_temperatures_are_greedy(temperature: float, top_k: int | None, top_p: float) -> None:
    """Catches a temperature that is zero in fp32, with which the last token of all came and no error."""
    logits = torch.tensor([[0.0, 40.0, 39.0, -1.0, 1e-3, float("-inf")]])
    drawn = draw(logits, [DrawRule(temperature, top_k, top_p, 0.9)], 6)
    assert drawn.tokens.item() == 1
    assert not drawn.logprobs.isnan().any()
    if temperature < 1e-6:
        greedy = draw(logits, [DrawRule(0.0, top_k, top_p, 0.9)], 6)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(drawn, greedy, strict=True))


def test_prompts_are_computed_once(model: ParallelModel) -> None:
    # Catches samples that do not share their prompt's blocks, and blocks that are shared when tokens or weights differ.
    sampler = make_sampler(model)
    seen: list[int] = []
    model.module.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    sampler.run([GenerationRequest(PROMPT, 1, num_samples=4)])
    assert seen == [40 + 3 * 8]  # two whole blocks of 16 are shared, at once
    [again] = sampler.run([GenerationRequest((*PROMPT[:20], 1, 1), 1)])
    assert again.num_cached_tokens == 16
    sampler.weights_changed(1)
    [after] = sampler.run([GenerationRequest(PROMPT, 1)])
    assert after.num_cached_tokens == 0
    assert after.samples[0].versions == (1, 1)


def test_changed_weights_are_used_from_the_next_token_on(model: ParallelModel) -> None:
    # Catches keys and values of the weights before, which would give tokens that no model gives.
    sampler = make_sampler(model)
    sampler.submit(GenerationRequest(PROMPT, 12, temperature=0))
    for _ in range(6):
        sampler.step()
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(1.1)
    sampler.weights_changed(5)
    finished = []
    while sampler.num_pending:
        finished += sampler.step()
    sample = finished[0].samples[0]
    assert sample.versions == (0, 5)
    prompt = PROMPT + sample.tokens[:6]
    [fresh] = make_sampler(model).run([GenerationRequest(prompt, 6, temperature=0)])
    assert sample.tokens[6:] == fresh.samples[0].tokens
    np.testing.assert_allclose(sample.logprobs[6:], fresh.samples[0].logprobs, atol=1e-4)


def test_adapters_are_mixed_in_a_step(model: ParallelModel) -> None:
    # Catches tokens computed with another request's adapter, or with the base, and blocks shared between adapters.
    bank = AdapterBank(model.module, num_resident=2, max_rank=4, device=CPU)
    for seed, name in enumerate("abc"):
        bank.add(name, AdapterSpec(rank=4, alpha=8), seed=seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for adapter in bank.adapters(name).values():
                adapter.B.copy_(torch.randn(adapter.B.shape, generator=generator))
    requests = [GenerationRequest(PROMPT, 9, temperature=0, adapter=name) for name in (None, "a", "b", "a", "c", None)]
    together = make_sampler(model, bank=bank).run(requests)
    alone = [make_sampler(model, bank=bank).run([request])[0] for request in requests]
    tokens = [result.samples[0].tokens for result in together]
    assert tokens == [result.samples[0].tokens for result in alone]
    assert len(set(tokens)) == 4
    assert not any(entry.has_gradient for entry in bank._entries.values())
    with pytest.raises(ValueError, match="no 'd'; there are 'a', 'b', 'c'"):
        make_sampler(model, bank=bank).submit(GenerationRequest(PROMPT, 1, adapter="d"))


def test_compiled_layers_are_not_compiled_again(model: ParallelModel) -> None:
    # Catches a compilation for each length of a sample, and one that takes what training compiled away.
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(1)
        return graph.forward

    compiled = place(compile_backend=backend)

    def train() -> None:
        layout = SequenceLayout.from_lengths([9, 4])
        compiled.module(torch.arange(13), layout).sum().backward()

    train()
    num_graphs = len(graphs)
    assert num_graphs
    [result] = make_sampler(compiled).run([GenerationRequest(PROMPT, 9)])
    train()
    assert len(graphs) == num_graphs
    [plain] = make_sampler(model).run([GenerationRequest(PROMPT, 9)])
    assert result.samples[0].tokens == plain.samples[0].tokens


def test_a_step_that_fails_leaves_no_trace(model: ParallelModel) -> None:
    # Catches blocks that are found again although what their names say was never computed.
    sampler = make_sampler(model)
    hook = model.module.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    sampler.submit(GenerationRequest(PROMPT, 6, seed=3))
    with pytest.raises(ZeroDivisionError):
        sampler.step()
    hook.remove()
    finished = [sampler.step() for _ in range(6)][-1]
    [plain] = make_sampler(model).run([GenerationRequest(PROMPT, 6, seed=3)])
    assert finished[0].samples[0].tokens == plain.samples[0].tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ()}, "prompt must be at least one token"),
        ({"max_tokens": 0}, "the prompt is not scored"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"stop": ((),)}, "stop must be sequences"),
        ({"target_tokens": np.zeros((2, 1), np.int64)}, r"target_tokens must be \[39, K\]"),
        ({"max_tokens": 300}, "maximum context length is 256 tokens. However, you requested 340"),
        ({"max_tokens": 100}, r"length is 128 tokens, which is what the cache holds \(sampler_cache_tokens\). However"),
        ({"prompt": (VOCAB,)}, "token 61 is outside the vocabulary of 61"),
        ({"top_sample_logprobs": 99}, "99 most likely tokens"),
        ({"adapter": "a"}, "there is no 'a'; there are none"),
        ({"edits": EditRules(bias={VOCAB: 1.0})}, "logit_bias: token 61"),
        ({"sample_routes": True}, "routed_experts: the model has no experts"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused(model: ParallelModel, changes: dict, message: str) -> None:
    # Catches requests that would fail in the middle of everyone's pass.
    sampler = make_sampler(model, cache_tokens=1024 if changes.get("max_tokens") == 300 else 128)
    with pytest.raises(ValueError, match=message):
        sampler.submit(GenerationRequest(**{"prompt": PROMPT, "max_tokens": 5, **changes}))


@pytest.mark.parametrize("cache_tokens", [1024, 128, 143])
def test_a_sample_fills_the_context_or_the_cache_to_its_last_token(model: ParallelModel, cache_tokens: int) -> None:
    """Catches a place kept for the last sampled token, which is never computed, and a limit with part of a block."""
    sampler = make_sampler(model, cache_tokens=cache_tokens)
    limit = sampler.limit
    assert limit == min(cache_tokens // 16 * 16, 256)
    (whole,) = prompts([limit])
    scored, full = sampler.run(
        [
            GenerationRequest(whole, 1, temperature=0, prompt_logprobs=True),
            GenerationRequest(PROMPT, limit - len(PROMPT) + 1, temperature=0),
        ]
    )
    everywhere = logprobs_without_cache(model, whole)
    np.testing.assert_allclose(
        scored.prompt_logprobs[1:], everywhere[range(limit - 1), whole[1:]], atol=1e-4, err_msg="of the prompt"
    )
    assert scored.samples[0].tokens == (int(everywhere[-1].argmax()),)
    tokens = full.samples[0].tokens
    assert len(PROMPT) + len(tokens) == limit + 1
    rows = logprobs_without_cache(model, PROMPT + tokens[:-1])[len(PROMPT) - 1 :]
    np.testing.assert_allclose(full.samples[0].logprobs, rows[range(len(tokens)), tokens], atol=1e-4)
    for prompt, max_tokens in ((whole, 2), ((*whole, 1), 0), ((*whole, 1), 1)):
        with pytest.raises(ValueError, match=f"maximum context length is {limit} tokens"):
            sampler.submit(GenerationRequest(prompt, max_tokens, prompt_logprobs=True))


def test_decode_spans_depend_on_no_other_span_of_the_step() -> None:
    # Catches the last token of a prompt, and one whose others are shared, which its neighbours may still have to write.
    scheduler = SampleScheduler(
        BlockPool(8, 4), max_running=4, max_tokens=6, max_adapters=0, root=lambda adapter: repr(adapter).encode()
    )
    request = GenerationRequest(tuple(range(9)), 6)
    first, second = (Continuation(index, 0, request, list(request.prompt), first_scored=None) for index in range(2))

    def step() -> list[tuple[int, int, int, bool]]:
        spans = scheduler.plan()
        for span in spans:
            span.continuation.num_cached = span.stop
            if span.is_last:
                span.continuation.tokens.append(7)
        return [(span.continuation.request_id, span.start, span.stop, span.is_decode) for span in spans]

    scheduler.add([first])
    assert [step(), step(), step()] == [[(0, 0, 6, False)], [(0, 6, 9, False)], [(0, 9, 10, True)]]
    scheduler.add([second])
    assert step() == [(0, 10, 11, True), (1, 8, 9, False)]
    scheduler.preempt(first)
    assert step() == [(1, 9, 10, True), (0, 8, 12, False)]
    assert step() == [(1, 10, 11, True), (0, 12, 13, True)]


def test_shares_are_the_request_s_own_samples(model: ParallelModel) -> None:
    # Catches shares that draw what others draw, in another order, or score the prompt each.
    request = GenerationRequest(PROMPT, 6, seed=4, num_samples=7, prompt_logprobs=True)
    shares = request.shares(3)
    assert [share.prompt_logprobs for share in shares] == [True, False, False]
    whole, joined = (make_sampler(model).run([request])[0], GenerationResult.of_shares(make_sampler(model).run(shares)))
    assert [sample.tokens for sample in whole.samples] == [sample.tokens for sample in joined.samples]
    np.testing.assert_allclose(joined.prompt_logprobs, whole.prompt_logprobs, atol=1e-5)
    assert GenerationRequest(PROMPT, 0, prompt_logprobs=True).shares(1)[0].prompt_logprobs


def test_blocks_are_reused_oldest_first_and_found_until_then() -> None:
    # Catches blocks that are found after they were overwritten, or taken while somebody uses them.
    pool = BlockPool(3, 2)
    keys = list(block_keys([1, 2, 3, 4, 5], 2, b"root"))
    assert len(keys) == 2
    assert keys != list(block_keys([1, 2, 3, 4], 2, b"other"))
    first, second = pool.allocate(), pool.allocate()
    pool.set_key(first, keys[0])
    pool.set_key(second, keys[1])
    pool.share([first])
    pool.release([first, second])
    assert pool.num_unused == 2
    assert pool.find(keys) == [first, second]
    pool.allocate()
    assert pool.find(keys) == [first, second]
    pool.allocate()
    assert pool.find(keys) == [first]
    assert pool.num_unused == 0
    pool.release([first])
    pool.allocate()
    assert pool.find(keys) == []


def test_looking_whether_a_pass_can_be_recorded_warns_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches a service that begins with torch's warning about a mode of its own, which nobody can act upon.
    def set_mode(mode: str) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: set_mode(mode) if mode == "error" else None)
    decode = object.__new__(DecodePass)
    monkeypatch.setattr(decode, "_pass", lambda num_rows, records: (None, None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode._recording_refusal(1, records=False) is None
