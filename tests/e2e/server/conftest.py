"""`serve`: starts real services, which end with the module; `service` and `chat_service`: those that modules share.

The clients are the public ones, from the dependency group `clients`; where it is not installed, these tests are
skipped and say so.
"""

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from service import QUICKSTART, ROOT, Serve, Service, launch

if TYPE_CHECKING:
    import openai

HERE = Path(__file__).parent
CLIENTS = ("inspect_ai", "litellm", "openai", "tinker", "xorl_client")
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</>\n{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% if not loop.last %}\n{% endif %}{% endfor %}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ mood | default('') }}{% endif %}"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in CLIENTS if importlib.util.find_spec(name) is None]
    for item in items:
        if missing and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs the public clients: uv sync --group clients"))


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """(config file, further launcher arguments, **options of the service) -> a Service; all are stopped at the end."""
    started: list[Service] = []

    def start(config: Path = QUICKSTART, *arguments: str, **options: object) -> Service:
        service = launch(tmp_path_factory.mktemp("service"), config, arguments, options)
        started.append(service)
        service.start()
        return service

    yield start
    for service in started:
        if service.process is not None and service.process.poll() is None:
            service.stop()


# Those that modules share, by name. They take 4 % of a core while nobody calls them.
SHARED: dict[str, Service] = {}


def stop_shared() -> None:
    while SHARED:
        _, service = SHARED.popitem()
        if service.process is not None and service.process.poll() is None:
            service.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is None or HERE not in nextitem.path.parents:
        stop_shared()


def pytest_sessionfinish() -> None:
    stop_shared()  # also where the first failure ends the session


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    """The quickstart's service: adapters over a tiny model in fp32, two CPU ranks, loopback, no key.

    Modules share it; one that needs another, or does worse to it than to stop and start it, has a fixture of its own.
    """
    if "service" not in SHARED:
        SHARED["service"] = launch(tmp_path_factory.mktemp("shared_service"), QUICKSTART, (), {})
        SHARED["service"].start()
    return SHARED["service"]


@pytest.fixture(scope="module")
def chat_service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    """The quickstart's service on one rank, with a chat template that knows tools."""
    if "chat" in SHARED:
        return SHARED["chat"]
    folder = tmp_path_factory.mktemp("chat_service")
    tokenizer = folder / "tokenizer"
    shutil.copytree(ROOT / "configs" / "quickstart", tokenizer)
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    options = {"tokenizer_path": tokenizer, "data_parallel_replicate_size": 1}
    SHARED["chat"] = launch(folder, QUICKSTART, (), options)
    SHARED["chat"].start()
    return SHARED["chat"]


@pytest.fixture
def client(chat_service: Service) -> Iterator["openai.OpenAI"]:
    """OpenAI's client of `chat_service`."""
    import openai  # noqa: PLC0415  (a dependency group that is not always there)

    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(
        base_url=f"{chat_service.url}/v1", api_key=chat_service.key, http_client=http, max_retries=0
    ) as client:
        yield client
