"""The README.md of an exported folder: facts about the model, how to load it, and the verification results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from xorl.lora import AdapterSpec
from xorl.lora.peft.config import ExpertForm

Figures = Mapping[str, str | int | float]

# The entry "adapter" of a model whose adapters were merged.
MERGED_ADAPTER = "merged into the base in fp32, rounded once"


def model_card(
    title: str,
    *,
    base: str | None,
    is_adapter: bool,
    facts: Figures,
    verified: Figures | None,
    form: ExpertForm = "per_expert",
) -> str:
    """Markdown with the metadata header that the Hub reads.

    Args:
        verified: None if the export was not verified.
        form: of the adapters on experts, if there are any.
    """
    library = "peft" if is_adapter else "transformers"
    header = [f"library_name: {library}", "tags:", "- xorl", *(["- lora"] if is_adapter else [])]
    # The Hub rejects a card whose base model is not a Hub id.
    if base is not None and not Path(base).exists():
        header.insert(0, f"base_model: {base}")
    facts = facts if base is None else {"base model": base, **facts}
    lines = [
        "---",
        *header,
        "---",
        f"# {title}",
        "",
        *(_serving(base) if is_adapter and form == "sglang" else ["```python", *_loading(base, is_adapter)]),
        "```",
        "",
        *_table(facts),
    ]
    if verified is not None:
        lines += [
            "",
            "## Verified",
            "",
            "Loaded from these files and compared with the trained model:",
            "",
            *_table(verified),
        ]
    return "\n".join([*lines, ""])


def adapter_facts(spec: AdapterSpec) -> dict[str, str | int | float]:
    """Rank, alpha, and every other setting that differs from its default."""
    facts: dict[str, str | int | float] = {"rank": spec.rank, "alpha": spec.alpha}
    for name in ("use_rslora", "use_dora"):
        if getattr(spec, name):
            facts[name] = "true"
    for name in ("rank_pattern", "alpha_pattern", "modules_to_save"):
        if value := getattr(spec, name):
            facts[name] = ", ".join(f"{key}: {value[key]}" if isinstance(value, Mapping) else key for key in value)
    if spec.expert_sharing != "none":
        facts["factors that experts share"] = spec.expert_sharing
    return facts


def _serving(base: str | None) -> list[str]:
    """PEFT does not read SGLang's form."""
    options = f"--model-path {base or 'BASE'} --enable-lora --lora-paths adapter=."
    return ["```sh", f"python -m sglang.launch_server {options}"]


def _loading(base: str | None, is_adapter: bool) -> list[str]:
    if not is_adapter:
        return [
            "from transformers import AutoModelForCausalLM",
            "",
            'model = AutoModelForCausalLM.from_pretrained(".")',
        ]
    return [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f'base = AutoModelForCausalLM.from_pretrained("{base or "BASE"}")',
        'model = PeftModel.from_pretrained(base, ".")',
    ]


def _table(figures: Figures) -> list[str]:
    rows = [
        f"| {name} | {value:.3g} |" if isinstance(value, float) else f"| {name} | {value} |"
        for name, value in figures.items()
    ]
    return ["| | |", "|---|---|", *rows]
