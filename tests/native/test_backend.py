"""Which backend serves a call, what that rests on, and what it says when none can."""

import pytest
from native.pools import Buffer, Transfer, index_array, layer_elements

KIB, MIB = 1 << 10, 1 << 20
BACKENDS = ("register", "tma", "copy_engine")
H200 = {"compute_major": 9, "has_batch_call": True, "has_tensor_maps": True}
ENVIRONMENT = ("KVIO_BACKEND_ORDER", "KVIO_TMA", "KVIO_COPY_ENGINE")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def built_in_rates(kvio):
    yield
    kvio.set_rates([])


@pytest.fixture
def gpu_facts(kvio):
    """Facts of a large transfer between a host and an H200, changed by keywords."""

    def make(direction="H2D", *, run=64 * KIB, cpu=True, gpu=None, prefer="throughput", **changes):
        facts = kvio.BackendFacts()
        facts.any_gpu = True
        facts.indices_on_cpu = cpu
        facts.direction = getattr(kvio.Direction, direction)
        facts.gpu = gpu_of(kvio, **(H200 if gpu is None else gpu))
        facts.prefer = getattr(kvio.Prefer, prefer)
        facts.row_bytes = min(run, 512)
        facts.run_bytes = facts.stretch_bytes = run
        facts.payload_bytes = 256 * MIB
        for name, value in changes.items():
            setattr(facts, name, value)
        if cpu and "num_entries" not in changes:
            facts.num_entries = facts.payload_bytes // facts.run_bytes
        return facts

    return make


def gpu_of(kvio, **facts):
    gpu = kvio.GpuFacts()
    for name, value in facts.items():
        setattr(gpu, name, value)
    return gpu


def flat_rates(register, tma, copy_engine):
    """A table in which every cell of a backend is the same."""
    return [rate for rate in (register, tma, copy_engine) for _ in range(2 * 2 * 14)]


# -------------------------------------------------------------------------------------------------
# Without a choice


@pytest.mark.parametrize("wanted", ["auto", "cpu"])
def test_cpu_tensors_go_to_the_cpu(kvio, wanted):
    facts = kvio.BackendFacts()
    assert kvio.choose_backend(wanted, facts) == ("cpu", "every tensor is on the CPU")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forced_backend_serves_what_it_can(kvio, gpu_facts, backend):
    assert kvio.choose_backend(backend, gpu_facts()) == (backend, "asked for by the caller")


def refusal(kvio, wanted, facts):
    with pytest.raises(RuntimeError) as error:
        kvio.choose_backend(wanted, facts)
    return str(error.value)


