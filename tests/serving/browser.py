"""Drives a headless Chromium by its DevTools protocol: no driver to install."""

import contextlib
import itertools
import json
import re
import shutil
import subprocess
import tempfile
import time

import httpx
import pytest


class Tab:
    """A page: runs JavaScript in it, types, and notes what its console says."""

    def __init__(self, socket):
        self._socket, self._numbers, self.complaints = socket, itertools.count(1), []
        for domain in ("Page", "Runtime", "Log"):
            self._send(f"{domain}.enable")

    def _send(self, method, **parameters):
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message):
        told = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(told["exceptionDetails"]["exception"].get("description", "an exception"))
        if message.get("method") == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        if message.get("method") == "Runtime.consoleAPICalled" and told["type"] == "error":
            self.complaints.append(str(told["args"]))

    def run(self, code):
        """The value of an expression."""
        got = self._send("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]["exception"].get("description")
        return got["result"].get("value")

    def wait(self, code, seconds=60):
        """Until an expression is true."""
        deadline = time.monotonic() + seconds
        while not (found := self.run(code)):
            assert time.monotonic() < deadline, f"never: {code}; status: {self.run('status.textContent')!r}"
            time.sleep(0.05)
        return found

    def open(self, url):
        self._send("Page.navigate", url="about:blank")
        self._send("Page.navigate", url=url)
        self.wait("document.querySelector('#model')?.options.length > 0")

    def type(self, text):
        self._send("Input.insertText", text=text)

    def key(self, key, modifiers=0):
        """A key; modifiers: 2 is Ctrl, 8 is Shift, 10 both."""
        codes = {"Enter": 13, "Escape": 27, "z": 90, ".": 190, "ArrowDown": 40}
        for kind in ("rawKeyDown", "keyUp"):
            self._send(
                "Input.dispatchKeyEvent", type=kind, key=key, modifiers=modifiers, windowsVirtualKeyCode=codes[key]
            )

    def size(self, width, height, mobile=False):
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=mobile)

    def dark(self, is_dark=True):
        value = "dark" if is_dark else "light"
        self._send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def picture(self, file):
        import base64

        file.write_bytes(base64.b64decode(self._send("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def chromium():
    """A new tab, or a skip where there is no Chromium."""
    connect = pytest.importorskip("websockets.sync.client", reason="needs the extra serve").connect
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("needs Chromium, e.g. apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-port=0",
        ]
        quiet = ["--no-first-run", "--disable-background-networking", "--no-proxy-server", f"--user-data-dir={home}"]
        browser = subprocess.Popen([program, *flags, *quiet, "about:blank"], stderr=subprocess.PIPE, text=True)
        try:
            found = None
            while not found:
                line = browser.stderr.readline()
                assert line, "Chromium ended"
                found = re.search(r"DevTools listening on ws://([^/]+)/", line)
            tabs = httpx.get(f"http://{found[1]}/json", trust_env=False, timeout=60).json()
            url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            with connect(url, max_size=None, proxy=None) as socket:
                yield Tab(socket)
        finally:
            browser.terminate()
            browser.wait(30)
            browser.stderr.close()
