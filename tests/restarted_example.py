"""examples/train_gpt.py as torchrun starts it, and rank 1 is killed once, after the first checkpoint.

torchrun --nproc-per-node 2 --max-restarts 2 tests/restarted_example.py CHECKPOINT OPTIONS...
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import workers

import spmd
import train_gpt


def kill_after_checkpoint(folder: str) -> None:
    while not spmd.checkpoint.exists(folder):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    checkpoint, *options = sys.argv[1:]
    workers.plan_for_the_default_machine()  # as the run that is not killed, to whose bits it is compared
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        threading.Thread(target=kill_after_checkpoint, args=(checkpoint,), daemon=True).start()
    raise SystemExit(train_gpt.main([*options, "--checkpoint", checkpoint, "--resume"]))
