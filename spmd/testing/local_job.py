"""Jobs on this host: the variables that a launcher sets, with a port on which rank 0 can listen."""

from __future__ import annotations

import errno
import random
import socket

_PORTS = range(10_000, 30_000)
"""Below those that systems give to connections: one of these may be taken between the choice of a port and its use."""


def free_port() -> int:
    """A port that nothing on this host listens on."""
    choices = random.SystemRandom()  # the same on no two processes, whatever the seed of a test
    while True:
        with socket.socket() as attempt:
            try:
                attempt.bind(("localhost", port := choices.choice(_PORTS)))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port


def local_job(ranks: int) -> dict[str, str]:
    """The variables of a job of processes of this host, but for RANK."""
    return {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
