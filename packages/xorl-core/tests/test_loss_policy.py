"""Losses of the table against their definitions, on full logits in fp64, document by document."""

import math
from itertools import accumulate, pairwise

import pytest
import torch

from xorl.core.loss import IGNORE, LOSSES, combine_metrics, get_loss, read_metrics
from xorl.core.loss.metrics import empty_metrics, metrics_between
from xorl.core.loss.policy import MAX_LOG_RATIO
from xorl.core.loss.table import check_inputs
from xorl.kernels.head import HeadWeight, LogitOptions
from xorl.kernels.layout import SequenceLayout

LENGTHS = (25, 1, 34, 7)
DRIFTS = (-0.4, 0.0, 0.4, 0.0)  # of whole documents, so that their ratios are clipped too
ENDS = [0, *accumulate(LENGTHS)]
NUM_TOKENS, NUM_LABELS = ENDS[-1], ENDS[-2]
VOCAB, WIDTH = 23, 8
LAYOUT = SequenceLayout.from_lengths(LENGTHS)


def make_inputs(dtype=torch.float64):
    """Hidden states, head and targets of packed documents; of each, the first tokens are a prompt as clients write it.

    The last document is padding.
    """
    generator = torch.Generator().manual_seed(1)
    num_tokens = NUM_TOKENS
    drift = torch.tensor(DRIFTS, dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS))
    hidden = torch.randn(num_tokens, WIDTH, generator=generator, dtype=torch.float64)
    head = 0.5 * torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCAB, (num_tokens,), generator=generator)
    now = (hidden @ head.t()).log_softmax(-1).gather(1, labels[:, None]).squeeze(1)

    def near():
        return now + drift + 0.5 * torch.randn(num_tokens, generator=generator, dtype=torch.float64)

    targets = {"logprobs": near(), "rollout_logprobs": near(), "ref_logprobs": near()}
    targets["advantages"] = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    targets["labels"] = labels
    is_prompt = LAYOUT.positions < 2
    is_prompt[ENDS[1]] = False  # a document of one token, which is trained
    targets["logprobs"][is_prompt] = 0.0
    targets["advantages"][is_prompt] = 0.0
    targets["advantages"][30] = 0.0  # drawn by the sampler, and worth nothing
    targets["logprobs"][40] = targets["advantages"][40] = 0.0  # the same, and drawn with certainty
    targets["sequence_ratio_mask"] = (LAYOUT.positions >= 4).double()
    labels[NUM_LABELS:] = IGNORE
    cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in targets.items()}
    return hidden.to(dtype), head.to(dtype), cast


def clip(ratio, low, high):
    return min(max(ratio, low), high)


def clipped_surrogate(r, a, low, high):
    return -torch.minimum(r * a, clip(r, low, high) * a)


def policy_loss(r, a, t, o):
    loss = clipped_surrogate(r, a, 1 - o.get("eps_clip", 0.2), 1 + o.get("eps_clip_high", 0.2))
    if "eps_clip_c" in o and a < 0:
        loss = torch.minimum(loss, -o["eps_clip_c"] * a)
    if o.get("use_tis"):
        low, high = o.get("tis_clip_low", 0.1), o.get("tis_clip_high", 2.0)
        loss = loss * clip(math.exp(t["logprobs"] - t["rollout_logprobs"]), low, high)
    if "icepop_beta" in o and not 1 / o["icepop_beta"] <= r <= o["icepop_beta"]:
        loss = 0 * loss
    return loss


def drgrpo(r, a, t, o):
    loss = clipped_surrogate(r, a, 1 - o.get("clip_low", 0.2), 1 + o.get("clip_high", 0.28))
    beta = o.get("beta", 0.1)
    if not beta:
        return loss
    x = t["ref_logprobs"] - t["now"]
    return loss + beta * {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - x - 1}[o.get("kl_type", "k3")]


