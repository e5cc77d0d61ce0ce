"""What an AdapterSpec accepts, and which layers it finds."""

import pytest
import torch
from torch import nn

from xorl.lora import AdapterSpec, inject
from xorl.lora.targets import resolve


def found(spec: AdapterSpec, model: nn.Module) -> tuple[str, ...]:
    return tuple(site.name for site in resolve(spec, model))


def two_layers() -> nn.Module:
    layer = {"q_proj": nn.Linear(4, 4), "seq_proj": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
    return nn.ModuleDict({"0": nn.ModuleDict(layer), "1": nn.ModuleDict({"q_proj": nn.Linear(4, 4)})})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"alpha": 0.0}, "alpha must be above 0, got 0.0"),
        ({"alpha": float("nan")}, "alpha must be a finite number, got nan"),
        ({"alpha": 1e300}, r"alpha must be at most 1e\+38, got 1e\+300"),
        ({"alpha_pattern": {"q_proj": 1e300}}, r"alpha_pattern\['q_proj'\] must be at most"),
        ({"rank": "4"}, "rank must be an integer, got '4'"),
        ({"rank": 4.0}, r"rank must be an integer, got 4\.0"),
        ({"rank_pattern": {"q_proj": True}}, r"rank_pattern\['q_proj'\] must be an integer, got True"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must be a .*Mapping, got a list"),
        ({"use_dora": "no"}, "use_dora must be a bool, got a str"),
        ({"alpha": "16"}, "alpha must be a number, got '16'"),
        ({"modules_to_save": "head"}, r"modules_to_save must be a tuple of names, got the string 'head'"),
        ({"targets": (1,)}, r"targets must be a tuple of names, got \(1,\)"),
        ({"targets": ()}, "at least one name"),
        ({"targets": ("q_proj", "")}, "no empty ones"),
        ({"targets": "q_proj"}, "a tuple of names, got the string 'q_proj'"),
    ],
)
def test_values_out_of_range_are_refused(options, message):
    """Catches a scale of zero or beyond fp32, a string taken for a list of letters, and types that fail deep inside."""
    with pytest.raises(ValueError, match=message):
        AdapterSpec(**options)


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("all-linear", ("0.q_proj", "0.seq_proj", "1.q_proj")),
        (("q_proj",), ("0.q_proj", "1.q_proj")),
        (("1.q_proj", "seq_proj"), ("0.seq_proj", "1.q_proj")),
    ],
)
def test_targets_are_the_ends_of_names_in_whole_parts(targets, names):
    """Catches `q_proj` matching `seq_proj`, and an order that follows the targets."""
    assert found(AdapterSpec(targets=targets), two_layers()) == names


@pytest.mark.parametrize("spec", [{"rank": 4}, nn.Linear(4, 4)])
def test_only_a_spec_is_a_spec(spec):
    """Catches options in a dictionary, or the configuration of another library, that fail deep inside."""
    with pytest.raises(ValueError, match=r"spec must be a xorl.lora.spec.AdapterSpec, got a (dict|torch.*Linear)"):
        inject(two_layers(), spec)


@pytest.mark.parametrize("unmatched", ["k_proj", "norm", "0", "proj"])
def test_a_target_that_matches_nothing_is_an_error_that_lists_the_names(unmatched):
    """Catches a misspelt target that is ignored, so that fewer layers train than were asked for."""
    with pytest.raises(ValueError, match=rf"\['{unmatched}'\] match no layer .* \['q_proj', 'seq_proj'\]$"):
        found(AdapterSpec(targets=("q_proj", unmatched)), two_layers())


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("all", "write all-linear, which is not in a list$"),
        ("All_Linear", "write all-linear, which is not in a list$"),
        (r".*\.(seq|q)_proj", r"not regular expressions: write \[q_proj, seq_proj\]$"),
        ("(", "names of layers, not regular expressions$"),
    ],
)
def test_targets_in_another_form_are_told_what_to_write(target, hint):
    """Catches a list of names as the only answer to an expression, or to another word for all layers."""
    with pytest.raises(ValueError, match=f"match no layer .*{hint}"):
        found(AdapterSpec(targets=("q_proj", target)), two_layers())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("model", "target", "names", "reason"),
    [
        (Tied(), "head", ("body",), "another module or the head shares its weight"),
        (
            nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "up": nn.Linear(4, 4)}),
            "attention.out_proj",
            ("up",),
            "NonDynamicallyQuantizableLinear",
        ),
        (
            nn.ModuleDict({"encoder": nn.TransformerEncoderLayer(4, 2), "up": nn.Linear(4, 4)}),
            "linear1",
            ("up",),
            "without calling it",
        ),
    ],
)
def test_layers_that_an_adapter_would_break_or_miss_are_left_alone(model, target, names, reason):
    """Catches a merge that changes a tied embedding, and adapters that the module around them never calls."""
    assert found(AdapterSpec(), model) == names
    with pytest.raises(ValueError, match=rf"cannot be adapted: .*{target} \(.*{reason}"):
        found(AdapterSpec(targets=(target,)), model)


class Conv1D(nn.Module):
    """Stands for a layer whose weight is [in, out]."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(4, 6)), nn.Parameter(torch.empty(6))


class Experts(nn.Module):
    """Stands for experts whose weights are in one parameter."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(3, 8, 4))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.c_attn, self.experts = nn.Linear(4, 4), Conv1D(), Experts()
        self.lm_head = nn.Linear(4, 6)

    def get_output_embeddings(self):
        return self.lm_head


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.LayerNorm(4), "finds no linear layer to adapt in LayerNorm: it has none"),
        (nn.ModuleList([Conv1D()]), r"no linear layer .*0.weight \[4, 6\] is a parameter of Conv1D"),
        (nn.Linear(4, 4), r"model: it is itself a Linear, .* put it in a module, such as nn.Sequential\(layer\)"),
    ],
)
def test_a_model_with_nothing_to_adapt_is_an_error(model, message):
    """Catches a run that freezes the whole model and trains nothing."""
    with pytest.raises(ValueError, match=message):
        found(AdapterSpec(), model)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("c_attn", r"c_attn.weight \[4, 6\] is a parameter of Conv1D: only nn.Linear and nn.Embedding can be adapted"),
        ("experts", r"experts.gate_up_proj \[3, 8, 4\] is a parameter of Experts"),
        ("gate_up_proj", r"experts.gate_up_proj \[3, 8, 4\] is a parameter of Experts"),
    ],
)
def test_a_target_that_is_no_linear_layer_is_refused_with_the_reason(target, message):
    """Catches a message that lists names as if the target were misspelt."""
    with pytest.raises(ValueError, match=message):
        found(AdapterSpec(targets=(target,)), LanguageModel())


@pytest.mark.parametrize("model", [LanguageModel(), nn.ModuleDict({"wrapped": LanguageModel()})])
def test_all_linear_leaves_out_the_head_of_a_language_model(model):
    """Catches a head that is adapted or quantised, which PEFT's all-linear does not mean."""
    (name,) = found(AdapterSpec(), model)
    assert name.endswith("body")
    (head,) = found(AdapterSpec(targets=("lm_head",)), model)
    assert head.endswith("lm_head")


def test_the_fused_inference_path_of_torch_would_miss_an_adapter():
    """Says when torch's encoder layer no longer reads the weights of its linear layers itself."""
    layer = nn.TransformerEncoderLayer(4, 2, batch_first=True).eval()
    layer.linear1.forward = lambda x: torch.full((*x.shape[:-1], 2048), torch.nan)
    with torch.no_grad():
        assert layer(torch.randn(1, 3, 4)).isfinite().all()
