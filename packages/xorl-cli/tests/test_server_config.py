"""The service's configuration: frozen, flat, documented, strict, and the same engine as local training's."""

import re
from pathlib import Path
from typing import Any

import pytest

from xorl.config import (
    ConfigError,
    LoadedServerConfig,
    ServerConfig,
    load_config,
    load_server_config,
    server_config_from_mapping,
)
from xorl.config.options import all_options
from xorl.config.server import num_workers
from xorl.config.server_conflicts import SERVER_UNSUPPORTED, server_unsupported_values
from xorl.config.server_training import SERVER_NAMES, local_path, training_config
from xorl.config.show import show
from xorl.config.unsupported import UNSUPPORTED, UnsupportedValues

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = all_options(ServerConfig)

# A refused value of each option whose row says "anything but the default", where it cannot be guessed from the type.
REFUSED: dict[str, Any] = {
    "foundation": {"num_hidden_layers": 2},
    "encoders": {"video": {"model_path": "a"}},
    "pipeline_parallel_schedule": "GPipe",
    "cp_fsdp_mode": "none",
}


def loaded(**options: Any) -> LoadedServerConfig:
    """Loads a sound configuration with some options set."""
    return server_config_from_mapping({"model_path": "m"} | options)


def problems_with(**options: Any) -> list[tuple[str, str]]:
    """Returns (path, message) of what is wrong with a sound configuration with some options set."""
    try:
        loaded(**options)
    except ConfigError as error:
        return [(problem.path, problem.message) for problem in error.problems]
    return []


@pytest.mark.parametrize("mode", ["none", "ddp", "fsdp2"])
@pytest.mark.parametrize("switch", ["seed", "enable_lora", "enable_qlora"])
def test_what_is_shown_without_options_loads_to_the_same(tmp_path: Path, mode: str, switch: str) -> None:
    # Would catch processes of the service that refuse the configuration which the launcher has accepted.
    first = loaded(data_parallel_mode=mode, **{switch: 3 if switch == "seed" else True})
    (tmp_path / "a.yaml").write_text(show(first))
    assert load_server_config(tmp_path / "a.yaml").config == first.config


def test_what_is_shown_loads_to_the_same(tmp_path: Path) -> None:
    # Would catch `xorl config show --service` printing what cannot be read back, or what reads back otherwise.
    source = tmp_path / "a.yaml"
    source.write_text("model_path: m\nenable_qlora: true\ninference_endpoints: [{host: a, port: 30000}]\nseed: 7\n")
    first = load_server_config(source, ("--server.storage_limit", "10GB", "--server.log_level=DEBUG"))
    (tmp_path / "b.yaml").write_text(show(first))
    assert load_server_config(tmp_path / "b.yaml").config == first.config
    assert first.origins["seed"] == f"{source}:4"
    assert first.origins["log_level"] == "--server.log_level"
    assert first.origins["enable_lora"] == "default, enable_qlora"
    assert first.origins["quant_group_size"] == "default, quant_format nvfp4"
    assert (first.config.storage_limit_bytes, first.config.model_name) == (10 * 10**9, "m")


