"""The names of the service's base, and the one by which clients find its tokenizer."""

from pathlib import Path

import pytest

from xorl.config import server_config_from_mapping
from xorl.server.orchestrator.options import options_from_config

QUICKSTART = Path(__file__).resolve().parents[3] / "configs" / "quickstart"
MODEL = {"model_path": None, "config_path": str(QUICKSTART)}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, str(QUICKSTART)),
        ({"model_name": "Org/Model"}, "Org/Model"),
        ({"model_name": "mine", "tokenizer_path": str(QUICKSTART)}, "mine"),
        ({"model_name": "mine", "tokenizer_path": "Org/Model"}, "Org/Model"),
        (
            {"model_name": "mine", "config_path": str(QUICKSTART / "config.json"), "tokenizer_path": "."},
            str(Path.cwd()),
        ),
    ],
)
def test_clients_are_told_a_name_that_locates_the_tokenizer(given, name):
    """Catches a tokenizer that clients ask the Hub for, and a Hub's name that a folder of the service replaces."""
    config = server_config_from_mapping(MODEL | given).config
    options = options_from_config(
        config, api_address="a", worker_address="b", workers_file=None, restarts_file=None, keys=None
    )
    assert options.tokenizer_name == name
    assert set(options.base_names) == {
        options.model_name,
        options.model_path,
        name,
        *filter(None, [options.tokenizer_path]),
    }
