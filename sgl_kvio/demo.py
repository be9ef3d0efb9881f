"""The main job, end to end: a decoder's KV cache leaves the device pool and comes back unchanged.

A Llama-architecture model of Hugging Face transformers (random weights) reads a text twice. The
first run keeps its KV cache. In the second one the prefix's pages are written back to a
`HostKVPool`, the device pool is filled with NaN bytes, and a `LayerwiseLoader` restores the pages,
to other places of the device pool, while the model already works on the next chunk. Both runs do
the same arithmetic on the same shapes, so every logit must agree bit for bit; any difference is a
byte that was moved wrongly.

The command line is in `__main__.py`; `run` here is the whole demo:

    >>> from sgl_kvio.demo import DemoOptions, run
    >>> run(DemoOptions(model="tiny", device="cpu", tokens=256))  # prints a report
    0
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import inspect
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from sgl_kvio._version import __version__
from sgl_kvio.layouts import combinations
from sgl_kvio.loader import LayerwiseLoad, LayerwiseLoader
from sgl_kvio.memory import memory_limits
from sgl_kvio.ops import capabilities, check, explain, transfer
from sgl_kvio.pool import HostKVPool

VOCAB_SIZE = 256  # a token is a byte of the text
LAYOUTS = tuple(layout for kind, layout in combinations() if kind == "mha")
DTYPE = torch.bfloat16
TIMED_REPEATS = 5
CEILING_BYTES = 256 << 20
# The cache's interface moved within transformers 5; 5.17 and 5.24 were tried, 5.0 does not work.
OLDEST_TRANSFORMERS = (5, 17)
LARGEST_SEED = 2**64 - 1  # torch's


class DemoError(Exception):
    """The demo cannot run with these options on this machine; the text says what to change."""


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama-architecture decoder; `kv_heads` and `head_dim` decide the KV row."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    @property
    def row_bytes(self) -> int:
        return self.kv_heads * self.head_dim * DTYPE.itemsize

    @property
    def token_bytes(self) -> int:
        """K and V bytes of one token in all layers."""
        return 2 * self.layers * self.row_bytes


# Public configurations of the models. A "-like" model has parts that a Llama decoder lacks (QK
# norms, biases); its sizes are the same. `tiny` is no real model: it is there for quick tests.
MODELS = {
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 128, 14336),
    "llama-3.2-3b": ModelShape(28, 3072, 24, 8, 128, 8192),
    "llama-3.2-1b": ModelShape(16, 2048, 32, 8, 64, 8192),
    "llama-2-7b": ModelShape(32, 4096, 32, 32, 128, 11008),
    "qwen3-8b-like": ModelShape(36, 4096, 32, 8, 128, 12288),
    "qwen2.5-0.5b-like": ModelShape(24, 896, 14, 2, 64, 4864),
    "tiny": ModelShape(2, 64, 4, 2, 16, 128),
}
DEFAULT_MODEL = "llama-3.1-8b"


def scaled_for_cpu(shape: ModelShape) -> ModelShape:
    """The shape for a CPU: KV heads and head_dim, so the KV row, stay; the rest shrinks."""
    return ModelShape(
        layers=min(shape.layers, 8),
        hidden=min(shape.hidden, 256),
        heads=min(shape.heads, 2 * shape.kv_heads),
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate=min(shape.intermediate, 512),
    )


@dataclasses.dataclass(frozen=True)
class DemoOptions:
    """What the demo runs. None: a GPU where there is one, the README, sizes that suit the device.

    tokens       prefix that is evicted and restored; rounded down to whole pages, as engines do
    chunk        tokens of one prefill step and of the next chunk
    decode       greedy steps after the next chunk
    page_size    tokens a page
    seed         of the weights and of the page placement
    num_blocks   CTAs of the GPU kernels, 0: the library's choice
    """

    model: str = DEFAULT_MODEL
    device: str | None = None
    text: str | None = None
    tokens: int | None = None
    chunk: int | None = None
    decode: int = 16
    layout: str = "page_first"
    backend: str = "auto"
    page_size: int = 64
    num_blocks: int = 0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """`DemoOptions` after they were checked, every default filled in."""

    options: DemoOptions
    device: torch.device
    shape: ModelShape
    num_pages: int
    chunk: int
    decode: int
    text: bytes
    text_source: str

    @property
    def prefix_tokens(self) -> int:
        return self.num_pages * self.options.page_size

    @property
    def total_tokens(self) -> int:
        return self.prefix_tokens + self.chunk + self.decode

    @property
    def sequence_pages(self) -> int:
        return math.ceil(self.total_tokens / self.options.page_size)

    @property
    def device_pool_pages(self) -> int:
        """Twice the sequence: the restore goes to pages that the prefix was not computed in."""
        return 2 * self.sequence_pages

    @property
    def moved_bytes(self) -> int:
        return self.prefix_tokens * self.shape.token_bytes

    @property
    def prefill_chunks(self) -> list[int]:
        whole, rest = divmod(self.prefix_tokens, self.chunk)
        return [self.chunk] * whole + ([rest] if rest else [])


# -------------------------------------------------------------------------------------------------
# Options, text


def choose_device(name: str | None) -> torch.device:
    """The device asked for, or a GPU that this build can serve, or the CPU."""
    usable = torch.cuda.is_available() and capabilities().get("backend") in ("cuda", "rocm")
    if name is None:
        name = "cuda" if usable else "cpu"
    if name not in ("cpu", "cuda"):
        raise DemoError(f"--device got {name!r}, needs cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise DemoError("--device cuda: torch finds no GPU here; use --device cpu")
    if name == "cuda" and not usable:
        raise DemoError(
            "--device cuda: this build of sgl_kvio has no GPU kernels; use --device cpu, "
            "or build it where nvcc is found"
        )
    if name == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def read_text(path: str | None) -> tuple[bytes, str]:
    """The text and its source: the file, else the README, else the package's description."""
    if path is not None:
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise DemoError(f"--text {path}: {error.strerror or error}") from error
        if not text:
            raise DemoError(f"--text {path}: the file is empty")
        return text, path
    root = Path(__file__).resolve().parent.parent
    readme = root / "README.md"
    # A stray README.md can lie in site-packages; only a source tree has the build file beside it.
    if readme.is_file() and (root / "pyproject.toml").is_file() and readme.stat().st_size:
        return readme.read_bytes(), "README.md"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        description = importlib.metadata.metadata("sgl_kvio").json.get("description", "")
        if isinstance(description, str) and description.strip():
            return description.encode(), "the package's description"
    raise DemoError("no README found beside the package: give a text with --text FILE")