@pytest.mark.parametrize(
    ("options", "path", "wanted"),
    [
        ({"train": {"lr": 1}}, "train", "no sections: write those of train at the top level"),
        ({"lr": 1e-4}, "lr", "clients of the service send it with each optimizer step"),
        ({"datasets": []}, "datasets", "the service trains on the data that clients send"),
        ({"param_dtype": "bf16"}, "param_dtype", "that the service does not have"),
        ({"exclude_modules": []}, "exclude_modules", "did you mean qlora_exclude_modules?"),
        ({"optimiser": "sgd"}, "optimiser", "did you mean optimizer?"),
        ({"storage_limit": "10 XB"}, "storage_limit", "in the form described below"),
        ({"worker_bind_address": "ipc://a"}, "worker_bind_address", "in the form described below"),
        ({"idle_session_timeout": 0}, "idle_session_timeout", "number > 0"),
        ({"log_level": "debug"}, "log_level", "did you mean DEBUG?"),
        ({"sampler_cache_tokens": 15}, "sampler_cache_tokens", "integer >= 16"),
        ({"model_path": None}, "model_path", "both are null"),
        ({"api_token": "secret"}, "api_token", "in the form described below"),
        ({"inference_endpoints": [{"host": "a"}]}, "inference_endpoints.0.port", "required option is missing"),
        ({"inference_endpoints": ["a:1"]}, "inference_endpoints.0", "expected an inference endpoint, a mapping with"),
        ({"inference_endpoints": [{"host": "a", "port": 1}] * 2}, "inference_endpoints.1", "listed twice"),
        ({"allowed_inference_hosts": ["gpu1", "10.0.0.0/33"]}, "allowed_inference_hosts.1", "10.0.0.0/33"),
        ({"allowed_inference_hosts": ["10.0.0.1/8"]}, "allowed_inference_hosts.0", "has host bits set"),
        ({"allowed_inference_hosts": ["10.0"]}, "allowed_inference_hosts.0", "a host name, an address or a network"),
        ({"enable_lora": True, "max_lora_rank": 8}, "max_lora_rank", "below lora_rank (32)"),
        ({"enable_lora": True, "optimizer": "sgd"}, "optimizer", "adapters by AdamW in fp32: set optimizer to adamw"),
        ({"enable_lora": True, "enable_reentrant": True}, "enable_reentrant", "set enable_reentrant to false"),
        ({"enable_lora": True, "freeze_router": False}, "freeze_router", "adapters do not train routers"),
        ({"enable_lora": True, "tensor_parallel_size": 2}, "tensor_parallel_size", "only with full weights"),
        ({"enable_qlora": True, "lora_target_modules": []}, "lora_target_modules", "the list is empty"),
        ({"data_parallel_mode": "ddp", "data_parallel_shard_size": 2}, "data_parallel_shard_size", "does not shard"),
        (
            {"reshard_after_forward": False, "enable_full_shard": True},
            "reshard_after_forward",
            "contradicts enable_full_shard",
        ),
        ({"load_weights_mode": "dcp"}, "load_weights_mode", "needs load_checkpoint_path"),
        (
            {"load_weights_mode": "safetensors", "load_checkpoint_path": "a"},
            "load_weights_mode",
            "set load_weights_mode",
        ),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], path: str, wanted: str) -> None:
    # Would catch an option of the service that is accepted and ignored, or an error in terms of another file.
    found = [message for at, message in problems_with(**options) if at == path]
    assert len(found) == 1
    assert wanted in found[0]
    assert not re.search(r"\b(model|data|train|lora)\.\w", found[0])


@pytest.mark.parametrize(
    ("options", "path", "condition"),
    [
        ({"lora_rank": 8}, "lora_rank", "unless enable_lora is true"),
        ({"max_lora_rank": 64}, "max_lora_rank", "unless enable_lora is true"),
        ({"enable_lora": True, "quant_format": "nf4"}, "quant_format", "unless enable_qlora is true"),
        ({"muon_lr": 0.1}, "muon_lr", "unless optimizer is muon"),
        ({"data_parallel_mode": "ddp", "enable_forward_prefetch": True}, "enable_forward_prefetch", "is fsdp2"),
        ({"attention_cast_bf16": True}, "attention_cast_bf16", "unless enable_mixed_precision is false"),
    ],
)
def test_an_option_without_effect_is_listed_and_reset(options: dict[str, Any], path: str, condition: str) -> None:
    # Would catch a service that a leftover option keeps from starting, or one that is ignored in silence.
    found = loaded(**options)
    assert [option.path for option in found.without_effect] == [path]
    assert condition in found.without_effect[0].condition
    assert getattr(found.config, path) == getattr(loaded(enable_lora=options.get("enable_lora", False)).config, path)


def test_an_explicit_value_wins_over_a_default() -> None:
    # Would catch the default of one option that ends the service.
    assert not loaded(reshard_after_forward=False).config.enable_full_shard


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        (("--train.lr", "1"), "no sections; write --server.lr VALUE"),
        (("--server.seed",), "the value is missing; write --server.seed VALUE"),
        (("--server.sed", "1"), "unknown option; did you mean seed?"),
    ],
)
def test_overrides_begin_with_server(tmp_path: Path, override: tuple[str, ...], wanted: str) -> None:
    # Would catch an override whose mistake is reported under a name that nobody typed.
    (tmp_path / "a.yaml").write_text("model_path: m\n")
    with pytest.raises(ConfigError) as caught:
        load_server_config(tmp_path / "a.yaml", override)
    assert wanted in str(caught.value)
    assert caught.value.problems[0].origin.where == override[0]


@pytest.mark.parametrize("option", [option for option in OPTIONS.values() if server_unsupported_values(option.path)])
def test_every_refusal_is_made(option) -> None:
    # Would catch an option whose capability is not there and that is accepted.
    for row in server_unsupported_values(option.path):
        for value in row.values or (REFUSED.get(option.path, refused_value(option)),):
            found = [message for path, message in problems_with(**{option.path: value}) if path == option.path]
            assert [message for message in found if row.reason in message and row.instead in message]


