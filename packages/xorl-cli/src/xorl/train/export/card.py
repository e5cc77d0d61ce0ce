"""The README.md of an exported folder: facts about the model, how to load it, and the verification results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from xorl.core.models import ModelSpec
from xorl.lora import AdapterSpec
from xorl.lora.peft.forms import Reader

Figures = Mapping[str, str | int | float]

_OWN_GENERATION = (
    "The model was trained to stop at other tokens than its base. Programs read the base's generation_config.json, so "
    "pass them the `eos_token_id` of the one in this folder, for example as "
    '`model.generation_config = GenerationConfig.from_pretrained(".")` in transformers or as `stop_token_ids` in vLLM '
    "and SGLang.",
    "",
)
READER_NAMES: Mapping[Reader, str] = {"peft": "PEFT's PeftModel.from_pretrained", "vllm": "vLLM", "sglang": "SGLang"}
# The values that vLLM's --max-lora-rank takes.
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# The entry "adapter" of a model whose adapters were merged.
MERGED_ADAPTER = "merged into the base in fp32, rounded once"


def auto_class(spec: ModelSpec) -> str:
    """The class of transformers that opens folders of a family."""
    names = spec.checkpoint_names
    return "AutoModelForImageTextToText" if names.is_part or names.encoder else "AutoModelForCausalLM"


def model_card(
    title: str,
    spec: ModelSpec,
    *,
    base: str | None,
    facts: Figures,
    verified: Figures | None,
    readers: Sequence[Reader] | None = None,
    own_generation: bool = False,
) -> str:
    """Markdown with the metadata header that the Hub reads.

    Args:
        verified: None if the export was not verified.
        readers: for an adapter, the programs that read its files; None for a model.
        own_generation: whether an adapter has a generation_config.json, which none of these programs reads.
    """
    is_adapter = readers is not None
    library = "transformers" if readers is None else "peft" if "peft" in readers else None
    header = [
        *([] if library is None else [f"library_name: {library}"]),
        *("tags:", "- xorl", *(["- lora"] if is_adapter else [])),
    ]
    # The Hub rejects a card whose base model is not a Hub id.
    if base is not None and not Path(base).exists():
        header.insert(0, f"base_model: {base}")
    facts = {"architecture": spec.architecture, **facts}
    facts = facts if base is None else {"base model": base, **facts}
    opener = auto_class(spec)
    lines = [
        *("---", *header, "---"),
        f"# {title}",
        "",
        *(_loading_a_model(opener) if readers is None else _loading(opener, base, facts, readers)),
        "",
        *(_OWN_GENERATION if own_generation else ()),
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


def reader_names(readers: Sequence[Reader]) -> str:
    """The names of the programs that read an adapter, for display."""
    return " and ".join(READER_NAMES[reader] for reader in readers) or "xorl export --merge"


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


def _loading_a_model(opener: str) -> list[str]:
    return ["```python", f"from transformers import {opener}", "", f'model = {opener}.from_pretrained(".")', "```"]


def _loading(opener: str, base: str | None, facts: Figures, readers: Sequence[Reader]) -> list[str]:
    """Instructions for loading an adapter with each program that reads its files."""
    base = base or "BASE"
    if "peft" in readers:
        return [
            *("```python", "from peft import PeftModel", f"from transformers import {opener}", ""),
            f'base = {opener}.from_pretrained("{base}")',
            'model = PeftModel.from_pretrained(base, ".")',
            "```",
        ]
    if not readers:
        return [
            "PEFT, vLLM and SGLang do not read all settings of this adapter. xorl merges it into its base:",
            *("", "```sh", f"xorl export . --merge --base {base} --output merged", "```"),
        ]
    max_rank = next((rank for rank in _VLLM_RANKS if rank >= int(facts["rank"])), facts["rank"])
    commands: Mapping[Reader, str] = {
        "vllm": f"vllm serve {base} --enable-lora --max-lora-rank {max_rank} --lora-modules adapter=.",
        "sglang": f"python -m sglang.launch_server --model-path {base} --enable-lora --lora-paths adapter=.",
    }
    return ["```sh", *(commands[reader] for reader in readers), "```"]


def texts_of(figures: Figures) -> dict[str, str]:
    """The figures with three significant digits."""
    return {name: f"{value:.3g}" if isinstance(value, float) else str(value) for name, value in figures.items()}


def _table(figures: Figures) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in texts_of(figures).items())]
