"""kvio::transfer_staged without a GPU: exact bytes, checks, explanation."""

import functools

import pytest
import torch

import sgl_kvio
import staged_cases
from reference import check_transfer, refused
from staged_cases import StagedCase


def run(case):
    with case.open() as transfer:
        staged = functools.partial(sgl_kvio.transfer_staged, staging=case.staging("cpu"))
        check_transfer(transfer, staged)


@pytest.mark.parametrize("case", staged_cases.selected(gpu=False), ids=lambda case: case.name)
def test_moves_the_named_rows_and_no_other_byte(case):
    run(case)


@pytest.mark.parametrize("case", staged_cases.counts((1, 3)), ids=lambda case: case.name)
def test_any_number_of_pages_is_exact(case):
    run(case)


def call_of(transfer, **changes):
    arguments = {
        "dst": transfer.dst.views(transfer.layers),
        "src": transfer.src.views(transfer.layers),
        "dst_indices": transfer.dst_indices,
        "src_indices": transfer.src_indices,
        **transfer.options,
    }
    return {**arguments, **changes}


def test_a_buffer_smaller_than_a_page_is_refused_with_both_sizes():
    case = StagedCase()
    with case.open() as transfer:
        page = case.page_nbytes()
        for nbytes in (page - 1, 0):
            staging = torch.zeros(nbytes, dtype=torch.uint8)
            got = f"{nbytes} bytes; it needs {page} or more"
            with refused("staging", got=got, op="transfer_staged", unchanged=[transfer.dst]):
                sgl_kvio.transfer_staged(**call_of(transfer, staging=staging))
        exact = torch.zeros(page, dtype=torch.uint8)
        check_transfer(transfer, functools.partial(sgl_kvio.transfer_staged, staging=exact))


@pytest.mark.parametrize("direction", staged_cases.DIRECTIONS)
def test_some_layers_of_a_token_major_page_are_refused_by_name(direction):
    case = StagedCase(direction=direction, device_layout="pitched")
    with case.open() as transfer:
        call = call_of(transfer, staging=case.staging("cpu"))
        call["dst"], call["src"] = call["dst"][:-2], call["src"][:-2]
        with refused(
            r"(dst|src)\[0\]", got="all layers", op="transfer_staged", unchanged=[transfer.dst]
        ):
            sgl_kvio.transfer_staged(**call)


def test_some_layers_of_a_page_that_keeps_each_together_are_served():
    case = StagedCase(host_layout="page_first_direct", kind="k_only")
    with case.open() as transfer:
        transfer.layers = [1, 2]
        check_transfer(
            transfer, functools.partial(sgl_kvio.transfer_staged, staging=case.staging("cpu"))
        )


def test_pages_of_another_size_than_the_pools_are_refused():
    case = StagedCase(
        host_layout="page_first_direct", device_layout="pitched_odd", direction="write_back"
    )
    with case.open() as transfer:
        call = call_of(transfer, staging=case.staging("cpu"), page_size=2)
        with refused(r"dst\[0\]", got="pages of 4 slots", op="transfer_staged"):
            sgl_kvio.transfer_staged(**call)


def bad(name, value):
    return lambda call: call | {name: value}


@pytest.mark.parametrize(
    ("change", "argument", "got"),
    [
        (bad("staging", torch.zeros(64, 1 << 12, dtype=torch.uint8).t()), "staging", "strides"),
        (bad("page_size", 0), "page_size", "0"),
        (bad("index_unit", "row"), "index_unit", "row"),
        (bad("row_ndim", 9), r"dst\[0\]", "row_ndim=9"),
        (bad("num_blocks", -1), "num_blocks", "-1"),
        (bad("dst_indices", torch.tensor([0, 99])), r"(dst|src)_indices", "99|entries"),
        (bad("dst_indices", torch.tensor([0.5])), "dst_indices", "float32"),
        (bad("src", []), "src", "0 tensors"),
    ],
)
def test_bad_arguments_are_refused_by_name_and_change_nothing(change, argument, got):
    case = StagedCase(moved=2)
    with case.open() as transfer:
        call = change(call_of(transfer, staging=case.staging("cpu")))
        with refused(argument, got=got, op="transfer_staged", unchanged=[transfer.dst]):
            sgl_kvio.transfer_staged(**call)


def test_explain_counts_pages_and_what_makes_none():
    case = StagedCase(unit="token", pattern="mid_page_start", staged_pages=5.5)
    with case.open() as transfer:
        text = sgl_kvio.explain_staged(**call_of(transfer, staging=case.staging("cpu")))
    page = case.page_nbytes()
    assert "pages: 6 whole, in 1 stretches" in text
    assert "rest: 3 positions" in text
    assert f"2 halves of 2 pages of {page} bytes in 2 ranges" in text


def test_a_meta_tensor_among_real_ones_is_refused():
    case = StagedCase()
    with case.open() as transfer:
        call = call_of(transfer, staging=case.staging("cpu").to("meta"))
        with pytest.raises((RuntimeError, NotImplementedError)):
            sgl_kvio.transfer_staged(**call)


def test_a_compiled_function_leaves_the_same_bytes():
    case = StagedCase(direction="write_back")
    with case.open() as transfer:
        call = call_of(transfer, staging=case.staging("cpu"))
        options = {name: call[name] for name in ("page_size", "index_unit", "row_ndim")}

        def function(dst, src, dst_indices, src_indices, staging):
            torch.ops.kvio.transfer_staged(dst, src, dst_indices, src_indices, staging, **options)

        compiled = torch.compile(function, backend="eager", fullgraph=True)

        def staged(dst, src, dst_indices, src_indices, **_):
            compiled(dst, src, dst_indices, src_indices, call["staging"])

        check_transfer(transfer, staged)
