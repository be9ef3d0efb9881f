"""kvio::transfer_staged on a GPU: exact bytes, order by streams alone, capture, faults."""

import functools

import pytest
import torch

import cases
import sgl_kvio
import staged_cases
from reference import assert_same_bytes, check_transfer
from staged_cases import StagedCase

SLEEP_CYCLES = 400_000_000  # some 0.2 s


def staged(case):
    return functools.partial(sgl_kvio.transfer_staged, staging=case.staging("cuda"))


@pytest.mark.parametrize("case", staged_cases.selected(gpu=True), ids=lambda case: case.name)
def test_moves_the_named_rows_and_no_other_byte(case):
    with case.open("cuda") as transfer:
        check_transfer(transfer, staged(case))


@pytest.mark.parametrize("case", staged_cases.counts(), ids=lambda case: case.name)
def test_any_number_of_pages_is_exact_on_a_stream_of_its_own(case):
    with case.open("cuda") as transfer, torch.cuda.stream(torch.cuda.Stream()):
        check_transfer(transfer, staged(case))


@pytest.mark.parametrize("direction", staged_cases.DIRECTIONS)
@pytest.mark.parametrize("device_list", ["cpu", "cuda"])
def test_a_call_never_waits_for_the_gpu(direction, device_list):
    case = StagedCase(direction=direction, device_list=device_list, pages=40, moved=33)
    with case.open("cuda") as transfer:
        call = staged(case)
        transfer.run(call)  # what is allocated once
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(SLEEP_CYCLES)
            after_sleep = torch.cuda.Event()
            after_sleep.record()
            transfer.run(call)
            assert not after_sleep.query()
        torch.cuda.synchronize()


