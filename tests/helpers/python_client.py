"""`python_client.py SOCKET WORDS` makes the server of `tests.helpers.programs` run what `python WORDS` runs.

Hands over the command line, folder, environment and standard streams, passes on signals, and ends as the program ends.
It starts in 20 ms, because it imports nothing but these modules.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    """Returns the exit code of the program, or the negative number of the signal that ended it."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[1])
    request = json.dumps({"words": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
    socket.send_fds(server, [len(request).to_bytes(8, "little")], [0, 1, 2])
    server.sendall(request)
    for number in _PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda received, frame: server.sendall(bytes([received])))
    for stream in range(3):
        os.close(stream)  # so that a pipe ends when the program ends
    answer = server.recv(4, socket.MSG_WAITALL)
    return int.from_bytes(answer, "little", signed=True) if len(answer) == 4 else 1


if __name__ == "__main__":
    code = main()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