@pytest.mark.parametrize("wanted", ["fast", "", "staged", "AUTO", "regis"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_an_unknown_backend_is_refused_with_the_known_ones(kvio, gpu_facts, wanted, on_gpu):
    text = refusal(kvio, wanted, gpu_facts() if on_gpu else kvio.BackendFacts())
    assert text == (
        f"kvio::transfer: backend is '{wanted}'; it needs 'auto', 'register', 'tma', 'copy_engine'"
        " or 'cpu'"
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gpu_backend_is_refused_where_every_tensor_is_on_the_cpu(kvio, backend):
    text = refusal(kvio, backend, kvio.BackendFacts())
    assert f"backend is '{backend}' but every tensor is on the CPU; it needs a GPU tensor" in text


def test_the_cpu_is_refused_where_a_tensor_is_on_a_gpu(kvio, gpu_facts):
    text = refusal(kvio, "cpu", gpu_facts())
    assert "backend is 'cpu' but a tensor is on a GPU; it needs CPU tensors only" in text


@pytest.mark.parametrize("compute_major", [0, 8])
def test_tma_is_refused_before_bulk_copies(kvio, gpu_facts, compute_major):
    text = refusal(kvio, "tma", gpu_facts(gpu={**H200, "compute_major": compute_major}))
    assert "backend is 'tma' but the GPU has no bulk copies; it needs compute capability 9" in text


def test_tma_is_nothing_for_amd_gpus(kvio, gpu_facts):
    """Their compute capability is 9 and more, too, and says nothing of bulk copies."""
    facts = gpu_facts(gpu={**H200, "platform": kvio.Platform.rocm})
    assert "backend is 'tma' but AMD GPUs have no bulk copies" in refusal(kvio, "tma", facts)
    rates = flat_rates(10, 100, 1)
    assert kvio.choose_backend("auto", facts, rates)[0] == "register"
    assert "tma" not in kvio.describe("auto", facts)


def test_tma_is_refused_by_a_build_for_older_gpus_only(kvio, gpu_facts):
    """What the driver makes of an older GPU's code would run here, and move nothing."""
    facts = gpu_facts(gpu={**H200, "has_bulk_code": False})
    assert "backend is 'tma' but this build has no bulk copies" in refusal(kvio, "tma", facts)
    assert kvio.choose_backend("auto", facts)[0] != "tma"


def test_tma_is_refused_for_rows_that_it_cannot_move(kvio, gpu_facts):
    facts = gpu_facts(tma_refusal="rows are 100 bytes; it needs a multiple of 16")
    text = refusal(kvio, "tma", facts)
    assert "backend is 'tma' but rows are 100 bytes; it needs a multiple of 16" in text


@pytest.mark.parametrize("direction", ["H2D", "D2H", "D2D", "H2H"])
def test_the_copy_engine_never_reads_gpu_indices(kvio, gpu_facts, direction):
    text = refusal(kvio, "copy_engine", gpu_facts(direction, cpu=False))
    assert "backend is 'copy_engine' but the indices are on the GPU; it needs CPU indices" in text


@pytest.mark.parametrize("wanted", ["auto", "register", "tma"])
def test_cpu_indices_are_refused_while_capturing(kvio, gpu_facts, wanted):
    text = refusal(kvio, wanted, gpu_facts(gpu={**H200, "capturing": True}))
    assert "dst_indices is on the CPU while the stream is being captured" in text
    assert "indices on the GPU" in text
    assert "backend='copy_engine'" in text


def test_the_copy_engine_may_be_captured_and_says_what_that_means(kvio, gpu_facts):
    facts = gpu_facts(gpu={**H200, "capturing": True})
    name, reason = kvio.choose_backend("copy_engine", facts)
    assert name == "copy_engine"
    assert "graph keeps the index values" in reason


# -------------------------------------------------------------------------------------------------
# The choice


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        # long runs: what takes no SM, as soon as it is within 3% of the best
        ({"run": 4 * MIB}, "copy_engine"),
        ({"run": 128 * KIB}, "copy_engine"),
        ({"run": 64 * KIB}, "copy_engine"),
        ({"run": 32 * KIB}, "tma"),
        ({"run": 8 * KIB}, "register"),
        ({"run": 16 * KIB}, "tma"),
        ({"run": 64 * KIB, "direction": "D2H"}, "tma"),
        ({"run": 512 * KIB, "direction": "D2H"}, "copy_engine"),
        # scattered rows
        ({"run": 512}, "register"),
        ({"run": 512, "direction": "D2H"}, "register"),
        ({"run": 132}, "register"),
        # GPU indices: never the copy engine
        ({"run": 4 * MIB, "cpu": False}, "tma"),
        ({"run": 512, "cpu": False}, "register"),
        # rows apart: boxes, where there are boxes and rows to put into one
        (
            {"run": 1 * KIB, "host_rows_apart": True, "stretch_bytes": 32 * KIB, "cpu": False},
            "tma",
        ),
        (
            {"run": 1 * KIB, "host_rows_apart": True, "stretch_bytes": 2 * KIB, "cpu": False},
            "register",
        ),
        ({"run": 512, "host_rows_apart": True, "cpu": False}, "register"),
        (
            {
                "run": 512,
                "host_rows_apart": True,
                "stretch_bytes": 32 * KIB,
                "gpu": {**H200, "has_tensor_maps": False},
            },
            "register",
        ),
        (
            {
                "run": 512,
                "host_rows_apart": True,
                "stretch_bytes": 32 * KIB,
                "tma_single_rows": True,
            },
            "register",
        ),
        # older GPUs, rows that bulk copies cannot move
        ({"run": 8 * KIB, "gpu": {**H200, "compute_major": 8}}, "register"),
        ({"run": 8 * KIB, "tma_refusal": "no"}, "register"),
        ({"run": MIB, "tma_refusal": "no"}, "copy_engine"),
        # no host link
        ({"run": 4 * MIB, "direction": "D2D"}, "register"),
        ({"run": 4 * MIB, "direction": "H2H"}, "register"),
        # without the batched call every entry costs three microseconds
        ({"run": 128 * KIB, "gpu": {**H200, "has_batch_call": False}}, "tma"),
        ({"run": 4 * MIB, "gpu": {**H200, "has_batch_call": False}}, "copy_engine"),
        # graph capture with GPU indices
        ({"run": 16 * KIB, "cpu": False, "gpu": {**H200, "capturing": True}}, "tma"),
        # quiet: 90% of the best rate is enough
        ({"run": 32 * KIB, "prefer": "quiet"}, "tma"),
        ({"run": 48 * KIB, "prefer": "quiet"}, "copy_engine"),
        ({"run": 128 * KIB, "direction": "D2H", "prefer": "quiet"}, "copy_engine"),
        ({"run": 128 * KIB, "direction": "D2H"}, "tma"),
        ({"run": 512, "prefer": "quiet"}, "register"),
    ],
)
def test_auto_takes_what_the_built_in_rates_say(kvio, gpu_facts, facts, name):
    assert kvio.choose_backend("auto", gpu_facts(**facts))[0] == name


@pytest.mark.parametrize(
    ("rates", "prefer", "name", "reason"),
    [
        ((50, 60, 40), "throughput", "tma", "the highest rate"),
        ((60, 50, 40), "throughput", "register", "the highest rate"),
        ((50, 50, 50), "throughput", "copy_engine", "the highest rate"),
        ((50, 50, 48.6), "throughput", "copy_engine", "as fast as the best"),
        ((50, 50, 48.4), "throughput", "tma", "the highest rate"),
        ((50, 48.6, 40), "throughput", "tma", "as fast as the best"),
        ((50, 48.4, 40), "throughput", "register", "the highest rate"),
        ((50, 50, 45.1), "quiet", "copy_engine", "prefer is 'quiet'"),
        ((50, 45.1, 44.9), "quiet", "tma", "prefer is 'quiet'"),
        ((50, 44.9, 44.9), "quiet", "register", "the highest rate"),
        ((50, 0, 0), "quiet", "register", "the highest rate"),
        ((0, 0, 30), "throughput", "copy_engine", "the highest rate"),
        ((0, 0, 0), "throughput", "register", "serves any row size and alignment"),
        ((0, 0, 0), "quiet", "register", "serves any row size and alignment"),
    ],
)
def test_ties_and_quiet(kvio, gpu_facts, rates, prefer, name, reason):
    got = kvio.choose_backend("auto", gpu_facts(prefer=prefer), flat_rates(*rates))
    assert got[0] == name
    assert reason in got[1]


# GB/s by backend, measured on an H200 by bench/crossover.py (pools of 4 GiB) and, rows apart,
# bench/transfer.py: direction, rows apart, run, its rates.
MEASURED = [
    # scattered rows, and short runs
    ("H2D", False, 512, {"register": 48.8, "tma": 28.1, "copy_engine": 0.8}),
    ("H2D", False, 2048, {"register": 50.2, "tma": 37.3, "copy_engine": 3.3}),
    ("H2D", False, 4 * KIB, {"register": 50.2, "tma": 37.2, "copy_engine": 6.1}),
    ("H2D", False, 8 * KIB, {"register": 50.5, "tma": 37.6, "copy_engine": 9.8}),
    ("H2D", False, 16 * KIB, {"register": 50.1, "tma": 50.2, "copy_engine": 26.0}),
    # driver copies cut into batches, beside kernels on runs of 32 KiB and more
    ("H2D", False, 32 * KIB, {"register": 50.3, "tma": 50.4, "copy_engine": 30.9}),
    ("H2D", False, 64 * KIB, {"register": 49.8, "tma": 50.5, "copy_engine": 52.4}),
    ("H2D", False, 128 * KIB, {"register": 50.5, "tma": 50.2, "copy_engine": 53.3}),
    ("H2D", False, 512 * KIB, {"register": 50.3, "tma": 50.1, "copy_engine": 53.4}),
    ("H2D", False, 4 * MIB, {"register": 50.3, "tma": 50.5, "copy_engine": 53.8}),
    ("D2H", False, 512, {"register": 50.5, "tma": 20.4, "copy_engine": 0.6}),
    ("D2H", False, 4 * KIB, {"register": 51.0, "tma": 38.2, "copy_engine": 6.8}),
    ("D2H", False, 8 * KIB, {"register": 51.7, "tma": 39.0, "copy_engine": 8.7}),
    ("D2H", False, 16 * KIB, {"register": 51.7, "tma": 41.2, "copy_engine": 17.3}),
    ("D2H", False, 32 * KIB, {"register": 51.0, "tma": 51.2, "copy_engine": 29.3}),
    ("D2H", False, 64 * KIB, {"register": 51.2, "tma": 51.0, "copy_engine": 47.9}),
    ("D2H", False, 128 * KIB, {"register": 51.1, "tma": 51.3, "copy_engine": 50.1}),
    ("D2H", False, 512 * KIB, {"register": 50.4, "tma": 51.3, "copy_engine": 52.7}),
    ("D2H", False, 4 * MIB, {"register": 51.9, "tma": 51.5, "copy_engine": 54.3}),
    # a page-first host pool: 2-D boxes, registers, an entry a row
    ("H2D", True, 512, {"register": 49.8, "tma": 47.8, "copy_engine": 0.8}),
    ("H2D", True, 1024, {"register": 50.7, "tma": 49.8, "copy_engine": 1.6}),
    ("H2D", True, 1152, {"register": 50.9, "tma": 50.2, "copy_engine": 1.8}),
    ("D2H", True, 512, {"register": 50.7, "tma": 29.9, "copy_engine": 0.9}),
]


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("prefer", ["throughput", "quiet"])
@pytest.mark.parametrize(
    ("direction", "apart", "run", "gbps"), MEASURED, ids=lambda value: str(value)[:9]
)
def test_auto_reaches_97_percent_of_the_best_that_was_measured(
    kvio, gpu_facts, direction, apart, run, gbps, prefer, cpu
):
    facts = gpu_facts(direction, run=run, cpu=cpu, prefer=prefer)
    facts.row_bytes = run if run < 4 * KIB else 512
    facts.host_rows_apart = apart
    facts.stretch_bytes = 64 * run if apart else run
    serving = {name: rate for name, rate in gbps.items() if cpu or name != "copy_engine"}
    share = 0.97 if prefer == "throughput" else 0.9
    enough = [name for name, rate in serving.items() if rate >= share * max(serving.values())]
    assert kvio.choose_backend("auto", facts)[0] in enough


def test_a_lone_candidate_needs_no_rates(kvio, gpu_facts):
    facts = gpu_facts(cpu=False, tma_refusal="no")
    for rates in ([], flat_rates(0, 50, 50)):
        got = kvio.choose_backend("auto", facts, rates)
        assert got == ("register", "serves any row size and alignment")


@pytest.mark.parametrize(
    ("payload", "run", "names"),
    [
        (64 * KIB, 512, {"register"}),
        (512 * KIB, 64 * KIB, {"tma"}),  # eight entries: submitting them takes longer
        (2 * MIB, 64 * KIB, {"tma"}),
        (2 * MIB, 512 * KIB, {"copy_engine"}),
        (2 * MIB, 2 * MIB, {"copy_engine"}),
        (8 * MIB, 64 * KIB, {"copy_engine"}),  # the next call's submission hides behind this one
    ],
)
def test_a_small_call_takes_the_copy_engine_only_with_few_long_entries(
    kvio, gpu_facts, payload, run, names
):
    facts = gpu_facts(run=run, payload_bytes=payload)
    assert kvio.choose_backend("auto", facts)[0] in names


def test_a_small_call_is_expected_to_be_slower(kvio, gpu_facts):
    for backend in BACKENDS:
        rates = [
            kvio.expected_gbps(backend, gpu_facts(run=64 * KIB, payload_bytes=size))
            for size in (64 * KIB, 256 * KIB, MIB, 256 * MIB)
        ]
        assert rates == sorted(rates)
        assert rates[0] < 4 < 30 < rates[-1]


# -------------------------------------------------------------------------------------------------
# The environment


@pytest.mark.parametrize(
    ("order", "facts", "name", "reason"),
    [
        ("register", {}, "register", "first of KVIO_BACKEND_ORDER"),
        ("tma,register", {}, "tma", "first of KVIO_BACKEND_ORDER"),
        (
            " tma , copy_engine,",
            {"tma_refusal": "no"},
            "copy_engine",
            "first of KVIO_BACKEND_ORDER",
        ),
        ("copy_engine,register", {"cpu": False}, "register", "first of KVIO_BACKEND_ORDER"),
        ("copy_engine", {"cpu": False}, "register", "nothing in KVIO_BACKEND_ORDER"),
        ("tma,tma,tma,tma", {"run": 512}, "tma", "first of KVIO_BACKEND_ORDER"),
        ("", {"run": 512}, "register", "the highest rate"),
    ],
)
def test_an_order_in_the_environment_beats_the_rates(
    kvio, gpu_facts, monkeypatch, order, facts, name, reason
):
    monkeypatch.setenv("KVIO_BACKEND_ORDER", order)
    made = gpu_facts(**facts)
    made.read_environment()
    got = kvio.choose_backend("auto", made)
    assert got[0] == name
    assert reason in got[1]


@pytest.mark.parametrize("order", ["warp_drive", "tma,cpu", "register;tma", "tma,,register"])
def test_an_order_of_unknown_names_names_the_variable(kvio, gpu_facts, monkeypatch, order):
    monkeypatch.setenv("KVIO_BACKEND_ORDER", order)
    with pytest.raises(RuntimeError, match="kvio::transfer: KVIO_BACKEND_ORDER names '.*it needs"):
        gpu_facts().read_environment()


@pytest.mark.parametrize("value", ["0", "off", "false", "no"])
def test_a_backend_that_is_switched_off_is_never_taken_by_auto(kvio, gpu_facts, monkeypatch, value):
    monkeypatch.setenv("KVIO_COPY_ENGINE", value)
    facts = gpu_facts(run=MIB)
    facts.read_environment()
    assert kvio.choose_backend("auto", facts)[0] == "tma"
    assert kvio.choose_backend("copy_engine", facts)[0] == "copy_engine"
    monkeypatch.setenv("KVIO_TMA", value)
    monkeypatch.setenv("KVIO_BACKEND_ORDER", "tma,copy_engine,register")
    facts.read_environment()
    assert kvio.choose_backend("auto", facts)[0] == "register"
    assert kvio.choose_backend("tma", facts)[0] == "tma"


@pytest.mark.parametrize("value", ["1", "", "yes"])
def test_any_other_value_switches_nothing_off(kvio, gpu_facts, monkeypatch, value):
    monkeypatch.setenv("KVIO_COPY_ENGINE", value)
    facts = gpu_facts(run=MIB)
    facts.read_environment()
    assert kvio.choose_backend("auto", facts)[0] == "copy_engine"


# -------------------------------------------------------------------------------------------------
# The table


def test_a_rate_is_that_of_its_bucket_and_lies_in_between_elsewhere(kvio):
    rates = [float(i) for i in range(kvio_rates_len(kvio))]
    h2d, d2h = kvio.Direction.H2D, kvio.Direction.D2H
    for b, backend in enumerate(BACKENDS):
        for d, direction in enumerate((h2d, d2h)):
            for apart in (False, True):
                first = ((b * 2 + d) * 2 + apart) * 14
                for k in range(14):
                    got = kvio.rate_of(rates, backend, direction, apart, 512 << k)
                    assert got == first + k
                assert kvio.rate_of(rates, backend, direction, apart, 768) == first + 0.5
                assert kvio.rate_of(rates, backend, direction, apart, 64 * MIB) == first + 13
                assert kvio.rate_of(rates, backend, direction, apart, 128) == first / 4
                assert kvio.rate_of(rates, backend, direction, apart, 0) == 0


def kvio_rates_len(kvio):
    return len(kvio.built_in_rates())


def test_the_built_in_rates_are_plausible(kvio):
    rates = kvio.built_in_rates()
    assert len(rates) == 3 * 2 * 2 * 14
    assert all(0 < rate < 60 for rate in rates)
    assert kvio.link_rate([], kvio.Direction.H2D) == pytest.approx(54, abs=1)
    assert kvio.link_rate([], kvio.Direction.D2H) == pytest.approx(54, abs=1)


def test_rates_are_exchanged_and_restored(kvio, gpu_facts):
    built_in = kvio.built_in_rates()
    assert kvio.current_rates() == built_in
    facts = gpu_facts(run=512)
    assert kvio.choose_by_current_rates("auto", facts)[0] == "register"
    kvio.set_rates(flat_rates(10, 60, 20))
    assert kvio.current_rates() == flat_rates(10, 60, 20)
    assert kvio.choose_by_current_rates("auto", facts)[0] == "tma"
    kvio.set_rates([])
    assert kvio.current_rates() == built_in


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda rates: rates[:-1], "rates has 167 entries; it needs 168"),
        (lambda rates: [*rates, 1.0], "rates has 169 entries; it needs 168"),
        (lambda rates: [*rates[:5], float("nan"), *rates[6:]], r"rates\[5\] is nan"),
        (lambda rates: [float("inf"), *rates[1:]], r"rates\[0\] is inf"),
        (lambda rates: [*rates[:-1], -1.0], r"rates\[167\] is -1"),
    ],
)
def test_rates_that_are_none_change_nothing(kvio, change, text):
    before = kvio.current_rates()
    with pytest.raises(RuntimeError, match=f"kvio::set_rates: {text}"):
        kvio.set_rates(change(flat_rates(1, 2, 3)))
    assert kvio.current_rates() == before


