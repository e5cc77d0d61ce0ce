"""What the service refuses."""

from xorl.server.messages import Rejected
from xorl.server.operations import Failure


def assert_refused(answer: object, status: int, *words: str) -> None:
    """Of a request that was not accepted, or an operation that failed."""
    assert isinstance(answer, Failure | Rejected), answer
    assert answer.status == status, answer
    assert [word for word in words if word not in answer.message] == [], answer