def make_plan(options: DemoOptions) -> Plan:
    """Checks the options against each other and the machine; raises DemoError naming the option."""
    if options.model not in MODELS:
        raise DemoError(f"--model got {options.model!r}, needs one of {', '.join(MODELS)}")
    if options.layout not in LAYOUTS:
        raise DemoError(f"--layout got {options.layout!r}, needs one of {', '.join(LAYOUTS)}")
    device = choose_device(options.device)
    on_gpu = device.type == "cuda"
    chunk = options.chunk if options.chunk is not None else (2048 if on_gpu else 256)
    tokens = options.tokens if options.tokens is not None else (16384 if on_gpu else 2048)
    least = {"--page-size": 1, "--chunk": 1, "--decode": 0, "--seed": 0, "--num-blocks": 0}
    for name, smallest in least.items():
        value = chunk if name == "--chunk" else getattr(options, name[2:].replace("-", "_"))
        if value < smallest:
            raise DemoError(f"{name} got {value}, needs at least {smallest}")
    if options.seed > LARGEST_SEED:
        raise DemoError(f"--seed got {options.seed}, needs at most {LARGEST_SEED}")
    if tokens < options.page_size:
        raise DemoError(
            f"--tokens got {tokens}, needs at least one page ({options.page_size} tokens)"
        )
    text, source = read_text(options.text)
    shape = MODELS[options.model]
    plan = Plan(
        options=options,
        device=device,
        shape=shape if on_gpu else scaled_for_cpu(shape),
        num_pages=tokens // options.page_size,
        chunk=chunk,
        decode=options.decode,
        text=text,
        text_source=source,
    )
    _check_memory(plan)
    _check_transfer_options(plan)
    return plan