# (ratio, advantage, the token's inputs with the model's log-probability `now`, options) -> loss of the token.
DEFINITIONS = {
    "importance_sampling": lambda r, a, t, o: -r * a,
    "ppo": lambda r, a, t, o: clipped_surrogate(
        r, a, o.get("clip_low_threshold", 0.8), o.get("clip_high_threshold", 1.2)
    ),
    "gspo": lambda r, a, t, o: clipped_surrogate(
        r, a, o.get("clip_low_threshold", 0.8), o.get("clip_high_threshold", 1.2)
    ),
    "policy_loss": policy_loss,
    "cispo": lambda r, a, t, o: (
        -clip(r.detach(), o.get("clip_low_threshold", 0.0), o.get("clip_high_threshold", 4.0)) * t["now"] * a
    ),
    "dro": lambda r, a, t, o: -(t["now"] * a - o.get("beta", 0.05) / 2 * (t["now"] - t["logprobs"]) ** 2),
    "drgrpo": drgrpo,
}
CASES = [
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 3.0}),
    ("gspo", {}),
    ("gspo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.001}),
    ("policy_loss", {}),
    ("policy_loss", {"eps_clip": 0.1, "eps_clip_high": 0.5, "eps_clip_c": 1.3}),
    ("policy_loss", {"use_tis": True}),
    ("policy_loss", {"use_tis": True, "tis_clip_low": 0.8, "tis_clip_high": 1.1, "icepop_beta": 1.2}),
    ("policy_loss", {"icepop_beta": 1.5, "eps_clip_high": 0.9}),
    ("cispo", {}),
    ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.1}),
    ("dro", {}),
    ("dro", {"beta": 0.7}),
    ("drgrpo", {}),
    ("drgrpo", {"kl_type": "k1", "ratio_type": "sequence"}),
    ("drgrpo", {"kl_type": "k2", "beta": 0.4, "clip_low": 0.5, "clip_high": 0.1}),
    ("drgrpo", {"beta": 0.0, "ratio_type": "sequence", "clip_high": 0.05}),
]
IDS = [f"{name}-{index}" for index, (name, _) in enumerate(CASES)]


def defined(name, options, hidden, head, targets):
    """(loss of each trained token, index of it, log p(label) of all) by the definition."""
    labels = targets["labels"]
    now = (hidden @ head.t()).log_softmax(-1).gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    losses, trained = [], []
    for start, end in pairwise(ENDS):
        rows = [
            row
            for row in range(start, end)
            if labels[row] != IGNORE
            and (
                targets["logprobs"][row] != 0
                or targets["advantages"][row] != 0
                or (name == "gspo" and targets["sequence_ratio_mask"][row])
            )
        ]
        ratios = {row: (now[row] - targets["logprobs"][row]).exp() for row in rows}
        if options.get("ratio_type") == "sequence" and rows:
            shared = torch.stack([ratio.log() for ratio in ratios.values()]).mean().exp()
            ratios = dict.fromkeys(rows, shared)
        if name == "gspo":
            marked = [ratios[row].log() for row in rows if targets["sequence_ratio_mask"][row]]
            shared = torch.stack(marked).mean().exp().detach() if marked else 1.0
            ratios = {row: shared * (now[row] - now[row].detach()).exp() for row in rows}
        for row in rows:
            inputs = {key: values[row] for key, values in targets.items()} | {"now": now[row]}
            losses.append(DEFINITIONS[name](ratios[row], targets["advantages"][row], inputs, options))
            trained.append(row)
    return torch.stack(losses), trained, now


def gradients(total, leaves):
    return torch.autograd.grad(3 * total, leaves)


