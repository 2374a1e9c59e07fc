"""Stands in for `hearth serve` in a container: its two ports, and nothing behind them.

The tests tell it what to do by files in /var/lib/hearth: `ready` (be ready), `exit` (end with that code),
`exit-at-start` (the next one ends with that code), `answer` (what the engine's port answers; default Rome),
`progress` (what /status says), `drain` (seconds from SIGTERM to the end), `last` (what it leaves as
last-status.json). It writes `signals` for each SIGTERM.
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

STATE = Path("/var/lib/hearth")


def told(name, default=""):
    try:
        return (STATE / name).read_text().strip()
    except OSError:
        return default


class Port(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def say(self, status, body, kind="text/plain"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Supervisor(Port):
    def do_GET(self):
        ready = bool(told("ready"))
        if self.path == "/status":
            state = {
                "state": "serving" if ready else "starting",
                "phase": "serving" if ready else "load",
                "progress": told("progress"),
                "restarts": 0,
                "sentence": "Serving a stand-in." if ready else "Starting a stand-in.",
                "now": time.time(),
            }
            self.say(200, json.dumps(state).encode(), "application/json")
        elif self.path == "/livez" or (self.path == "/readyz" and ready):
            self.say(200, b"ok\n")
        else:
            self.say(503, b"not ready\n")


class Engine(Port):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = told("../../../run/secrets/api_key")
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            return self.say(401, b"no key")
        text = told("answer", "Rome, and the number is 7391.")
        if body.get("stream"):
            return self.stream(text)
        choice = {"message": {"content": text}} if "messages" in body else {"text": text}
        return self.say(200, json.dumps({"choices": [choice]}).encode(), "application/json")

    def stream(self, text):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for word in text.split():
            data = json.dumps({"choices": [{"delta": {"content": word}, "text": word}]})
            self.wfile.write(f"data: {data}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True


def stop(*_):
    with (STATE / "signals").open("a") as file:
        file.write("SIGTERM\n")
    print("standin: draining", flush=True)
    time.sleep(float(told("drain", "0.2")))
    print("standin: bye", flush=True)
    os._exit(0)


def main():
    print(
        f"standin: uid {os.getuid()}, secret of {len(told('../../../run/secrets/api_key'))} characters",
        flush=True,
    )
    for port, handler in ((9400, Supervisor), (30000, Engine)):
        server = ThreadingHTTPServer(("0.0.0.0", port), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    if told("exit-at-start"):
        (STATE / "exit-at-start").rename(STATE / "exit")
    while True:
        code = told("exit")
        if code:
            (STATE / "exit").unlink(missing_ok=True)
            print(f"standin: exit {code}", flush=True)
            if told("last"):
                (STATE / "last-status.json").write_text(told("last"))
            if int(code) < 0:
                os.kill(os.getpid(), -int(code))
            sys.exit(int(code))
        time.sleep(0.1)


signal.signal(signal.SIGTERM, stop)
main()