def _check_memory(plan: Plan) -> None:
    """On a CPU both pools share the memory that `HostKVPool` checks for its own part only."""
    allowed = memory_limits().allowed_bytes
    pools = (
        plan.moved_bytes + plan.device_pool_pages * plan.options.page_size * plan.shape.token_bytes
    )
    if plan.device.type == "cpu" and allowed is not None and pools > allowed:
        raise DemoError(
            f"--tokens {plan.prefix_tokens}: both pools need {pools / 1e9:.1f} GB, this machine "
            f"allows {allowed / 1e9:.1f} GB"
        )


def _check_transfer_options(plan: Plan) -> None:
    """Asks `explain` about one row, long before there are pools and a model."""
    row = (1, plan.shape.kv_heads, plan.shape.head_dim)
    host = torch.empty(row, dtype=DTYPE, pin_memory=plan.device.type == "cuda")
    device = torch.empty(row, dtype=DTYPE, device=plan.device)
    index = torch.zeros(1, dtype=torch.int64)
    backend, num_blocks = plan.options.backend, plan.options.num_blocks
    # One option after the other, so that each error is that of the option named.
    try:
        explain(device, host, index, index, backend=backend)
    except RuntimeError as error:
        raise DemoError(f"--backend {backend}: {error}") from error
    try:
        # The op takes an int64, and words what is wrong with any of them.
        explain(device, host, index, index, backend=backend, num_blocks=min(num_blocks, 2**63 - 1))
    except RuntimeError as error:
        raise DemoError(f"--num-blocks {num_blocks}: {error}") from error


def text_tokens(plan: Plan) -> torch.Tensor:
    """int64 [prefix + chunk] on the device; a short text is repeated."""
    needed = plan.prefix_tokens + plan.chunk
    repeats = math.ceil(needed / len(plan.text))
    raw = bytearray((plan.text * repeats)[:needed])
    return torch.frombuffer(raw, dtype=torch.uint8).to(torch.int64).to(plan.device)


# -------------------------------------------------------------------------------------------------
# Device pool, cache, model


class DeviceKVPool:
    """The pages on the device: K and V of every layer as `[slots, kv_heads, head_dim]` views."""

    def __init__(self, shape: ModelShape, num_pages: int, page_size: int, device: torch.device):
        self.page_size = page_size
        self.num_pages = num_pages
        self._storage = torch.empty(
            (shape.layers, 2, num_pages * page_size, shape.kv_heads, shape.head_dim),
            dtype=DTYPE,
            device=device,
        )
        self.layers: list[list[torch.Tensor]] = [list(layer.unbind(0)) for layer in self._storage]

    @property
    def all_layers(self) -> list[torch.Tensor]:
        return [buffer for layer in self.layers for buffer in layer]

    def scrub(self) -> None:
        """Fills the pool with 0xFF bytes, NaN in bfloat16: an unrestored row poisons the logits."""
        self._storage.view(torch.uint8).fill_(0xFF)

    def slots_of(self, pages: torch.Tensor) -> torch.Tensor:
        """int64 token slots on the pool's device, in sequence order, of CPU page ids `pages`."""
        slots = pages[:, None] * self.page_size + torch.arange(self.page_size)
        return slots.flatten().to(self._storage.device)


