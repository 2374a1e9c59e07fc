"""Says what SGLang says at its start, answers the three paths that the supervisor asks for, and waits.

Appends its start (Unix seconds) and pid to the file named by STANDIN_STARTS.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWERS = {
    "/server_info": json.dumps({"cuda_graph_config": {"prefill": {"backend": "disabled"}}}),
    "/v1/completions": json.dumps({"choices": [{"text": "stand-in"}]}),
    "/metrics": 'sglang:num_running_reqs{model_name="x"} 0.0\nsglang:num_queue_reqs{model_name="x"} 0.0\n',
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = ANSWERS.get(self.path, "").encode()
        self.send_response(200 if answer else 404)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """No access log."""


def main() -> None:
    with open(os.environ["STANDIN_STARTS"], "a") as starts:  # noqa: PTH123 - pathlib would slow the start
        starts.write(f"{time.time()} {os.getpid()}\n")
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer.allow_reuse_address = True
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"[{stamp}] server_args=ServerArgs(model_path='stand-in')", flush=True)
    print(f"[{stamp}] The server is fired up and ready to roll!", flush=True)
    server.serve_forever()


main()
