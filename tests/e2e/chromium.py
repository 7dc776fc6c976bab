"""A headless Chromium for tests, spoken to in its DevTools protocol over a pipe: no driver and no further package is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-default-browser-check", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--disable-extensions", "--hide-scrollbars",
)  # fmt: skip


def find() -> str | None:
    """The browser on the PATH, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser with one page. What the page complains about is collected in ``complaints``, what it asks for in ``requests``."""

    def __init__(self, program: str, profile: Path) -> None:
        self._read, theirs_out = os.pipe()
        theirs_in, self._write = os.pipe()

        def fds() -> None:  # the browser listens on 3 and answers on 4
            os.dup2(os.dup(theirs_in), 3) if theirs_in != 3 else None
            os.dup2(theirs_out, 4)

        # Away from 3 and 4, so that one dup2 cannot overwrite what the next one needs.
        theirs_in, theirs_out = (self._moved(fd) for fd in (theirs_in, theirs_out))
        command = [program, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self._process = subprocess.Popen(command, preexec_fn=fds, pass_fds=(3, 4, theirs_in, theirs_out), **silent)
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    @staticmethod
    def _moved(fd: int) -> int:
        if fd > 10:
            return fd
        import fcntl

        new = fcntl.fcntl(fd, fcntl.F_DUPFD, 20)
        os.close(fd)
        return new

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self._session = None
            self.call("Browser.close")
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 30
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "the browser has closed"
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._listen(message.get("method", ""), message.get("params", {}))
        return message

    def _listen(self, event: str, values: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(values["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps([values["type"], values["args"]]))
        elif event == "Log.entryAdded":
            self.complaints.append(json.dumps(values["entry"]))
        elif event == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])

    def open(self, path: Path, *, width: int = 1280, dark: bool = False) -> None:
        """Show a file in a window of this size."""
        self.complaints.clear()
        self.requests.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, still])
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.until("document.readyState === 'complete' && location.protocol === 'file:'")

    def eval(self, expression: str) -> Any:
        """Return the (JSON) value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression is true in the page."""
        end = time.monotonic() + 15
        while not self.eval(condition):
            assert time.monotonic() < end, f"never true: {condition}"
            time.sleep(0.02)

    def point(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def centre(self, selector: str) -> tuple[float, float]:
        """Scroll the first element of a selector into view and return its middle."""
        script = """(() => { const e = document.querySelector(%s); e.scrollIntoView({block: "center"});
            const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"""
        x, y = self.eval(script % json.dumps(selector))
        return x, y

    def hover(self, selector: str) -> None:
        self.point(*self.centre(selector))

    def click(self, selector: str) -> None:
        x, y = self.centre(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press a named key (Tab, ArrowRight, Enter, …)."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        extra = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=codes[key], **extra)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=codes[key])

    def picture(self) -> bytes:
        """Return the window as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