class PagedLayer:
    """One layer of the paged cache, as the model sees it; mixed into transformers' layer class.

    update() writes the new rows into their pages and gathers all rows so far. When a restore is
    under way, it first makes the current stream wait for this layer, and only for this one.
    """

    is_sliding = False

    def __init__(self, index: int, buffers: list[torch.Tensor], slots: torch.Tensor):
        super().__init__()
        self.index = index
        self.buffers = buffers
        self.slots = slots
        self.length = 0
        self.restore: LayerwiseLoad | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool holds the memory."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, kv_heads, new, head_dim] in, [1, kv_heads, length + new, head_dim] out, K and V."""
        if self.restore is not None:
            self.restore.wait_layer(self.index)
        end = self.length + key_states.shape[2]
        new_slots = self.slots[self.length : end]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer.index_copy_(0, new_slots, states[0].transpose(0, 1))
        self.length = end
        keys, values = (
            buffer.index_select(0, self.slots[:end]).transpose(0, 1).unsqueeze(0)
            for buffer in self.buffers
        )
        return keys, values

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return len(self.slots)


def load_transformers() -> Any:
    """The transformers module, kept off the network; DemoError when missing or too old."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.setdefault(name, "1")
    oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
    wanted = f"the demo needs Hugging Face transformers {oldest} or newer"
    install = "pip install 'sgl_kvio[demo]'"
    try:
        import transformers
        import transformers.cache_utils

        found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
        if found < OLDEST_TRANSFORMERS:
            raise DemoError(f"{wanted}, found {transformers.__version__}: {install}")
        transformers.LlamaForCausalLM  # noqa: B018  the lazy import happens here
    except ImportError as error:
        raise DemoError(f"{wanted} ({error}): {install}") from error
    return transformers


class Decoder:
    """A LlamaForCausalLM with random bfloat16 weights, called one chunk at a time.

    The weights are made on `device`, from `seed`; nothing is read from disk or the network.
    """

    def __init__(self, shape: ModelShape, max_tokens: int, seed: int, device: torch.device):
        self._transformers = load_transformers()
        config = self._transformers.LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=max(max_tokens, 128),
            attn_implementation="sdpa",
            bos_token_id=0,
            eos_token_id=0,
        )
        gpus = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus), _default_dtype(DTYPE), device:
            torch.manual_seed(seed)
            self._model = self._transformers.LlamaForCausalLM(config).eval()
        # transformers renamed the argument between 5.17 and 5.24.
        parameters = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self._model.parameters())

    def new_cache(self, pool: DeviceKVPool, pages: torch.Tensor) -> Any:
        """A transformers Cache over `pages` (CPU int64, sequence order) of the device pool."""
        cache_utils = self._transformers.cache_utils
        layer_class = type("PagedCacheLayer", (PagedLayer, cache_utils.CacheLayerMixin), {})
        slots = pool.slots_of(pages)
        return cache_utils.Cache(
            layers=[layer_class(i, buffers, slots) for i, buffers in enumerate(pool.layers)]
        )

    def logits(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        """[n, vocab] logits of `tokens` ([n], int64), whose rows go into `cache`."""
        arguments = {self._cache_argument: cache}
        output = self._model(input_ids=tokens[None], use_cache=True, **arguments)
        result: torch.Tensor = output.logits[0]
        return result


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic_arithmetic() -> Iterator[None]:
    """Asks torch for arithmetic that repeats bit for bit; leaves its settings as they were.

    cuDNN's attention is out of it (its choice of kernel is not torch's), and so are reductions in
    less than float32.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
    matmul = torch.backends.cuda.matmul
    reduced = matmul.allow_bf16_reduced_precision_reduction
    # Its stubs do not know the module's one setting. Filling costs time and hides nothing here.
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    matmul.allow_bf16_reduced_precision_reduction = False
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
        matmul.allow_bf16_reduced_precision_reduction = reduced
        memory.fill_uninitialized_memory = fill


# -------------------------------------------------------------------------------------------------
# Progress, time


