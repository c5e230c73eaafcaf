"""What the processes do that tests of checkpoints kill; a light module, because each of them imports it."""

import itertools
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import spmd
from spmd import P

CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
"""The audit events of what changes a folder; `os.replace` is a rename."""


def tree(number, mesh):
    """A tree of which every element is one number."""
    values = {f"leaf{index}": torch.full((64, 33), float(number)) for index in range(6)}
    specs = {name: P("data") if index % 2 else P() for index, name in enumerate(values)}
    return {"params": spmd.distribute(values, specs, mesh), "step": number}


def save_forever(folder, first, done, keep=1, pause=0.0):
    """Save trees of first, first + 1, ... with pauses in seconds; send each number when its save has returned."""
    mesh = spmd.make_mesh({"data": 3}, runtime="virtual")
    for number in itertools.count(first):
        spmd.checkpoint.save(tree(number, mesh), folder, keep=keep)
        done.send(number)
        time.sleep(pause)


def save_until(folder, number, count):
    """Save a tree, and die by SIGKILL before the folder is changed for the `count`-th time (from 0)."""
    mesh = spmd.make_mesh({"data": 3}, runtime="virtual")
    value = tree(number, mesh)
    changes = itertools.count()

    def watch(event, arguments):
        if event in CHANGES and str(arguments[0]).startswith(folder) and next(changes) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    spmd.checkpoint.save(value, folder)


def save_forever_together(rank, store, folder, first, done):
    """`save_forever` as one of two ranks, for a hundred saves; one whose peer is killed sends its error."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    mesh = spmd.make_mesh({"data": 2}, runtime="distributed")
    trees = [tree(first + number, mesh) for number in range(100)]
    try:
        for value in trees:
            spmd.checkpoint.save(value, folder)
            if rank == 0:
                done.send(value["step"])
    except spmd.SpmdError as error:
        done.send(str(error))


def sent(done):
    """All that a writer, dead by now, has sent."""
    while True:
        try:
            yield done.recv()
        except EOFError:
            return


def loaded_number(folder, mesh):
    """The number of the one save that a load finds; all of its elements must be that number."""
    loaded = spmd.checkpoint.load(folder, tree(0, mesh))
    number = loaded["step"]
    for leaf in loaded["params"].values():
        assert torch.full((64, 33), float(number)).equal(leaf.full_tensor())
    return number


def assert_one_number(folder, mesh, among):
    """The number of the one save that a folder holds, which must be among some."""
    number = loaded_number(folder, mesh)
    assert number in among
    return number
