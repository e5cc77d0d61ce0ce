"""The examples for Slurm and Kubernetes: `xorl train` accepts their commands, and they continue a run that saved."""

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
import typer
from ruamel.yaml import YAML

from xorl.cli.exit_codes import BAD_INPUT, BY_SIGNAL, DESCRIPTIONS, DIVERGED
from xorl.cli.train import app
from xorl.config import load_config

ROOT = Path(__file__).resolve().parents[3]
SLURM = ROOT / "configs" / "slurm" / "train.sbatch"
SAVED = sorted(code for code in DESCRIPTIONS if code > BY_SIGNAL)


def checked(arguments: list[str]) -> click.Context:
    """Parses the arguments of `xorl train` and loads their configuration, which must continue by the same command."""
    command = typer.main.get_command(app)
    context = command.make_context("train", arguments)
    config = load_config(ROOT / str(context.params["config"])).config
    assert config.train.load_checkpoint_path == "auto"
    assert context.params["nnodes"] == 2
    return context


def test_the_slurm_example_is_sound() -> None:
    # Catches a script that bash refuses, a flag that was renamed, and a saved run that is not queued again.
    text = SLURM.read_text()
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    assert {"--requeue", "--signal=USR1@300"} <= set(re.findall(r"^#SBATCH (\S+)", text, re.MULTILINE))
    command = re.search(r"exec xorl train (.*?)'", text, re.DOTALL)
    values = {'"$SLURM_NNODES"': "2", '"$SLURM_NODEID"': "1", '"$MASTER"': "node-0", "\\\n": ""}
    arguments = command.group(1)
    for name, value in values.items():
        arguments = arguments.replace(name, value)
    assert checked(shlex.split(arguments)).params["node_rank"] == 1
    [codes] = re.findall(r"^  ([\d |]+)\) scontrol requeue", text, re.MULTILINE)
    assert [int(code) for code in codes.split("|")] == SAVED


def test_the_kubernetes_example_is_sound() -> None:
    # Catches a manifest that does not parse, and one that gives up a run that saved or repeats bad input for ever.
    service, job = YAML(typ="safe").load_all((ROOT / "configs" / "kubernetes" / "train.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["command"][:2] == ["xorl", "train"]
    arguments = [part.replace("$(JOB_COMPLETION_INDEX)", "1") for part in container["command"][2:] + container["args"]]
    master = str(checked(arguments).params["master_addr"])
    assert master == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    rules = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules}
    assert codes == {"FailJob": [BAD_INPUT, DIVERGED], "Ignore": SAVED}  # others are worth another try
    assert pod["terminationGracePeriodSeconds"] >= 300


@pytest.mark.parametrize("name", ["slurm/train.sbatch", "kubernetes/train.yaml"])
def test_the_examples_say_what_they_are(name: str) -> None:
    # Catches an example without a word of how to start it.
    assert name in (ROOT / "configs" / name).read_text().partition("#SBATCH")[0].partition("apiVersion")[0]
