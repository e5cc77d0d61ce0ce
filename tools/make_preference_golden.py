"""Writes the golden results of preference losses: `uv run --with trl==1.16.0 tools/make_preference_golden.py`.

The trainers of TRL compute the loss of a few rows with a tiny model, and its gradients. expected.json in
tests/golden/preference keeps both, with the token ids that they were computed from. Weights are a formula in their
index, so that no file holds them.

The first term of `orpo` is replaced: here it is the mean over the answer of each pair, and in TRL the mean over all
tokens of the batch, prompts included. TRL has no label smoothing of DPO any more; that of SimPO is the same formula.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import (  # pyright: ignore[reportMissingImports]
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer  # pyright: ignore[reportMissingImports]
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # pyright: ignore[reportMissingImports]

from workspace import ROOT

FOLDER = ROOT / "tests" / "golden" / "preference"
TOKENIZER = ROOT / "configs" / "quickstart"
ROWS = [
    {"prompt": "max 60 34 =", "chosen": "60", "rejected": "34 is it, I think"},
    {"prompt": "reverse WPAL =", "chosen": "LAPW", "rejected": "83"},
    {"prompt": "increment 1586 =", "chosen": "1587", "rejected": "1586"},
    {"prompt": "copy POIXWM =", "chosen": "POIXWM", "rejected": "PO"},
]
IGNORE = -100
# Gradients that are kept; of the others, only the norm of all.
KEPT = ("model.norm.weight", "model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight")
COMMON = {"per_device_train_batch_size": 4, "report_to": [], "use_cpu": True, "bf16": False, "max_length": None}

Sides = dict[str, dict[str, list[int]]]


def weight(name: str, shape: torch.Size, seed: int) -> Tensor:
    """The values of a weight, which the test computes by the same formula."""
    index = torch.arange(shape.numel(), dtype=torch.float64)
    values = torch.sin(index * 0.7 + seed + sum(map(ord, name)) % 97).view(shape)
    return (1 + 0.1 * values if "norm" in name else 0.3 * values).float()


def model(seed: int) -> PreTrainedModel:
    """The tiny model with the weights of a seed."""
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(weight(name, parameter.shape, seed))
    return made


def measure(trained: PreTrainedModel, loss: Tensor, rows: list[Sides], **more: object) -> dict[str, object]:
    """The entry of a loss in the file."""
    loss.backward()
    gradients = {name: each.grad for name, each in trained.named_parameters() if each.grad is not None}
    norm = torch.stack([each.double().norm() for each in gradients.values()]).norm()
    kept = {name: gradients[name].flatten().tolist() for name in KEPT}
    return {"loss": float(loss.detach()), "grad_norm": float(norm), "gradients": kept, "rows": rows, **more}


def unpadded(ids: Tensor, real: Tensor, trained: Tensor) -> dict[str, list[int]]:
    """Token ids and labels of one answer with its prompt."""
    is_real = real.bool()
    return {"ids": ids[is_real].tolist(), "labels": torch.where(trained.bool(), ids, IGNORE)[is_real].tolist()}


def answers(batch: Mapping[str, Tensor]) -> list[dict[str, list[int]]]:
    """Token ids and labels of all answers in a batch that marks completions, each with its prompt."""
    columns = (batch[name] for name in ("input_ids", "attention_mask", "completion_mask"))
    return [unpadded(*each) for each in zip(*columns, strict=True)]


def paired(chosen: list[dict[str, list[int]]], rejected: list[dict[str, list[int]]]) -> list[Sides]:
    """The rows of the file."""
    return [{"chosen": one, "rejected": other} for one, other in zip(chosen, rejected, strict=True)]


def dpo(folder: str, **options: object) -> dict[str, object]:
    """`DPOTrainer` with a reference model."""
    arguments = DPOConfig(output_dir=folder, **{**COMMON, **options})
    trained = model(0)
    trainer = DPOTrainer(
        trained,
        model(1),
        arguments,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=AutoTokenizer.from_pretrained(TOKENIZER),
    )
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(len(ROWS))])
    sides = answers(batch)
    rows = paired(sides[: len(ROWS)], sides[len(ROWS) :])
    return measure(trainer.model, trainer.compute_loss(trainer.model, batch), rows)


def kto(folder: str, **options: object) -> dict[str, object]:
    """`KTOTrainer`, of which every pair is two examples."""
    arguments = KTOConfig(output_dir=folder, **{**COMMON, "per_device_train_batch_size": 8, **options})
    examples = [
        {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
        for row in ROWS
        for name in ("chosen", "rejected")
    ]
    trainer = KTOTrainer(
        model(0),
        model(1),
        arguments,
        train_dataset=Dataset.from_list(examples),
        processing_class=AutoTokenizer.from_pretrained(TOKENIZER),
    )
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(len(examples))])
    sides = answers(batch)
    rows = paired(sides[::2], sides[1::2])
    loss = trainer.compute_loss(trainer.model, batch)
    [baseline] = trainer._metrics["train"]["kl"]
    return measure(trainer.model, loss, rows, baseline=baseline)


def _labelled(batch: Mapping[str, Tensor]) -> list[Sides]:
    """The rows of a batch that has the answers apart."""
    return [
        {
            side: unpadded(
                batch[f"{side}_input_ids"][index],
                batch[f"{side}_attention_mask"][index],
                batch[f"{side}_labels"][index] != IGNORE,
            )
            for side in ("chosen", "rejected")
        }
        for index in range(len(ROWS))
    ]


def simpo(folder: str, **options: object) -> dict[str, object]:
    """`CPOTrainer` with the loss of SimPO."""
    common = {**COMMON, "max_length": 64, "loss_type": "simpo", "cpo_alpha": 0.0}
    arguments = CPOConfig(output_dir=folder, **{**common, **options})
    trainer = CPOTrainer(
        model(0),
        arguments,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=AutoTokenizer.from_pretrained(TOKENIZER),
    )
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(len(ROWS))])
    loss, _ = trainer.get_batch_loss_metrics(trainer.model, batch)
    return measure(trainer.model, loss, _labelled(batch))


def orpo(folder: str, **options: object) -> dict[str, object]:
    """`ORPOTrainer`, with the mean over pairs as its first term."""
    arguments = ORPOConfig(output_dir=folder, **{**COMMON, "max_length": 64, **options})
    trainer = ORPOTrainer(
        model(0),
        arguments,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=AutoTokenizer.from_pretrained(TOKENIZER),
    )
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(len(ROWS))])
    chosen, rejected, *_ = trainer.concatenated_forward(trainer.model, batch)
    ratios, *_ = trainer.odds_ratio_loss(chosen, rejected)
    return measure(trainer.model, -chosen.mean() - ratios.mean(), _labelled(batch))


# By name: the options of xorl, and what computes the same with TRL.
CASES: Mapping[str, tuple[dict[str, object], Callable[[str], dict[str, object]]]] = {
    "dpo": ({"loss": "dpo"}, lambda folder: dpo(folder, loss_type="sigmoid", beta=0.1)),
    "dpo, normalized": (
        {"loss": "dpo", "dpo_length_normalized": True, "preference_beta": 0.5},
        lambda folder: dpo(folder, loss_type="sigmoid_norm", beta=0.5),
    ),
    "kto": (
        {"loss": "kto", "kto_desirable_weight": 1.5, "kto_undesirable_weight": 0.5},
        lambda folder: kto(folder, beta=0.1, desirable_weight=1.5, undesirable_weight=0.5),
    ),
    "orpo": ({"loss": "orpo", "preference_beta": 0.3}, lambda folder: orpo(folder, beta=0.3)),
    "simpo": (
        {"loss": "simpo", "preference_beta": 2.0, "simpo_gamma": 0.7, "preference_label_smoothing": 0.1},
        lambda folder: simpo(folder, beta=2.0, simpo_gamma=0.7, label_smoothing=0.1),
    ),
}


def main() -> None:
    """Parses the command line and writes the file."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {name: {"options": options, **compute(folder)} for name, (options, compute) in CASES.items()}
    path = FOLDER / "expected.json"
    path.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    for name, entry in found.items():
        print(f"{name:16} loss {entry['loss']:.6f}  gradient norm {entry['grad_norm']:.6f}")


if __name__ == "__main__":
    main()