def refused_value(option) -> object:
    if option.type == "true or false":
        return option.default == "false"
    return int(float(option.default)) + 1 if option.default[0].isdecimal() else None


@pytest.mark.parametrize("row", SERVER_UNSUPPORTED, ids=lambda row: row.option)
def test_every_row_names_an_option(row: UnsupportedValues) -> None:
    # Would catch a row that has lost its option, and with it a value that nobody refuses.
    assert row.option in OPTIONS


def test_what_local_training_refuses_the_service_refuses() -> None:
    # Would catch a shared option that is refused locally and slips through here.
    refused = {row.option for row in UNSUPPORTED}
    shared = {option for option in OPTIONS if local_path(option) in refused}
    assert {option for option in shared if not server_unsupported_values(option)} == set()


def test_every_option_is_either_read_or_refused() -> None:
    # Would catch an option of the service that is documented, accepted, and has no effect whatever.
    source = ROOT / "packages" / "xorl-cli" / "src" / "xorl"
    server = _code_of(source / "server")
    # What is an option of local training, too, is read where that builds the model.
    shared = server + _code_of(source / "train") + (source / "config" / "resolve.py").read_text(encoding="utf-8")
    refused = {
        path for path in OPTIONS for row in server_unsupported_values(path) if not row.values and not row.matches
    }
    refused.add("sync_inference_method")  # which has one value, the one that is built
    names = {"storage_limit": "storage_limit_bytes"} | {
        option: path.rpartition(".")[2] for path, option in SERVER_NAMES.items()
    }
    unread = [
        path
        for path, option in OPTIONS.items()
        if not re.search(rf"\.{names.get(path, option.name)}\b", shared if path in SERVER_NAMES.values() else server)
    ]
    assert sorted(set(unread) - refused) == []


def _code_of(folder: Path) -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.py")))


@pytest.mark.parametrize(
    ("options", "num_gpus", "expected"),
    [
        ({}, 8, 1),
        ({"data_parallel_shard_size": 4, "data_parallel_replicate_size": 2}, 0, 8),
        ({"data_parallel_shard_size": -1}, 8, 8),
        ({"data_parallel_shard_size": -1}, 0, 1),
        ({"data_parallel_shard_size": 2, "data_parallel_replicate_size": -1}, 8, 8),
        ({"data_parallel_mode": "ddp", "data_parallel_replicate_size": -1}, 4, 4),
        ({"data_parallel_mode": "none"}, 4, 1),
        ({"data_parallel_shard_size": 2, "ulysses_parallel_size": 4}, 0, 8),
        ({"data_parallel_shard_size": -1, "ulysses_parallel_size": 2}, 8, 8),
    ],
)
def test_the_sizes_say_how_many_workers_start(options: dict[str, Any], num_gpus: int, expected: int) -> None:
    # Would catch workers that wait for ranks nobody starts.
    assert num_workers(loaded(**options).config, num_gpus) == expected


def test_a_size_that_leaves_gpus_over_is_an_error() -> None:
    # Would catch -1 that silently takes fewer GPUs than all.
    for option, others, nearest in (
        ("data_parallel_replicate_size", {}, "is 2"),
        ("ulysses_parallel_size", {}, "is 2"),
        ("ulysses_parallel_size", {"data_parallel_replicate_size": 3}, "change one of the sizes"),
    ):
        config = loaded(data_parallel_shard_size=-1, **{option: 3}, **others).config
        with pytest.raises(
            ValueError, match=rf"^{option}: .* all 8 GPUs, but .*{option} 3 does not divide 8.* {nearest}"
        ):
            num_workers(config, 8)


def test_the_engine_is_the_one_of_local_training() -> None:
    # Would catch an option of the service that does not reach the model that its workers build.
    lora = {"enable_qlora": True, "qlora_exclude_modules": ["lm_head"], "lora_rank": 4}
    config = loaded(**lora, lm_head_fp32=False, merge_qkv=False, seed=7).config
    local = training_config(config)
    assert (local.lora.enable_lora, local.lora.exclude_modules, local.lora.lora_rank) == (True, ["lm_head"], 4)
    assert (local.model.lm_head_fp32, local.model.merge_qkv, local.train.seed) == (False, False, 7)
    assert (local.train.load_weights_mode, local.train.param_dtype) == ("broadcast", "bf16")
    assert local.train.load_checkpoint_path is None
    for path, option in SERVER_NAMES.items():
        section, name = path.split(".")
        if option != "load_weights_mode":
            assert getattr(getattr(local, section), name) == getattr(config, option), option


