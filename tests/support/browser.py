"""A page in a browser without a screen, which a test can ask by JavaScript."""

import contextlib
import json
import os
import shutil
import subprocess
import time

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
# The browser reads commands from file 3 and answers in file 4, each message with a zero byte at its end.
START = 'exec "$0" --headless --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir="$1" 3<&{} 4>&{}'


class Page:
    """A page of a given width in pixels. `evaluate` returns the value of an expression."""

    def __init__(self, commands, answers, width):
        self._commands, self._answers = commands, answers
        self._number, self._session = 0, {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, url):
        self._call("Page.navigate", url=url)

    def evaluate(self, expression):
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression, timeout_s=30):
        """Return once an expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, (expression, self.evaluate("document.body.innerText"))
            time.sleep(0.05)

    def _call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = json.loads(b"".join(iter(lambda: self._answers.read(1), b"\0")))
            if answer.get("id") == self._number:
                assert "result" in answer, answer
                return answer["result"]


@contextlib.contextmanager
def opened(url, profile, *, width=1280):
    """The page at a URL; the browser ends with the block."""
    read, commands = os.pipe()
    answers, write = os.pipe()
    command = ["bash", "-c", START.format(read, write), BROWSER, str(profile)]
    process = subprocess.Popen(command, pass_fds=(read, write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(read)
    os.close(write)
    with open(commands, "wb") as sending, open(answers, "rb") as receiving:
        try:
            page = Page(sending, receiving, width)
            page.open(url)
            yield page
        finally:
            process.kill()
            process.wait()
