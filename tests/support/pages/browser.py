"""A real browser for tests: Chromium, spoken to over a pipe by its DevTools protocol, which needs no package.

`CHROMIUM` is empty where there is none. `audit` is what a page is to hold at every width and in both colour schemes.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
WORDS = tuple(
    f"--{word}"
    for word in (
        *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
        *("disable-component-update", "disable-sync", "disable-dev-shm-usage", "allow-file-access-from-files"),
        *("remote-debugging-pipe", "hide-scrollbars"),
    )
)
SECONDS = 60
"""After which an answer is given up."""
DRAWN = "new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))"
AUDIT = Path(__file__).with_name("page_audit.js").read_text(encoding="utf-8")


class Page:
    """One tab: what it asked for, and what it complained of.

    Attributes:
        errors: exceptions and messages of the console that are errors.
        requests: addresses that were asked for.
    """

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe
        target = pipe.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = pipe.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._ask(f"{domain}.enable")

    def open(self, url: str, *, width: int, dark: bool = False, height: int = 900) -> None:
        """Loads a page in a window of that many CSS pixels, and waits until it has."""
        self._measure(width, height, dark)
        self.errors.clear()
        self.requests.clear()
        self._pipe.events.clear()
        self._ask("Page.navigate", url=url)
        self._pipe.wait_for("Page.loadEventFired")
        self.run(DRAWN)

    def resize(self, *, width: int, dark: bool = False, height: int = 900) -> None:
        """Shows the page that is loaded in another window, and waits until it is drawn."""
        self._measure(width, height, dark)
        self.run(DRAWN)

    def _measure(self, width: int, height: int, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def follow(self, url: str) -> str:
        """Opens a page that leads on at once, and gives the address at which that ends."""
        self._pipe.events.clear()
        self._ask("Page.navigate", url=url)
        self._pipe.wait_for("Page.loadEventFired", times=2)
        return self.run("location.href")

    def run(self, script: str) -> Any:
        """The value of a script, or what its promise gives.

        Raises:
            RuntimeError: it threw.
        """
        found = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:500])
        return found["result"].get("value")

    def press(self, key: str, code: int, *, shift: bool = False) -> None:
        """Presses a key where the focus is."""
        given = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        for kind in ("keyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", type=kind, **given)

    def audit(self) -> dict[str, Any]:
        """What is wrong with the page as it is shown: texts of low contrast, what is wider than the window, controls
        without a name."""
        return self.run(AUDIT)

    def picture(self, path: Path, height: int = 1400) -> None:
        """Writes a PNG of the page's top."""
        size = self.run("({width: innerWidth, height: document.documentElement.scrollHeight})")
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(height, size["height"]), "scale": 1}
        found = self._ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _ask(self, method: str, **given: Any) -> dict[str, Any]:
        found = self._pipe.ask(method, session=self._session, **given)
        for event in self._pipe.events:
            self._hear(event)
        self._pipe.events[:] = [each for each in self._pipe.events if each["method"].startswith("Page.")]
        return found

    def _hear(self, event: dict[str, Any]) -> None:
        given = event.get("params", {})
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(given["exceptionDetails"])[:300])
        elif event["method"] == "Runtime.consoleAPICalled" and given["type"] in ("error", "assert"):
            self.errors.append(json.dumps(given["args"])[:300])
        elif event["method"] == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.errors.append(given["entry"]["text"])


class _Pipe:
    """Messages to the browser and from it, each ended by a zero byte."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._rest = write, read, b""
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []

    def ask(self, method: str, session: str | None = None, **given: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": given} | ({"sessionId": session} if session else {})
        sent = json.dumps(message).encode() + b"\0"
        while sent:
            sent = sent[os.write(self._write, sent) :]
        end = time.monotonic() + SECONDS
        while True:
            answer = self._next(end)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._keep(answer)

    def wait_for(self, method: str, times: int = 1) -> None:
        """Returns when there were that many such events."""
        end = time.monotonic() + SECONDS
        while sum(each["method"] == method for each in self.events) < times:
            self._keep(self._next(end))

    def _keep(self, message: dict[str, Any]) -> None:
        if "method" in message:
            self.events.append(message)

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            got = os.read(self._read, 1 << 16)
            if not got:
                raise EOFError("the browser ended")
            self._rest += got
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A tab of a browser of its own, which ends afterwards."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="lowtide-browser-", ignore_cleanup_errors=True) as profile:
        # The browser reads its pipe as 3 and writes to 4.
        words = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        command = ["bash", "-c", words, "bash", CHROMIUM, *WORDS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Page(_Pipe(ours_out, ours_in))
        finally:
            os.close(ours_out)
            os.close(ours_in)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
            process.wait()