@pytest.mark.parametrize("whole_logits", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_values_and_gradients_are_those_of_the_definition(name, options, whole_logits):
    """Catches a wrong formula, default or sign, a ratio over another document, and prompts or padding that train."""
    hidden, head, targets = make_inputs()
    leaves = [hidden.requires_grad_(), head.requires_grad_()]
    wanted, trained, now = defined(name, options, hidden, head, targets)
    output = get_loss(name, options)(hidden, HeadWeight(head, LogitOptions(whole=whole_logits)), targets, LAYOUT)
    exact = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(output.sum, wanted.sum(), **exact)
    torch.testing.assert_close(gradients(output.sum, leaves), gradients(wanted.sum(), leaves), **exact)
    assert not output.per_token.requires_grad
    assert torch.equal(output.per_token.nonzero().flatten(), torch.tensor(trained)[wanted != 0])
    torch.testing.assert_close(output.per_token[trained], wanted.detach(), **exact)
    torch.testing.assert_close(output.logprobs[:NUM_LABELS], now.detach()[:NUM_LABELS], **exact)
    assert not output.logprobs[NUM_LABELS:].any()


def test_without_a_mask_the_ratio_of_a_document_is_over_its_trained_tokens():
    """Catches a loss that asks for what a client with one answer a document need not say."""
    hidden, head, targets = make_inputs()
    trained = (targets["logprobs"] != 0) | (targets["advantages"] != 0)
    wanted = LOSSES["gspo"](hidden, head, {**targets, "sequence_ratio_mask": trained.double()}, LAYOUT)
    del targets["sequence_ratio_mask"]
    assert torch.equal(LOSSES["gspo"](hidden, head, targets, LAYOUT).per_token, wanted.per_token)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_a_frozen_head_does_not_change_the_gradient(name, options):
    """Catches a gradient taken in the forward pass, as for adapters, that differs from one taken in the backward."""
    hidden, head, targets = make_inputs()
    hidden.requires_grad_()
    wanted, _, _ = defined(name, options, hidden, head, targets)
    output = get_loss(name, options)(hidden, head, targets, LAYOUT)
    torch.testing.assert_close(gradients(output.sum, [hidden]), gradients(wanted.sum(), [hidden]), rtol=1e-10, atol=0)


def test_gradient_is_that_of_finite_differences():
    """Catches an error that formula and definition share: a part of the loss that no gradient flows through."""
    hidden, head, targets = make_inputs()
    loss = get_loss("drgrpo", {"ratio_type": "sequence", "clip_low": 0.9, "clip_high": 9.0})
    generator = torch.Generator().manual_seed(2)
    along = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (hidden, head)]
    leaves = [hidden.requires_grad_(), head.requires_grad_()]
    gradient = torch.autograd.grad(loss(*leaves, targets, LAYOUT).sum, leaves)
    slope = sum(float((g * d).sum()) for g, d in zip(gradient, along, strict=True))
    step = 1e-5
    with torch.no_grad():
        ahead = loss(hidden + step * along[0], head + step * along[1], targets, LAYOUT).sum
        behind = loss(hidden - step * along[0], head - step * along[1], targets, LAYOUT).sum
    assert float((ahead - behind) / (2 * step)) == pytest.approx(slope, rel=1e-7)


@pytest.mark.parametrize("name", ["cross_entropy", "causallm_loss"])
@pytest.mark.parametrize("whole_logits", [False, True])
def test_cross_entropy_takes_any_weights(name, whole_logits):
    """Catches weights that are read as a mask, and log-probabilities that are missing where the weight is 0."""
    hidden, head, targets = make_inputs()
    weights = torch.tensor([-2.0, 0.0, 0.25, 1.0]).repeat(NUM_TOKENS)[:NUM_TOKENS]
    leaves = [hidden.requires_grad_(), head.requires_grad_()]
    now = (hidden @ head.t()).log_softmax(-1).gather(1, targets["labels"].clamp(min=0)[:, None]).squeeze(1)
    output = get_loss(name)(
        hidden, HeadWeight(head, LogitOptions(whole=whole_logits)), {**targets, "weights": weights}, LAYOUT
    )
    wanted = -(weights * now)[:NUM_LABELS].sum()
    torch.testing.assert_close(output.sum, wanted)
    torch.testing.assert_close(gradients(output.sum, leaves), gradients(wanted, leaves))
    torch.testing.assert_close(output.logprobs[:NUM_LABELS], now.detach()[:NUM_LABELS])
    torch.testing.assert_close(output.per_token.sum(), wanted.detach())
    metrics = read_metrics(output.metrics)
    assert metrics["loss:sum"] == pytest.approx(float(wanted.detach()))
    assert metrics["valid_tokens:sum"] == (weights[:NUM_LABELS] != 0).sum()


@pytest.mark.parametrize("weighted", [True, False])
def test_cross_entropy_takes_several_labels_a_token(weighted):
    """Catches labels but the first that are left out, and log-probabilities that are missing where the weight is 0."""
    hidden, head, _ = make_inputs()
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(VOCAB, (NUM_TOKENS, 3), generator=generator)
    labels[NUM_LABELS:] = IGNORE
    labels[5, 1] = IGNORE
    weights = torch.randn(NUM_TOKENS, 3, generator=generator, dtype=torch.float64).where(labels % 5 != 0, 0.0)
    leaves = [hidden.requires_grad_(), head.requires_grad_()]
    now = (hidden @ head.t()).log_softmax(-1).gather(1, labels.clamp(min=0)).where(labels != IGNORE, 0.0)
    inputs = {"labels": labels, **({"weights": weights} if weighted else {})}
    output = get_loss("cross_entropy")(hidden, head, inputs)
    wanted = -(now * (weights if weighted else 1.0)).sum()
    torch.testing.assert_close(output.sum, wanted)
    torch.testing.assert_close(gradients(output.sum, leaves), gradients(wanted, leaves))
    torch.testing.assert_close(output.logprobs, now.detach())
    torch.testing.assert_close(output.per_token.sum(), wanted.detach())
    is_trained = (labels != IGNORE) & (weights != 0) if weighted else labels != IGNORE
    assert read_metrics(output.metrics)["valid_tokens:sum"] == is_trained.any(dim=1).sum()