# -------------------------------------------------------------------------------------------------
# Facts of a request


def one_layer(
    layout, *, dst="gpu", src="cpu", indices="cpu", at=(0,), frm=(1,), page_size=4, **options
):
    """A transfer between a layer-first pool and a host pool of `layout`; rows of 16 bytes."""
    sizes = {"layers": 2, "pages": 8, "page_size": 4, "heads": 2, "dim": 4}
    host = Buffer(layer_elements(layout, **sizes)[0], 1 << 20, 2)
    other = Buffer(layer_elements("layer_first", **sizes)[0], 1 << 30, 2)
    return Transfer(
        [host if dst == "cpu" else other],
        [host if src == "cpu" else other],
        index_array(at),
        index_array(frm),
        page_size=page_size,
        dst_device=dst,
        src_device=src,
        index_device=indices,
        **options,
    )


@pytest.mark.parametrize(
    ("dst", "src", "indices", "any_gpu", "indices_on_cpu", "direction"),
    [
        ("cpu", "cpu", "cpu", False, True, "H2H"),
        ("gpu", "cpu", "cpu", True, True, "H2D"),
        ("cpu", "gpu", "gpu", True, False, "D2H"),
        ("gpu", "gpu", "gpu", True, False, "D2D"),
        ("cpu", "cpu", "gpu", True, False, "H2H"),
    ],
)
def test_facts_are_read_from_every_argument(
    kvio, dst, src, indices, any_gpu, indices_on_cpu, direction
):
    case = one_layer("layer_first", dst=dst, src=src, indices=indices)
    gpu = gpu_of(kvio, compute_major=9, capturing=True)
    for facts in (
        kvio.facts_of(case.request(kvio), gpu),
        kvio.complete_facts_of(case.request(kvio), gpu),
    ):
        assert facts.any_gpu == any_gpu
        assert facts.indices_on_cpu == indices_on_cpu
        assert facts.direction == getattr(kvio.Direction, direction)
        assert facts.payload_bytes == 16
        assert facts.row_bytes == 16
        assert facts.gpu.capturing
        assert facts.gpu.compute_major == 9


