"""Changes of one call's keyword arguments: what tests of bad input do to a good call."""

import torch

import cases


def set_to(**values):
    return lambda call: call.update(values)


def put(name, position, value):
    """One tensor of a list, or one index."""

    def change(call):
        call[name][position] = value

    return change


def both(*changes):
    def change(call):
        for one in changes:
            one(call)

    return change


def pool(*shape, dtype=torch.float32):
    return cases.contiguous_pool(shape, dtype, 9)