@pytest.mark.parametrize("stream", ["default", "side"])
def test_a_write_back_comes_after_the_rows_are_written_and_before_they_change(stream):
    layers, slots, size, row = 3, 64, 8, 512
    host = cases.contiguous_pool((slots, layers, row), torch.uint8, 0).pin_memory()
    card = cases.contiguous_pool((layers, slots, row), torch.uint8, 1).cuda()
    content = cases.contiguous_pool((layers, slots, row), torch.uint8, 2).cuda()
    staging = torch.zeros(4 * size * layers * row, dtype=torch.uint8, device="cuda")
    pages = torch.arange(slots // size)
    torch.cuda.synchronize()
    chosen = torch.cuda.default_stream() if stream == "default" else torch.cuda.Stream()
    with torch.cuda.stream(chosen):
        torch.cuda._sleep(SLEEP_CYCLES // 10)
        card.copy_(content)
        sgl_kvio.transfer_staged(
            [host[:, layer] for layer in range(layers)],
            list(card),
            pages,
            pages.flip(0),
            staging,
            page_size=size,
            row_ndim=1,
            index_unit="page",
        )
        card.zero_()
        staging.zero_()
    torch.cuda.synchronize()
    want = content.cpu().view(layers, -1, size, row).flip(1).reshape(layers, slots, row)
    assert_same_bytes(host, want.transpose(0, 1).contiguous(), "host rows")


@pytest.mark.parametrize("stream", ["default", "side"])
def test_a_restore_comes_before_what_the_stream_does_next(stream):
    layers, slots, size, row = 3, 64, 8, 512
    host = cases.contiguous_pool((slots, layers, row), torch.uint8, 0).pin_memory()
    card = torch.zeros(layers, slots, row, dtype=torch.uint8, device="cuda")
    staging = torch.zeros(3 * size * layers * row, dtype=torch.uint8, device="cuda")
    pages = torch.arange(slots // size)
    card_pages = pages.cuda()  # here, since bringing it over waits for its stream
    content = cases.contiguous_pool((slots, layers, row), torch.uint8, 3).cuda()
    torch.cuda.synchronize()
    chosen = torch.cuda.default_stream() if stream == "default" else torch.cuda.Stream()
    with torch.cuda.stream(chosen):
        torch.cuda._sleep(SLEEP_CYCLES // 10)
        host.copy_(content, non_blocking=True)
        card.fill_(7)
        staging.fill_(9)
        sgl_kvio.transfer_staged(
            list(card),
            [host[:, layer] for layer in range(layers)],
            card_pages,
            pages,
            staging,
            page_size=size,
            row_ndim=1,
            index_unit="page",
        )
        seen = card.clone()
        card.zero_()
        staging.zero_()
    torch.cuda.synchronize()
    want = content.cpu().transpose(0, 1).contiguous()
    assert_same_bytes(seen, want, "rows that the stream saw next")


@pytest.mark.parametrize("pages", [1, 4, 15])
def test_calls_queued_on_one_stream_share_their_staging_buffer(pages):
    layers, size, row = 2, 4, 512
    shape = (pages * size, layers, row)
    first, last = (cases.contiguous_pool(shape, torch.uint8, s).pin_memory() for s in (0, 1))
    want = first.clone()
    card = torch.zeros(layers, pages * size, row, dtype=torch.uint8, device="cuda")
    staging = torch.zeros(4 * size * layers * row, dtype=torch.uint8, device="cuda")
    generator = torch.Generator().manual_seed(2)
    options = {"page_size": size, "row_ndim": 1, "index_unit": "page"}

    def views(host):
        return [host[:, layer] for layer in range(layers)]

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP_CYCLES // 10)
        for source, target in ((first, last), (last, first)) * 10:
            # Other places every time, so that what an earlier call left in the buffer is wrong.
            there, back = (torch.randperm(pages, generator=generator) for _ in range(2))
            sgl_kvio.transfer_staged(list(card), views(source), back, there, staging, **options)
            sgl_kvio.transfer_staged(views(target), list(card), there, back, staging, **options)
    torch.cuda.synchronize()
    assert_same_bytes(first, want, "rows that went there and back")
    assert_same_bytes(last, want, "rows that went there")


def test_a_call_without_buffers_does_nothing():
    none = torch.arange(0)
    staging = torch.zeros(256, dtype=torch.uint8, device="cuda")
    sgl_kvio.transfer_staged([], [], none, none, staging, page_size=4)
    assert "pages: 0 whole" in sgl_kvio.explain_staged([], [], none, none, staging, page_size=4)


def test_explain_names_the_stream_of_the_copies():
    case = StagedCase(direction="write_back")
    with case.open("cuda") as transfer:
        text = sgl_kvio.explain_staged(
            transfer.dst.views(transfer.layers),
            transfer.src.views(transfer.layers),
            transfer.dst_indices,
            transfer.src_indices,
            case.staging("cuda"),
            **transfer.options,
        )
    assert "pages: 7 whole" in text
    assert "a stream of the library's own" in text or "one asynchronous copy an entry" in text


@pytest.mark.parametrize("direction", staged_cases.DIRECTIONS)
def test_a_replayed_graph_reads_device_rows_and_indices_of_its_time(direction):
    layers, pages, size, row = 2, 6, 4, 256
    host = cases.contiguous_pool((pages * size, layers, row), torch.uint8, 0).pin_memory()
    card = cases.contiguous_pool((layers, pages * size, row), torch.uint8, 1).cuda()
    staging = torch.zeros(2 * size * layers * row, dtype=torch.uint8, device="cuda")
    host_list = torch.tensor([5, 0, 3])
    card_list = torch.tensor([1, 2, 4], device="cuda")
    host_views = [host[:, layer] for layer in range(layers)]
    back = direction == "write_back"
    pools = (host_views, list(card)) if back else (list(card), host_views)
    lists = (host_list, card_list) if back else (card_list, host_list)
    options = {"page_size": size, "row_ndim": 1, "index_unit": "page"}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        text = sgl_kvio.explain_staged(*pools, *lists, staging, **options)
        sgl_kvio.transfer_staged(*pools, *lists, staging, **options)
    assert "captured" in text
    assert "capture: the graph keeps the host pool's list; rows and the other list" in text
    for seed, chosen in ((3, [1, 2, 4]), (4, [0, 5, 3])):
        card.copy_(cases.contiguous_pool(card.shape, torch.uint8, seed))
        host.copy_(cases.contiguous_pool(host.shape, torch.uint8, seed + 10))
        card_list.copy_(torch.tensor(chosen))
        want_card = card.cpu().view(layers, pages, size, row).clone()
        want_host = host.view(pages, size, layers, row).clone()
        if back:
            want_host[host_list] = want_card[:, chosen].permute(1, 2, 0, 3)
        else:
            want_card[:, chosen] = want_host[host_list].permute(2, 0, 1, 3)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bytes(card, want_card, "device rows")
        assert_same_bytes(host, want_host, "host rows")


@pytest.mark.parametrize("bad", [0, 9, 20])
def test_a_bad_device_index_is_reported_at_its_position(bad):
    case = StagedCase(
        unit="token", pattern="all_tokens", device_list="cuda", kind="mla", staged_pages=2
    )
    with case.open("cuda") as transfer:
        kept = [i for i in range(len(transfer.dst_slots)) if i != bad]
        transfer.dst_indices[bad] = 10_000
        transfer.dst_slots = [transfer.dst_slots[i] for i in kept]
        transfer.src_slots = [transfer.src_slots[i] for i in kept]
        call = staged(case)

        def checked(*arguments, **options):
            call(*arguments, **options)
            with pytest.raises(
                RuntimeError, match=rf"kvio::transfer_staged: on cuda:0 dst_indices\[{bad}\] was"
            ):
                sgl_kvio.check()

        check_transfer(transfer, checked)


def test_calls_on_two_streams_with_buffers_of_their_own_do_not_disturb_each_other():
    made = [
        StagedCase(direction="write_back", kind="mla", pages=70, moved=65),
        StagedCase(direction="restore", row_bytes=1152, pages=70, moved=65),
    ]
    with made[0].open("cuda") as first, made[1].open("cuda") as second:
        calls = [staged(case) for case in made]
        streams = [torch.cuda.Stream() for _ in made]
        torch.cuda.synchronize()

        def run_both(transfer, call):
            for _ in range(5):
                for other, stream, its_call in zip((first, second), streams, calls, strict=True):
                    with torch.cuda.stream(stream):
                        other.run(its_call)

        for transfer in (first, second):
            check_transfer(transfer, lambda *_, **__: run_both(None, None))


def test_host_memory_that_is_not_page_locked_is_refused():
    case = StagedCase(direction="restore", kind="mla")
    with case.open("cuda") as transfer:
        pageable = [view.clone() for view in transfer.src.views(transfer.layers)]
        host = torch.empty(case.pages * case.page_size, case.layers, 576, dtype=torch.uint8)
        views = [host[:, i].view(pageable[0].dtype) for i in range(case.layers)]
        with pytest.raises(RuntimeError, match=r"src\[0\].*not page-locked"):
            staged(case)(
                [v.view(-1, v.shape[-1]) for v in transfer.dst.views(transfer.layers)],
                views,
                transfer.dst_indices,
                transfer.src_indices,
                **transfer.options,
            )