@pytest.mark.parametrize(
    ("layout", "apart", "run", "stretch"),
    [
        ("layer_first", False, 64, 64),
        ("page_first_direct", False, 64, 64),
        ("page_first", True, 16, 64),
        ("page_head", True, 8, 64),
        ("pitched", False, 64, 64),
    ],
)
@pytest.mark.parametrize("indices", ["cpu", "gpu"])
def test_runs_of_one_page(kvio, layout, apart, run, stretch, indices):
    case = one_layer(layout, at=range(4), frm=range(4, 8), indices=indices)
    facts = kvio.facts_of(case.request(kvio), gpu_of(kvio, **H200))
    assert facts.host_rows_apart == apart
    assert facts.run_bytes == run
    assert facts.stretch_bytes == stretch
    assert facts.num_entries == (64 // run if indices == "cpu" else 0)


def whole_pages(layout, page_size, **places):
    """Three pages of 16 tokens between a layer-first pool and a host pool; rows of 512 bytes."""
    sizes = {"layers": 4, "pages": 8, "page_size": 16, "heads": 2, "dim": 128}
    host = Buffer(layer_elements(layout, **sizes)[0], 1 << 20, 2)
    card = Buffer(layer_elements("layer_first", **sizes)[0], 1 << 30, 2)
    to_host = places.get("dst_device") == "cpu"
    return Transfer(
        [host if to_host else card],
        [card if to_host else host],
        index_array([*range(16, 32), *range(64, 96)]),
        index_array([*range(48, 64), *range(0, 32)]),
        page_size=page_size,
        index_device="cpu",
        **places,
    )


@pytest.mark.parametrize(
    ("layout", "page_size", "single"),
    [("page_first", 16, False), ("page_first", 1, True), ("layer_first", 1, False)],
)
def test_the_ring_loads_rows_apart_in_boxes_only_with_a_promise(kvio, layout, page_size, single):
    """Whatever runs the CPU indices have: boxes are planned by page_size."""
    case = whole_pages(layout, page_size, dst_device="gpu", src_device="cpu")
    for facts in (
        kvio.facts_of(case.request(kvio), gpu_of(kvio, **H200)),
        kvio.complete_facts_of(case.request(kvio), gpu_of(kvio, **H200)),
    ):
        assert facts.tma_single_rows == single
        # What follows from it: large calls of 64 rows of 1 KiB a page, with boxes or without.
        facts.payload_bytes = 256 * MIB
        facts.row_bytes = facts.run_bytes = KIB
        facts.stretch_bytes = 64 * KIB
        facts.host_rows_apart = True
        backend = kvio.choose_backend("auto", facts)[0]
        assert backend == ("register" if single else "tma")


def test_layers_that_both_sides_keep_together_are_long_runs(kvio):
    """Between two token-major pools a page is one copy with all its layers."""
    sizes = {"layers": 32, "pages": 8, "page_size": 16, "heads": 2, "dim": 128}
    views = layer_elements("page_first", **sizes)
    card, host = ([Buffer(view, base, 2) for view in views] for base in (1 << 30, 1 << 20))
    places = {"dst_device": "gpu", "src_device": "cpu", "index_device": "cpu"}
    case = Transfer(card, host, index_array(range(48)), index_array(range(48)), **places)
    facts = kvio.facts_of(case.request(kvio), gpu_of(kvio, **H200))
    assert facts.num_entries == 1
    assert facts.run_bytes == facts.payload_bytes == 48 * 32 * 512
    assert kvio.choose_backend("auto", facts)[0] == "copy_engine"


def test_the_ring_stores_rows_apart_without_a_promise(kvio):
    case = whole_pages("page_first", 1, dst_device="cpu", src_device="gpu")
    facts = kvio.facts_of(case.request(kvio), gpu_of(kvio, **H200))
    assert facts.host_rows_apart
    assert not facts.tma_single_rows


def test_gpu_indices_without_a_promise_are_single_rows(kvio):
    case = one_layer("layer_first", at=range(4), frm=range(4), indices="gpu", page_size=1)
    facts = kvio.facts_of(case.request(kvio), gpu_of(kvio, **H200))
    assert (facts.run_bytes, facts.stretch_bytes) == (16, 16)


def test_a_promise_ends_with_the_pages_of_a_pool(kvio):
    """Promised pages of 8 slots, of which a page_first_direct pool holds 4 together."""
    case = one_layer("page_first_direct", at=range(8), frm=range(8), indices="gpu", page_size=8)
    assert kvio.facts_of(case.request(kvio), gpu_of(kvio, **H200)).run_bytes == 64


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_are_not_counted_for_a_forced_backend_but_for_explain(kvio, backend, monkeypatch):
    case = one_layer("layer_first", at=range(4), frm=range(4), options={"backend": backend})
    gpu = gpu_of(kvio, **H200)
    monkeypatch.setenv("KVIO_TMA", "0")
    facts = kvio.facts_of(case.request(kvio), gpu)
    assert facts.run_bytes == facts.num_entries == 0
    assert not facts.no_tma
    complete = kvio.complete_facts_of(case.request(kvio), gpu)
    assert (complete.run_bytes, complete.num_entries) == (64, 1)
    assert complete.no_tma


def test_the_environment_is_read_for_auto(kvio, monkeypatch):
    case = one_layer("layer_first")
    monkeypatch.setenv("KVIO_BACKEND_ORDER", "tma,copy_engine")
    monkeypatch.setenv("KVIO_COPY_ENGINE", "0")
    facts = kvio.facts_of(case.request(kvio), gpu_of(kvio, **H200))
    assert facts.order == ["tma", "copy_engine"]
    assert facts.no_copy_engine
    assert not facts.no_tma


@pytest.mark.parametrize("prefer", ["throughput", "quiet"])
def test_prefer_reaches_the_facts(kvio, prefer):
    case = one_layer("layer_first", options={"prefer": prefer})
    facts = kvio.facts_of(case.request(kvio), gpu_of(kvio, **H200))
    assert facts.prefer == getattr(kvio.Prefer, prefer)


@pytest.mark.parametrize("prefer", ["", "fast", "Quiet"])
def test_an_unknown_preference_is_refused(kvio, prefer):
    with pytest.raises(RuntimeError, match="prefer is '.*it needs 'throughput' or 'quiet'"):
        one_layer("layer_first", options={"prefer": prefer}).request(kvio)


def test_the_span_is_that_of_the_host_side(kvio):
    case = one_layer("page_first")
    facts = kvio.facts_of(case.request(kvio), gpu_of(kvio, **H200))
    assert facts.host_span_bytes == 2 * 8 * 4 * 16 - 16


def test_nothing_to_move_needs_no_runs(kvio):
    case = one_layer("layer_first", at=(), frm=())
    facts = kvio.complete_facts_of(case.request(kvio), gpu_of(kvio, **H200))
    assert (facts.payload_bytes, facts.run_bytes, facts.num_entries) == (0, 0, 0)
    assert kvio.choose_backend("auto", facts)[0] in BACKENDS
    assert kvio.describe("auto", facts).count("\n") == 2


# -------------------------------------------------------------------------------------------------
# Words


def test_a_description_says_what_the_choice_rests_on(kvio, gpu_facts):
    lines = kvio.describe("auto", gpu_facts(run=128 * KIB, tma_refusal="x; y")).splitlines()
    assert lines == [
        "backend: copy_engine",
        "reason: the highest rate for these runs",
        "entries: 2048, 131072 bytes on average",
        "expected: 53.4 GB/s, 98% of the link",
        "candidates: copy_engine 53.4 GB/s; tma no, x; register 50.7 GB/s"
        " (prefer throughput, built-in rates)",
    ]


def test_a_description_of_promised_runs_says_so(kvio, gpu_facts):
    kvio.set_rates(flat_rates(10, 40, 50))
    text = kvio.describe("auto", gpu_facts(cpu=False, prefer="quiet"))
    assert "runs: 65536 bytes, as page_size promises\n" in text
    assert "expected: 40.0 GB/s, 80% of the link\n" in text
    assert "copy_engine no, the indices are on the GPU; tma 40.0 GB/s" in text
    assert "(prefer quiet, measured rates)" in text


def test_a_description_of_a_small_call_says_so(kvio, gpu_facts):
    text = kvio.describe("register", gpu_facts(payload_bytes=MIB))
    assert "(one small call by itself)" in text


@pytest.mark.parametrize(
    ("wanted", "cpu", "words"),
    [
        ("auto", False, "indices and rows are read at every replay"),
        ("register", False, "indices and rows are read at every replay"),
        ("copy_engine", True, "the graph keeps the values of these indices; rows are read"),
        ("auto", True, "refused, the indices are on the CPU; backend='copy_engine' keeps"),
        ("tma", True, "refused, the indices are on the CPU; backend='copy_engine' keeps"),
    ],
)
def test_what_a_graph_would_keep_is_said(kvio, gpu_facts, wanted, cpu, words):
    text = kvio.describe_capture(wanted, gpu_facts(cpu=cpu))
    assert text.startswith("capture: " + words)
    assert text.endswith("\n")


def test_nothing_is_said_of_graphs_without_a_gpu(kvio, gpu_facts):
    assert kvio.describe_capture("auto", gpu_facts(any_gpu=False)) == ""


@pytest.mark.parametrize("direction", ["D2D", "H2H"])
def test_no_rate_is_promised_where_no_link_is_crossed(kvio, gpu_facts, direction):
    text = kvio.describe("auto", gpu_facts(direction))
    assert "expected" not in text
    assert "tma no, no host link to fill" in text