class Progress:
    """A bar on a terminal; elsewhere one line when a new part begins. Writes to stderr only."""

    WIDTH = 30

    def __init__(self, total_steps: int, stream: TextIO | None = None):
        self._total = max(total_steps, 1)
        self._done = 0
        self._label = ""
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()

    def begin(self, label: str) -> None:
        self._label = label
        if self._is_terminal:
            self._draw()
            return
        print(f"[{100 * self._done // self._total:3d}%] {label}", file=self._stream, flush=True)

    def step(self) -> None:
        self._done = min(self._done + 1, self._total)
        if self._is_terminal:
            self._draw()

    def close(self) -> None:
        if self._is_terminal:
            print("\r\033[K", end="", file=self._stream, flush=True)

    def _draw(self) -> None:
        filled = self.WIDTH * self._done // self._total
        bar = "#" * filled + "." * (self.WIDTH - filled)
        percent = 100 * self._done // self._total
        text = f"\r\033[K[{bar}] {percent:3d}% {self._label}"
        print(text, end="", file=self._stream, flush=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Wall time of `work` with the device idle before it and finished after it."""
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return time.perf_counter() - start, result


def median_seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Median of `TIMED_REPEATS` runs after one that is not counted."""
    work()
    return statistics.median(seconds_of(work, device)[0] for _ in range(TIMED_REPEATS))


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """Bytes per second of one large contiguous copy, measured in this process.

    On a GPU: page-locked memory to device memory and back, by the copy engine. On a CPU: memcpy.
    """

    to_device: float
    to_host: float


def measure_ceiling(device: torch.device) -> Ceiling:
    on_gpu = device.type == "cuda"
    host = torch.empty(CEILING_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
    other = torch.empty(CEILING_BYTES, dtype=torch.uint8, device=device)
    host.fill_(1)
    to_device = median_seconds(lambda: other.copy_(host, non_blocking=True), device)
    to_host = median_seconds(lambda: host.copy_(other, non_blocking=True), device)
    return Ceiling(CEILING_BYTES / to_device, CEILING_BYTES / to_host)


# -------------------------------------------------------------------------------------------------
# The two runs


@dataclasses.dataclass
class Transcript:
    """The logits of one run by part: the prefill chunks, the next chunk, each decode step."""

    parts: list[tuple[str, torch.Tensor]] = dataclasses.field(default_factory=list)

    def add(self, name: str, logits: torch.Tensor) -> None:
        self.parts.append((name, logits))


@dataclasses.dataclass
class Figures:
    """Seconds of what was timed."""

    prefill: float = 0.0
    chunk_alone: float = 0.0
    chunk_restoring: float = 0.0
    write_back: float = 0.0
    restore: float = 0.0


def prefill(
    decoder: Decoder,
    cache: Any,
    plan: Plan,
    tokens: torch.Tensor,
    transcript: Transcript,
    progress: Progress,
) -> None:
    start = 0
    for number, size in enumerate(plan.prefill_chunks):
        logits = decoder.logits(tokens[start : start + size], cache)
        transcript.add(f"prefill chunk {number} (before anything was moved)", logits)
        start += size
        progress.step()


def decode(
    decoder: Decoder,
    cache: Any,
    plan: Plan,
    last: torch.Tensor,
    transcript: Transcript,
    progress: Progress,
) -> None:
    """Greedy steps from `last`, the logits of the newest position ([vocab])."""
    for number in range(plan.decode):
        last = decoder.logits(last.argmax()[None], cache)[0]
        transcript.add(f"decode step {number}", last[None])
        progress.step()


def first_difference(expected: Transcript, actual: Transcript) -> str | None:
    """A line that says where two runs differ first, None when every bit of every logit agrees."""
    for (name, want), (_, got) in zip(expected.parts, actual.parts, strict=True):
        if torch.equal(want, got):
            continue
        rows = (want != got).any(dim=1).nonzero().flatten()
        values = int((want != got).sum())
        largest = (want.float() - got.float()).abs().max().item()
        return (
            f"{name}, position {int(rows[0])}: {values} of {want.numel()} logits in "
            f"{len(rows)} of {len(want)} positions, largest difference {largest:g}"
        )
    return None


def count_runs(a: torch.Tensor, b: torch.Tensor) -> int:
    """Positions that are consecutive in both page lists form a run, which one copy can serve."""
    if len(a) == 0:
        return 0
    together = (a.diff() == 1) & (b.diff() == 1)
    return len(a) - int(together.sum())


class Demo:
    """Model, device pool and placement of one demo, and its two runs."""

    def __init__(self, plan: Plan, progress: Progress):
        self.plan = plan
        self.progress = progress
        self.figures = Figures()
        self.tokens = text_tokens(plan)
        progress.begin(f"building {plan.options.model} with random weights")
        self.build_seconds, self.decoder = seconds_of(
            lambda: Decoder(plan.shape, plan.total_tokens, plan.options.seed, plan.device),
            plan.device,
        )
        progress.step()
        generator = torch.Generator().manual_seed(plan.options.seed)
        self.device_pool = DeviceKVPool(
            plan.shape, plan.device_pool_pages, plan.options.page_size, plan.device
        )
        # The first half of a permutation is where the prefix is computed, the second, disjoint half
        # is where it comes back to.
        places = torch.randperm(self.device_pool.num_pages, generator=generator)
        self.first_pages, self.second_pages = places.chunk(2)
        self.generator = generator

    @property
    def next_chunk(self) -> torch.Tensor:
        return self.tokens[self.plan.prefix_tokens :]

    def reference_run(self) -> Transcript:
        """Prefill, next chunk, decode, nothing evicted."""
        transcript = Transcript()
        self.progress.begin("reference run: the cache stays on the device")
        self.device_pool.scrub()
        cache = self.decoder.new_cache(self.device_pool, self.first_pages)
        prefill(self.decoder, cache, self.plan, self.tokens, transcript, self.progress)
        logits = self.decoder.logits(self.next_chunk, cache)
        transcript.add("next chunk", logits)
        self.progress.step()
        decode(self.decoder, cache, self.plan, logits[-1], transcript, self.progress)
        return transcript

    def evicted_run(self, host: HostKVPool, host_pages: torch.Tensor) -> Transcript:
        """Prefill, write-back, scrub, the next chunk beside the restore to other pages, decode."""
        plan = self.plan
        transcript = Transcript()
        self.progress.begin("second run: the prefix is computed, written back, and scrubbed")
        self.device_pool.scrub()
        cache = self.decoder.new_cache(self.device_pool, self.first_pages)
        self.figures.prefill, _ = seconds_of(
            lambda: prefill(self.decoder, cache, plan, self.tokens, transcript, self.progress),
            plan.device,
        )
        # Timed here, not in the reference run, whose first calls warm the kernels up. The rows that
        # it leaves behind the prefix are scrubbed with the rest.
        self.figures.chunk_alone, _ = seconds_of(
            lambda: self.decoder.logits(self.next_chunk, cache), plan.device
        )
        self.progress.step()
        self.figures.write_back = median_seconds(
            lambda: self.write_back(host, host_pages), plan.device
        )
        self.progress.step()
        self.device_pool.scrub()

        self.progress.begin("the prefix comes back, layer by layer, beside the next chunk")
        cache = self.decoder.new_cache(self.device_pool, self.second_pages)
        with self.new_loader(host) as loader:
            self.figures.restore = median_seconds(
                lambda: self.restore(loader, host_pages).synchronize(), plan.device
            )
            self.device_pool.scrub()
            self.progress.step()
            self.figures.chunk_restoring, logits = seconds_of(
                lambda: self.chunk_beside_restore(loader, host_pages, cache), plan.device
            )
        transcript.add("next chunk", logits)
        self.progress.step()
        decode(self.decoder, cache, plan, logits[-1], transcript, self.progress)
        return transcript

    def write_back(self, host: HostKVPool, host_pages: torch.Tensor) -> None:
        transfer(
            host.all_layers(),
            self.device_pool.all_layers,
            host_pages,
            self.first_pages[: self.plan.num_pages],
            **self.transfer_options(),
        )

    def new_loader(self, host: HostKVPool) -> LayerwiseLoader:
        options = self.plan.options
        return LayerwiseLoader(
            host.layers(),
            self.device_pool.layers,
            page_size=options.page_size,
            backend=options.backend,
            num_blocks=options.num_blocks,
        )

    def restore(self, loader: LayerwiseLoader, host_pages: torch.Tensor) -> LayerwiseLoad:
        return loader.load(host_pages, self.second_pages[: self.plan.num_pages], index_unit="page")

    def chunk_beside_restore(
        self, loader: LayerwiseLoader, host_pages: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        load = self.restore(loader, host_pages)
        for layer in cache.layers:
            layer.length = self.plan.prefix_tokens
            layer.restore = load
        logits = self.decoder.logits(self.next_chunk, cache)
        load.synchronize()
        for layer in cache.layers:
            layer.restore = None
        return logits

    def transfer_options(self) -> dict[str, Any]:
        options = self.plan.options
        return {
            "page_size": options.page_size,
            "index_unit": "page",
            "backend": options.backend,
            "num_blocks": options.num_blocks,
        }

    def choice(self, host: HostKVPool, host_pages: torch.Tensor) -> str:
        """What `explain` says about restoring a layer; raises when the backend cannot serve it."""
        return explain(
            self.device_pool.layers[0],
            host.layer(0),
            self.second_pages[: self.plan.num_pages],
            host_pages,
            **self.transfer_options(),
        )


# -------------------------------------------------------------------------------------------------
# Report


def machine_name(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (compute {major}.{minor})"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                name = line.split(":", 1)[1].strip()
                return f"{name}, {torch.get_num_threads()} threads"
    return f"CPU, {torch.get_num_threads()} threads"


def print_setup(plan: Plan, decoder: Decoder, build_seconds: float) -> None:
    shape = plan.shape
    scaled = " (scaled down for the CPU)" if shape != MODELS[plan.options.model] else ""
    needed = plan.prefix_tokens + plan.chunk
    repeated = ", repeated" if needed > len(plan.text) else ""
    versions = f"sgl_kvio {__version__}, torch {torch.__version__}"
    versions += f", transformers {importlib.metadata.version('transformers')}"
    print(f"machine     {machine_name(plan.device)}; {versions}")
    print(
        f"model       {plan.options.model}{scaled}: {shape.layers} layers, "
        f"{shape.kv_heads} KV heads x {shape.head_dim}, hidden {shape.hidden}, bfloat16, "
        f"{decoder.num_parameters / 1e6:,.1f} M random weights in {build_seconds:.1f} s"
    )
    print(
        f"text        {plan.text_source}, {len(plan.text):,} bytes{repeated}: "
        f"{plan.prefix_tokens:,} tokens to evict, a next chunk of {plan.chunk:,}, "
        f"{plan.decode} decode steps"
    )


def print_choice(host: HostKVPool, plan: Plan, text: str) -> None:
    memory = "page-locked" if host.is_pinned else "plain memory"
    print(
        f"host pool   mha, {plan.options.layout}, {plan.num_pages} pages x "
        f"{plan.options.page_size} tokens, K and V rows of {plan.shape.row_bytes} B, "
        f"{host.nbytes / 1e6:,.1f} MB {memory}"
    )
    print(f"a layer     {'; '.join(text.strip().splitlines())}")


def share_of_ceiling(rate: float, limit: float, device: torch.device) -> str:
    """`rate` as a share of `limit`, both in bytes per second, in words.

    The CPU's ceiling is that of a payload larger than its caches, so a small one may exceed it.
    """
    percent = round(100 * rate / limit)
    link = "link" if device.type == "cuda" else "memcpy"
    words = f"{percent}% of the {limit / 1e9:.2f} GB/s {link} ceiling"
    if device.type == "cpu" and percent > 100:
        words += ", as small payloads fit into caches"
    return words


def print_figures(demo: Demo, ceiling: Ceiling, runs: tuple[int, int]) -> None:
    plan, figures = demo.plan, demo.figures
    print(
        f"moved       {plan.num_pages:,} pages, {plan.prefix_tokens:,} tokens, {plan.shape.layers} "
        f"layers, K and V: {plan.moved_bytes:,} bytes each way; runs of consecutive pages: "
        f"{runs[0]:,} back, {runs[1]:,} in"
    )
    for name, seconds, limit in (
        ("write-back", figures.write_back, ceiling.to_host),
        ("restore", figures.restore, ceiling.to_device),
    ):
        rate = plan.moved_bytes / seconds
        print(
            f"{name:11} {seconds * 1e3:.2f} ms, {rate / 1e9:.2f} GB/s, "
            f"{share_of_ceiling(rate, limit, plan.device)} (median of {TIMED_REPEATS})"
        )
    print(
        f"recompute   {figures.prefill * 1e3:.1f} ms to compute the same prefix, "
        f"{figures.prefill / figures.restore:.1f} times the restore"
    )
    print(
        f"overlap     next chunk {figures.chunk_alone * 1e3:.1f} ms alone, "
        f"{figures.chunk_restoring * 1e3:.1f} ms with the whole restore beside it"
    )


def run(options: DemoOptions) -> int:
    """Runs the demo, prints the report to stdout; 0 when every logit agrees, else 1.

    Raises DemoError, before anything is allocated where that can be known, when the options or the
    machine do not allow it.
    """
    plan = make_plan(options)
    load_transformers()
    steps = 2 * (len(plan.prefill_chunks) + 1 + plan.decode) + 6
    progress = Progress(steps)
    try:
        with deterministic_arithmetic(), torch.no_grad():
            return _run(plan, progress)
    except torch.OutOfMemoryError as error:
        raise DemoError(
            f"out of device memory, use a smaller --model or --tokens: {error}"
        ) from error
    finally:
        progress.close()


def _run(plan: Plan, progress: Progress) -> int:
    # The pool first: it refuses at once what does not fit, a large model takes seconds.
    with _host_pool(plan) as host:
        demo = Demo(plan, progress)
        host_pages = _shuffled(host.alloc(plan.num_pages), demo.generator)
        try:
            choice = demo.choice(host, host_pages)
        except RuntimeError as error:
            raise DemoError(f"--backend {plan.options.backend}: {error}") from error
        expected = demo.reference_run()
        actual = demo.evicted_run(host, host_pages)
        progress.begin("measuring the ceiling of the link")
        ceiling = measure_ceiling(plan.device)
        progress.step()
        if plan.device.type == "cuda":
            check(plan.device)
        difference = first_difference(expected, actual)
        # Whose fault is it: would a run that evicts nothing repeat the first one?
        repeats = difference is None or first_difference(expected, demo.reference_run()) is None
        progress.step()
        progress.close()

        moved = plan.num_pages
        runs = (
            count_runs(host_pages, demo.first_pages[:moved]),
            count_runs(host_pages, demo.second_pages[:moved]),
        )
        print_setup(plan, demo.decoder, demo.build_seconds)
        print_choice(host, plan, choice)
        print_figures(demo, ceiling, runs)
    if difference is not None:
        print(
            "control     a second run that evicts nothing gives the first one's logits"
            if repeats
            else "control     a second run that evicts nothing differs from the first one too: "
            "arithmetic does not repeat on this machine"
        )
        print(f"logits DIFFER: {difference}", flush=True)
        return 1
    print("logits identical", flush=True)
    return 0


def _host_pool(plan: Plan) -> HostKVPool:
    try:
        return HostKVPool(
            "mha",
            plan.options.layout,
            num_pages=plan.num_pages,
            page_size=plan.options.page_size,
            num_layers=plan.shape.layers,
            num_heads=plan.shape.kv_heads,
            head_dim=plan.shape.head_dim,
            dtype=DTYPE,
            device=plan.device,
        )
    except (MemoryError, ValueError, RuntimeError) as error:
        raise DemoError(f"no host pool for {plan.num_pages} pages: {error}") from error


def _shuffled(pages: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return pages[torch.randperm(len(pages), generator=generator)]
