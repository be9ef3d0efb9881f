"""What the tests of LayerwiseLoader share: numbered layers, a gate for single transfers, forks."""

import os
import signal
import threading

import torch

from sgl_kvio import ops

L = 3
WAIT_S = 30.0


def flat_layers(seed=0, slots=16, layers=L):
    """Layers of one flat buffer of [slots, 2, 3] numbers, all different."""
    return [
        [torch.arange(slots * 6, dtype=torch.int32).view(slots, 2, 3) + 1000 * (seed + i)]
        for i in range(layers)
    ]


class Gate:
    """Stands in for ops.transfer: lets through one layer each time `open` is called."""

    def __init__(self, monkeypatch):
        self._transfer = ops.transfer
        self._turns = threading.Semaphore(0)
        self.started = []
        monkeypatch.setattr(ops, "transfer", self)

    def __call__(self, *args, **options):
        self.started.append(args)
        assert self._turns.acquire(timeout=WAIT_S)
        self._transfer(*args, **options)

    def open(self, layers=1):
        self._turns.release(layers)


def in_a_forked_child(work):
    """The exit status of a child that runs `work`; killed (negative) when it hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
