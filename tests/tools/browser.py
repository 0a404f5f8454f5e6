"""A headless Chromium, driven through the DevTools protocol over a pipe, with nothing to install.

The protocol: https://chromedevtools.github.io/devtools-protocol. Messages are JSON, each with a
zero byte behind it; Chromium reads them from file 3 and writes its own to file 4.
"""

import base64
import json
import os
import select
import shutil
import subprocess
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
                None)
FLAGS = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
         "--disable-background-networking --disable-component-update --disable-dev-shm-usage "
         "--hide-scrollbars --remote-debugging-pipe").split()


class Browser:
    """One page. `errors` has what the page has thrown or logged as an error."""

    def __init__(self, profile: str, width: int = 1280, height: int = 900) -> None:
        to_browser, self.output = os.pipe()
        self.input, from_browser = os.pipe()
        self.received = b""
        self.number = 0
        self.session: dict[str, str] = {}
        self.errors: list[str] = []
        self.loaded: set[str] = set()
        # bash moves the two pipes to the numbers that Chromium expects
        command = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["bash", "-c", command, "bash", str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        self.ask("Page.setLifecycleEventsEnabled", enabled=True)
        self.resize(width, height)

    def ask(self, method: str, **params: Any) -> dict:
        """Sends a command and waits for its answer."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params, **self.session}
        os.write(self.output, json.dumps(message).encode() + b"\0")
        while (answer := self.receive()).get("id") != self.number:
            pass
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def receive(self) -> dict:
        while b"\0" not in self.received:
            assert select.select([self.input], [], [], 60)[0], "the browser says nothing"
            more = os.read(self.input, 2**20)
            assert more, "the browser has ended"
            self.received += more
        text, _, self.received = self.received.partition(b"\0")
        message = json.loads(text)
        params = message.get("params", {})
        is_error = {"Runtime.exceptionThrown": True,
                    "Runtime.consoleAPICalled": params.get("type") in ("error", "assert"),
                    "Log.entryAdded": params.get("entry", {}).get("level") == "error"}
        if is_error.get(message.get("method")):
            self.errors.append(json.dumps(params))
        if message.get("method") == "Page.lifecycleEvent" and params["name"] == "load":
            self.loaded.add(params["loaderId"])
        return message

    def open(self, address: str) -> None:
        """Opens a page and waits until it is loaded."""
        # or an address that differs in its #part alone would load nothing
        self.ask("Page.navigate", url="about:blank")
        loader = self.ask("Page.navigate", url=address)["loaderId"]
        while loader not in self.loaded:
            self.receive()

    def evaluate(self, expression: str) -> Any:
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key)

    def click(self, selector: str) -> None:
        """A click of the mouse in the middle of an element."""
        box = self.evaluate(f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{block: "center"}});
            const box = element.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()""")
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left",
                     clickCount=1)

    def resize(self, width: int, height: int, scheme: str = "light") -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=False,
                 deviceScaleFactor=1)
        self.ask("Emulation.setEmulatedMedia",
                 features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self) -> bytes:
        """The whole page as a PNG."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def close(self) -> None:
        self.ask("Browser.close")
        self.process.wait(30)
        os.close(self.output)
        os.close(self.input)