@pytest.mark.parametrize("name", ["cross_entropy", "ppo", "gspo", "drgrpo"])
def test_metrics_of_a_part_are_those_of_its_tokens(name):
    """Catches a client whose metrics are those of its neighbours in a mixed pass."""
    hidden, head, targets = make_inputs()
    output = LOSSES[name](hidden, head, targets, LAYOUT)
    parts = [metrics_between(output, start, stop) for start, stop in ((0, ENDS[1]), (ENDS[1], NUM_TOKENS))]
    first = {key: value[: ENDS[1]] for key, value in targets.items()}
    alone = LOSSES[name](hidden[: ENDS[1]], head, first, SequenceLayout.from_lengths(LENGTHS[:1]))
    assert read_metrics(parts[0]) == pytest.approx(read_metrics(alone.metrics))
    nothing = empty_metrics(output.metrics, torch.device("cpu"))
    assert read_metrics(combine_metrics([*parts, nothing])) == pytest.approx(read_metrics(output.metrics))


@pytest.mark.parametrize("name", [name for name, _ in CASES])
def test_weights_of_policy_losses_multiply_and_say_what_is_trained(name):
    """Catches weights that are ignored, and a guess at what is a prompt where weights say it."""
    hidden, head, targets = make_inputs()
    weights = torch.zeros(NUM_TOKENS, dtype=torch.float64)
    weights[2:12] = 0.5
    halved = LOSSES[name](hidden, head, {**targets, "weights": weights}, LAYOUT)
    whole = LOSSES[name](hidden, head, {**targets, "weights": (weights > 0).double()}, LAYOUT)
    torch.testing.assert_close(halved.per_token, 0.5 * whole.per_token)
    assert read_metrics(whole.metrics)["valid_tokens:sum"] == 10


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo"])
def test_thresholds_may_come_with_the_tokens(name):
    """Catches thresholds of a datum that are ignored."""
    hidden, head, targets = make_inputs()
    plain = get_loss(name, {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1})(hidden, head, targets, LAYOUT)
    own = {"clip_low_threshold": torch.full((NUM_TOKENS,), 0.7), "clip_high_threshold": torch.full((NUM_TOKENS,), 1.1)}
    given = LOSSES[name](hidden, head, {**targets, **{key: value.double() for key, value in own.items()}}, LAYOUT)
    torch.testing.assert_close(given.per_token, plain.per_token)
    own["clip_high_threshold"][:20] = 1.5
    mixed = LOSSES[name](hidden, head, {**targets, **{key: value.double() for key, value in own.items()}}, LAYOUT)
    assert not torch.equal(mixed.per_token[:20], plain.per_token[:20])
    torch.testing.assert_close(mixed.per_token[20:], plain.per_token[20:])


@pytest.mark.parametrize(("name", "options"), [("cross_entropy", {}), *CASES])
def test_splitting_into_micro_batches_changes_nothing(name, options):
    """Catches means of means in losses and metrics, and documents that reach into their neighbours."""
    hidden, head, targets = make_inputs()
    loss = get_loss(name, options)

    def run(starts):
        leaves = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        outputs = []
        for start, stop in pairwise(starts):
            layout = SequenceLayout.from_lengths(LENGTHS[ENDS.index(start) : ENDS.index(stop)])
            part = {key: x[start:stop] for key, x in targets.items()}
            outputs.append(loss(leaves[0][start:stop], leaves[1], part, layout))
            outputs[-1].sum.backward()
        metrics = read_metrics(combine_metrics([output.metrics for output in outputs]))
        tensors = (torch.cat([output.per_token for output in outputs]), *(leaf.grad for leaf in leaves))
        return metrics, tensors

    whole_metrics, whole_tensors = run([0, NUM_TOKENS])
    for starts in ([0, ENDS[2], NUM_TOKENS], ENDS):
        metrics, tensors = run(starts)
        assert metrics == pytest.approx(whole_metrics, rel=1e-9)
        torch.testing.assert_close(tensors, whole_tensors, rtol=1e-9, atol=1e-12)


