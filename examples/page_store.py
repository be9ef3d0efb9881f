"""Pages of one process's host pool, in files, and back in another process: every byte compared.

    python examples/page_store.py               both, in two processes and a temporary folder
    python examples/page_store.py write FOLDER
    python examples/page_store.py read FOLDER

Exits with 1 if a page is missing or a byte differs. Needs no GPU; where there is one, the pools are
page-locked for it. A network store takes the place of `FilePageStore` by implementing
`sgl_kvio.PageStore`: nothing else here would change.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import torch

from sgl_kvio import FilePageStore, HostKVPool, PageStore, load_pages, save_pages

BATCH_PAGES = 8


def make_pool(options: argparse.Namespace) -> HostKVPool:
    """A pool with one page more than the example stores."""
    return HostKVPool(
        "mha",
        options.layout,
        num_pages=options.pages + 1,
        page_size=64,
        num_layers=4,
        num_heads=8,
        head_dim=128,
    )


def content(number: int, nbytes: int) -> torch.Tensor:
    """The bytes of the example's page `number`: the same in every process."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def key_of(pool: HostKVPool, number: int) -> str:
    """A key names all that the bytes depend on: no other pool takes the page for its own."""
    return f"example/{pool.kind}/{pool.layout}/{pool.page_nbytes}/{number}"


def page_tensors(pool: HostKVPool, page: int) -> list[torch.Tensor]:
    return [torch.frombuffer(part, dtype=torch.uint8) for part in pool.page_bytes(page)]


def fill(pool: HostKVPool, page: int, number: int) -> None:
    parts = page_tensors(pool, page)
    wanted = content(number, pool.page_nbytes).split([part.numel() for part in parts])
    for part, values in zip(parts, wanted, strict=True):
        part.copy_(values)


def count_differences(pool: HostKVPool, page: int, number: int) -> int:
    found = torch.cat(page_tensors(pool, page))
    return int((found != content(number, pool.page_nbytes)).sum())


def batches(label: str, total: int) -> Iterator[range]:
    """Ranges of page numbers, with a line of progress on stderr (one line a batch in a log)."""
    end = "\r" if sys.stderr.isatty() else "\n"
    for start in range(0, total, BATCH_PAGES):
        batch = range(start, min(start + BATCH_PAGES, total))
        yield batch
        print(f"{label} {batch.stop}/{total} pages", end=end, file=sys.stderr, flush=True)
    if end == "\r":
        print(file=sys.stderr)


def write(store: PageStore, options: argparse.Namespace) -> int:
    """Fills pages and stores them; 1 if the store refused one."""
    with make_pool(options) as pool:
        pages = pool.alloc(options.pages).tolist()
        seconds, refused = 0.0, 0
        for batch in batches("stored", options.pages):
            for number in batch:
                fill(pool, pages[number], number)
            keys = [key_of(pool, number) for number in batch]
            start = time.perf_counter()
            stored = save_pages(store, pool, [pages[number] for number in batch], keys)
            seconds += time.perf_counter() - start
            refused += stored.count(False)
        if refused:
            print(f"write: the store REFUSED {refused} of {options.pages} pages")
            return 1
        print(f"write: {summary(pool, options.pages, seconds)} stored from {options.layout} pages")
        return 0


def read(store: PageStore, options: argparse.Namespace) -> int:
    """Loads the pages into a pool of this process and compares them; 1 on any difference."""
    with make_pool(options) as pool:
        # Other places than the writer's, in another order.
        pages = pool.alloc(options.pages + 1).flip(0).tolist()
        seconds, missing, wrong_bytes = 0.0, 0, 0
        for batch in batches("compared", options.pages):
            targets = [pages[number] for number in batch]
            keys = [key_of(pool, number) for number in batch]
            start = time.perf_counter()
            loaded = load_pages(store, pool, targets, keys)
            seconds += time.perf_counter() - start
            missing += loaded.count(False)
            for page, number, hit in zip(targets, batch, loaded, strict=True):
                wrong_bytes += count_differences(pool, page, number) if hit else 0
        if missing or wrong_bytes:
            print(f"read: {missing} of {options.pages} pages MISSING, {wrong_bytes} bytes DIFFER")
            return 1
        print(f"read: {summary(pool, options.pages, seconds)} loaded, every byte equal")
        return 0


def summary(pool: HostKVPool, pages: int, seconds: float) -> str:
    nbytes = pages * pool.page_nbytes
    return f"{pages} pages, {nbytes:,} bytes, {nbytes / seconds / 1e9:.2f} GB/s,"


def run_in_two_processes(arguments: Sequence[str]) -> int:
    """This script twice: one process writes and ends, then another one reads."""
    with tempfile.TemporaryDirectory() as folder:
        for command in ("write", "read"):
            line = [sys.executable, __file__, command, folder, *arguments]
            status = subprocess.run(line, check=False).returncode
            if status:
                return status
    return 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=["write", "read"], help="default: both")
    parser.add_argument("folder", nargs="?", help="of the files")
    parser.add_argument("--pages", type=int, default=64, help="of 1 MiB each (default 64)")
    layouts = ["page_first", "page_first_direct", "page_head", "layer_first"]
    parser.add_argument("--layout", choices=layouts, default="page_first", help="of both pools")
    parser.add_argument("--direct", action="store_true", help="past the page cache, O_DIRECT")
    options = parser.parse_args(arguments)
    if options.pages < 1:
        parser.error("--pages needs at least 1")
    if options.command is None:
        return run_in_two_processes(arguments)
    if options.folder is None:
        parser.error(f"{options.command} needs a FOLDER")
    store = FilePageStore(options.folder, direct=options.direct)
    try:
        return (write if options.command == "write" else read)(store, options)
    finally:
        store.close()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
