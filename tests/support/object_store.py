"""object_store: a server of this process that speaks S3, which s3fs and boto3 find by themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import pytest
import s3fs
from moto.server import ThreadedMotoServer

from ports import free_port


@contextmanager
def object_store(patch: pytest.MonkeyPatch) -> Iterator[Any]:
    """boto3's client of it, which has a bucket `corpus`; `patch` must be undone when this ends."""
    port = free_port()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    values = {"ENDPOINT_URL": f"http://127.0.0.1:{port}", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
    for name, value in {**values, "DEFAULT_REGION": "us-east-1"}.items():
        patch.setenv(f"AWS_{name}", value)
    # It would go on with the server of the test before.
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="corpus")
    yield client
    server.stop()