def test_metrics_are_those_of_the_trained_tokens():
    """Catches metrics over prompts and padding, whose ratios mean nothing, and a divergence of the wrong sign."""
    hidden, head, targets = make_inputs()
    _, trained, now = defined("ppo", {}, hidden, head, targets)
    log_ratio = (now - targets["logprobs"])[trained]
    ratio, advantages = log_ratio.exp(), targets["advantages"][trained]
    clipped = ((ratio > 1.2) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
    output = get_loss("ppo")(hidden, head, targets, LAYOUT)
    assert all(value.dtype == torch.float64 and value.dim() == 0 for value in output.metrics.values())
    wanted = {
        "loss:sum": output.sum,
        "loss:mean": output.sum / len(trained),
        "valid_tokens:sum": len(trained),
        "ratio_mean:mean": ratio.mean(),
        "ratio_min:min": ratio.min(),
        "ratio_max:max": ratio.max(),
        "clip_fraction:mean": clipped.double().mean(),
        "kl_sample_train_k1:mean": -log_ratio.mean(),
        "kl_sample_train_k3:mean": (ratio - 1 - log_ratio).mean(),
    }
    assert read_metrics(output.metrics) == pytest.approx({name: float(value) for name, value in wanted.items()})
    quiet = get_loss("ppo", {"compute_kl_stats": False})(hidden, head, targets, LAYOUT).metrics
    assert {name for name in wanted if "kl" not in name} == set(quiet)


def test_a_micro_batch_without_trained_tokens_says_nothing():
    """Catches NaN or infinity in a reply, and a rank of padding alone that spoils the extremes of the others."""
    hidden, head, targets = make_inputs()
    padding = {**targets, "labels": torch.full_like(targets["labels"], IGNORE)}
    for name, loss in LOSSES.items():
        output, empty = loss(hidden, head, targets, LAYOUT), loss(hidden.requires_grad_(), head, padding, LAYOUT)
        empty.sum.backward()
        assert hidden.grad is not None
        assert not hidden.grad.any(), name
        hidden.requires_grad_(False).grad = None
        assert read_metrics(empty.metrics) == {"loss:sum": 0.0, "valid_tokens:sum": 0.0}
        assert read_metrics(combine_metrics([empty.metrics, output.metrics])) == read_metrics(output.metrics)


@pytest.mark.parametrize("logprob", [-200.0, -1e9, -1e30])
def test_policies_that_parted_give_finite_gradients(logprob):
    """Catches ratios that overflow or are rounded to 1, and tokens that nothing pulls back."""
    hidden, head, targets = make_inputs(torch.float32)
    targets["logprobs"][3] = logprob
    hidden.requires_grad_()
    output = get_loss("importance_sampling")(hidden, head, targets, LAYOUT)
    output.sum.backward()
    assert float(output.per_token[3]) == pytest.approx(-math.exp(MAX_LOG_RATIO) * float(targets["advantages"][3]))
    assert hidden.grad.isfinite().all()
    assert hidden.grad[3].norm() > 1e6


def test_half_precision_gives_single_precision_losses():
    """Catches log-probabilities or losses that are rounded to the dtype of the hidden states."""
    hidden, head, targets = make_inputs(torch.float32)
    for loss in LOSSES.values():
        output = loss(hidden.bfloat16(), head, targets, LAYOUT)
        assert output.sum.dtype == output.per_token.dtype == output.logprobs.dtype == torch.float32


def test_old_logprobs_stand_for_the_sampled_ones():
    """Catches the other name of an input being ignored."""
    hidden, head, targets = make_inputs()
    wanted = LOSSES["drgrpo"](hidden, head, targets, LAYOUT)
    renamed = {"old_logprobs" if name == "logprobs" else name: x for name, x in targets.items()}
    assert torch.equal(LOSSES["drgrpo"](hidden, head, renamed, LAYOUT).sum, wanted.sum)


@pytest.mark.parametrize(
    ("name", "options", "missing", "message"),
    [
        ("ppo", {}, ["advantages"], "loss 'ppo' needs advantages as inputs, one number per target token"),
        ("cispo", {}, ["advantages", "logprobs"], "loss 'cispo' needs logprobs and advantages"),
        ("policy_loss", {"use_tis": True}, ["rollout_logprobs"], "loss 'policy_loss' needs rollout_logprobs"),
        ("policy_loss", {}, ["rollout_logprobs"], None),
        ("drgrpo", {}, ["ref_logprobs"], "loss 'drgrpo' needs ref_logprobs"),
        ("drgrpo", {"beta": 0}, ["ref_logprobs"], None),
        ("cross_entropy", {}, ["logprobs", "advantages"], None),
    ],
)
def test_missing_inputs_are_named(name, options, missing, message):
    """Catches a KeyError from inside a loss, and inputs that are asked for without need."""
    hidden, head, targets = make_inputs()
    loss = get_loss(name, options)
    for key in missing:
        del targets[key]
    for check in (lambda: check_inputs(loss, list(targets)), lambda: loss(hidden, head, targets, LAYOUT)):
        if message is None:
            check()
        else:
            with pytest.raises(ValueError, match=message):
                check()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reinforce", {}, "unknown loss 'reinforce'; choose one of cross_entropy, "),
        ("cross_entropy", {"beta": 1.0}, "loss 'cross_entropy' has no option 'beta'; it has no options"),
        ("ppo", {"eps_clip": 0.1}, "no option 'eps_clip'; its options are clip_high_threshold, clip_low_threshold"),
        ("ppo", {"clip_low_threshold": 2.0}, "loss 'ppo': 0 <= clip_low_threshold <= clip_high_threshold must hold"),
        ("ppo", {"clip_low_threshold": "low"}, "'clip_low_threshold' must be a number, got 'low'"),
        ("ppo", {"clip_low_threshold": float("nan")}, "0 <= clip_low_threshold"),
        ("policy_loss", {"use_tis": 2.0}, "'use_tis' must be true or false, got 2.0"),
        ("policy_loss", {"eps_clip_c": 0.5}, "eps_clip_c must be above 1"),
        ("policy_loss", {"icepop_beta": 1}, "icepop_beta must be above 1"),
        ("dro", {"beta": -1.0}, "beta must not be negative"),
        ("drgrpo", {"kl_type": "k4"}, "'kl_type' must be one of k1, k2, k3, got 'k4'"),
        ("drgrpo", {"ratio_type": 1.0}, "'ratio_type' must be one of token, sequence"),
    ],
)
def test_what_a_loss_cannot_take_is_refused_by_name(name, options, message):
    """Catches options that are ignored, and errors that do not say what is wanted."""
    with pytest.raises(ValueError, match=message):
        get_loss(name, options)


