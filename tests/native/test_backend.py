"""Which backend serves a call, and what it says when none can."""

import pytest
from native.pools import Buffer, Transfer, index_array, layer_elements

ON_CPU = {"any_gpu": False, "indices_on_cpu": True}
ON_GPU = {"any_gpu": True, "indices_on_cpu": False}
MIXED = {"any_gpu": True, "indices_on_cpu": True}


@pytest.mark.parametrize(
    ("wanted", "facts", "name", "reason"),
    [
        ("auto", ON_CPU, "cpu", "every tensor is on the CPU"),
        ("cpu", ON_CPU, "cpu", "every tensor is on the CPU"),
        ("auto", ON_GPU, "register", "serves any row size and alignment"),
        ("auto", MIXED, "register", "serves any row size and alignment"),
        ("register", ON_GPU, "register", "asked for by the caller"),
        ("register", MIXED, "register", "asked for by the caller"),
        ("auto", {**ON_GPU, "capturing": True}, "register", "serves any row size and alignment"),
    ],
)
def test_the_choice_and_its_reason(kvio, wanted, facts, name, reason):
    assert kvio.choose_backend(wanted, **facts) == (name, reason)


@pytest.mark.parametrize(
    ("wanted", "facts", "argument", "needs"),
    [
        ("fast", ON_CPU, "backend is 'fast'", "'auto', 'register' or 'cpu'"),
        ("", ON_GPU, "backend is ''", "'auto', 'register' or 'cpu'"),
        ("tma", ON_GPU, "backend is 'tma'", "'auto', 'register' or 'cpu'"),
        (
            "register",
            ON_CPU,
            "backend is 'register' but every tensor is on the CPU",
            "a GPU tensor",
        ),
        ("cpu", ON_GPU, "backend is 'cpu' but a tensor is on a GPU", "CPU tensors only"),
        (
            "auto",
            {**MIXED, "capturing": True},
            "dst_indices is on the CPU while the stream is being captured",
            "indices on the GPU",
        ),
    ],
)
def test_what_cannot_serve_is_refused_with_what_is_missing(kvio, wanted, facts, argument, needs):
    with pytest.raises(RuntimeError) as error:
        kvio.choose_backend(wanted, **facts)
    text = str(error.value)
    assert text.startswith(f"kvio::transfer: {argument}")
    assert needs in text


@pytest.mark.parametrize(
    ("dst", "src", "indices", "any_gpu", "indices_on_cpu"),
    [
        ("cpu", "cpu", "cpu", False, True),
        ("gpu", "cpu", "cpu", True, True),
        ("cpu", "gpu", "gpu", True, False),
        ("cpu", "cpu", "gpu", True, False),
    ],
)
def test_facts_are_read_from_every_argument(kvio, dst, src, indices, any_gpu, indices_on_cpu):
    view = layer_elements("layer_first", layers=1, pages=2, page_size=2, heads=1, dim=4)[0]
    case = Transfer(
        [Buffer(view, 1 << 20, 2)],
        [Buffer(view, 1 << 30, 2)],
        index_array([0]),
        index_array([1]),
        dst_device=dst,
        src_device=src,
        index_device=indices,
    )
    facts = kvio.facts_of(case.request(kvio), capturing=True)
    assert facts == {"any_gpu": any_gpu, "indices_on_cpu": indices_on_cpu, "capturing": True}
