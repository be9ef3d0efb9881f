"""An op that no compiler can look into, as an engine's attention is, and that counts its own runs.

In a module of its own, which is imported once: test modules are imported a second time under
another name where others import them, and the op would then count into the later copy's list.
"""

import torch

reads: list[torch.Size] = []  # the shape of the rows, for each run of the op's kernel


@torch.library.custom_op("kvio_test::read_layer", mutates_args=())
def read_layer(query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    reads.append(rows.shape)
    return query + rows.sum(0)


@read_layer.register_fake
def _(query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(query)