def test_a_loss_of_whole_documents_needs_their_layout():
    """Catches a row of several documents that is taken as one."""
    hidden, head, targets = make_inputs()
    with pytest.raises(ValueError, match="needs the layout of the tokens"):
        LOSSES["gspo"](hidden, head, targets)
    with pytest.raises(ValueError, match="layout: has 3 tokens, but the row has"):
        LOSSES["gspo"](hidden, head, targets, SequenceLayout.from_lengths([3]))


def test_numbers_stand_for_switches_and_none_for_no_limit():
    """Catches options of a protocol that knows numbers alone, and nulls of the other, being refused."""
    loss = get_loss("policy_loss", {"use_tis": 1.0, "compute_kl_stats": 0.0, "eps_clip_c": None, "icepop_beta": 5})
    assert (loss.options.use_tis, loss.options.compute_kl_stats) == (True, False)
    assert (loss.options.eps_clip_c, loss.options.icepop_beta) == (None, 5.0)


@pytest.mark.parametrize("name", ["advantages", "logprobs", "weights", "sequence_ratio_mask"])
def test_inputs_of_another_shape_are_refused(name):
    """Catches inputs that are broadcast to a matrix of tokens, whose sum is larger by their number."""
    hidden, head, targets = make_inputs()
    ones = torch.ones_like(targets["advantages"])
    layout = SequenceLayout.from_lengths([len(ones)])
    with pytest.raises(ValueError, match=rf"{name} must have shape \[{len(ones)}\], as labels; got \[{len(ones)}, 1\]"):
        LOSSES["gspo"](hidden, head, {**targets, name: ones[:, None]}, layout)