def test_the_page_about_the_service_is_sound(tmp_path: Path) -> None:
    # Would catch a document whose configurations no longer load.
    text = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 2
    for block in blocks:
        (tmp_path / "a.yaml").write_text(block)
        load_server_config(tmp_path / "a.yaml", ("--server.model_path", "m"))


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("api_token: ${XORL_TEST_KEY}", ()),
        ("api_token: tml-zebra", ()),
        ("{api_token: [tml-zebra], lora_rank: 0}", ()),
        ("api_token: &key corp-zebra-012", ()),
        ("'api_token' : corp-zebra-012\napi_token: corp-zebra-012", ()),
        ("api_tokn: tml-zebra-0123456789", ()),
        ("api_token: {a: corp-zebra-012}", ()),
        ("api_token: tml-zebra-${", ()),
        ("api_token: 'corp-zebra-012", ()),
        ("", ("--server.api_token", "tml-zebra")),
        ("", ("--server.api_token=tml-zebra",)),
        ("", ("--server.api_tokn", "tml-zebra-0123456789")),
        ("api_token: tml-zebra-0123456789", ("--server.api_token.x", "1")),
        ("lora_rank: ${XORL_TEST_KEY}", ()),
        ("qlora_exclude_modules: ${XORL_TEST_KEY}", ()),
        ("log_level: ${XORL_TEST_LEVEL}", ()),
        ("pipeline_parallel_schedule: ${XORL_TEST_SCHEDULE}", ()),
        ("max_sessions: ${XORL_TEST_NUMBER}", ()),
        ("max_sessions: '${XORL_TEST_NUMBER}'", ()),
        ("inference_endpoints: [{host: '${XORL_TEST_KEY}', port: 1}, {host: '${XORL_TEST_KEY}', port: 1}]", ()),
        ("inference_endpoints: ['${XORL_TEST_KEY}']", ()),
    ],
)
def test_no_error_shows_a_secret_or_what_a_variable_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, overrides: tuple[str, ...]
) -> None:
    # Catches a key that lands in a terminal, a log or a bug report because it was refused.
    for name, value in {"KEY": "corp-zebra-012", "LEVEL": "zebra", "SCHEDULE": "zebra", "NUMBER": "-7707"}.items():
        monkeypatch.setenv(f"XORL_TEST_{name}", value)
    file = tmp_path / "server.yaml"
    file.write_text(f"model_path: m\n{text}\n" if ": " in text and text[0] != "{" else text)
    with pytest.raises(ConfigError) as caught:
        load_server_config(file, overrides)
    assert not re.search("zebra|7707|GPipe is", str(caught.value))
    if "${XORL_TEST_" in text and "api_token" not in text:
        assert "${XORL_TEST_" in "".join(problem.message for problem in caught.value.problems)


def test_a_key_is_hidden_from_the_command_that_has_none(tmp_path: Path) -> None:
    # Catches the service's file, given to `xorl train`, whose unknown options are printed with their lines.
    file = tmp_path / "server.yaml"
    file.write_text("model_path: m\napi_token: tml-zebra-0123456789\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert "api_token: ***" in str(caught.value)
    assert "zebra" not in str(caught.value)


def test_a_secret_is_masked_where_the_configuration_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches `xorl config show --service` in a bug report, or a logged configuration, that gives the key away.
    key = "tml-0123456789abcdef"
    monkeypatch.setenv("XORL_TEST_KEY", key)
    monkeypatch.setenv("XORL_TEST_MODEL", "org/model")
    file = tmp_path / "server.yaml"
    file.write_text("model_path: ${XORL_TEST_MODEL}\napi_token: ${XORL_TEST_KEY}\n")
    found = load_server_config(file)
    text = show(found)
    assert key not in f"{text}{found}{found.config.model_dump()}{found.config.model_dump_json()}"
    row = next(line for line in text.splitlines() if line.startswith("api_token"))
    assert re.fullmatch(r'api_token: "\*+" +# .*server.yaml:2, environment XORL_TEST_KEY', row)
    assert "model_path: org/model " in text
    # The processes of the service read the whole.
    file.write_text(show(found, with_secrets=True))
    assert load_server_config(file).config == found.config
