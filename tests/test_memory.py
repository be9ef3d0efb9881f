"""Host memory: size, placement, registration and its rollback, and what memory and cgroup allow."""

import contextlib
import ctypes
import gc
import mmap
import os
import weakref
from types import SimpleNamespace

import pytest
import torch

from sgl_kvio import memory, ops
from sgl_kvio.memory import (
    GIB,
    HUGE_PAGE_BYTES,
    HostMemory,
    check_fits,
    chunk_limit_from_env,
    gpu_numa_node,
    memory_limits,
    prefer_numa_node,
    registration_chunk,
)

MIB = 1 << 20


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@pytest.fixture
def resident():
    """Reads the process's resident bytes; skips where the system does not count them."""
    before = resident_bytes()
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    if resident_bytes() - before < 48 * MIB:
        pytest.skip("this system does not count resident pages")
    del block
    return resident_bytes


def smaps_of(address):
    """The lines of /proc/self/smaps about the mapping that holds an address."""
    lines, inside = [], False
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.split(maxsplit=1)[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
                inside = begin <= address < end
            if inside:
                lines.append(line)
    return lines


@pytest.fixture
def driver(monkeypatch):
    """Stands in for the driver's registration and records its calls."""
    calls, selected = [], [0]

    @contextlib.contextmanager
    def device(index):
        selected.append(index)
        yield
        selected.pop()

    def register(tensor, chunk_bytes=0, device_index=-1):
        assert selected[-1] == device_index, "registered with another device current"
        calls.append(("register", tensor.data_ptr(), tensor.numel(), chunk_bytes, device_index))

    def unregister(tensor, device_index=-1):
        assert selected[-1] == device_index, "unregistered with another device current"
        calls.append(("unregister", tensor.data_ptr(), tensor.numel(), device_index))

    monkeypatch.setattr(ops, "host_register", register)
    monkeypatch.setattr(ops, "host_unregister", unregister)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(memory, "gpu_numa_node", lambda device_index: None)
    return calls


# ---------------------------------------------------------------------------------------- mapping


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, HUGE_PAGE_BYTES, 3 * MIB + 17, 130 * MIB + 1])
def test_memory_is_exact_zeroed_writable_and_on_a_huge_page_boundary(nbytes):
    held = HostMemory(nbytes)
    assert held.tensor.shape == (nbytes,)
    assert held.tensor.dtype == torch.uint8
    assert held.tensor.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not held.tensor.any()
    assert not held.is_pinned
    held.tensor.fill_(0xA5)
    assert held.bytes_view(0, nbytes).tobytes() == b"\xa5" * nbytes


def test_memory_is_not_rounded_to_a_power_of_two(resident):
    before = resident()
    held = HostMemory(130 * MIB)
    grown = resident() - before
    assert 126 * MIB <= grown <= 140 * MIB
    held.close()


def test_memory_is_touched_before_it_is_handed_out(resident):
    before = resident()
    held = HostMemory(192 * MIB)
    assert resident() - before >= 180 * MIB
    held.close()


def test_closed_memory_goes_back_to_the_system(resident):
    held = HostMemory(128 * MIB)
    before = resident()
    held.close()
    held.close()
    assert before - resident() >= 120 * MIB


def test_huge_pages_are_asked_for():
    if not os.path.exists("/sys/kernel/mm/transparent_hugepage/enabled"):
        pytest.skip("no transparent huge pages here")
    held = HostMemory(8 * MIB)
    flags = [line for line in smaps_of(held.tensor.data_ptr()) if line.startswith("VmFlags")]
    if not flags:
        pytest.skip("this system does not tell flags of mappings")
    assert "hg" in flags[0].split()


def test_a_system_without_huge_pages_still_gives_memory(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert HostMemory(MIB).tensor.numel() == MIB


def test_an_advice_that_the_system_refuses_is_ignored(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 987654, raising=False)
    assert HostMemory(MIB).tensor.numel() == MIB


def test_a_mapping_that_the_system_refuses_is_a_memory_error():
    with pytest.raises(MemoryError, match="refused to map"):
        HostMemory(1 << 60)


def test_memory_made_under_inference_mode_is_writable_outside_of_it():
    with torch.inference_mode():
        held = HostMemory(130 * MIB)
    held.tensor[:4].fill_(1)
    assert held.tensor[:5].tolist() == [1, 1, 1, 1, 0]


def test_a_bytes_view_is_its_range_and_nothing_else():
    held = HostMemory(100)
    held.bytes_view(10, 5)[:] = b"\xff" * 5
    assert held.tensor.nonzero().flatten().tolist() == [10, 11, 12, 13, 14]
    for start, length in [(-1, 2), (99, 2), (0, 101), (5, -1)]:
        with pytest.raises(ValueError, match="outside of 100 bytes"):
            held.bytes_view(start, length)


# --------------------------------------------------------------------------------------- lifetime


def test_a_tensor_held_after_close_is_no_dangling_pointer():
    held = HostMemory(MIB)
    tensor = held.tensor[100:200].fill_(7)
    held.close()
    gc.collect()
    assert tensor.tolist() == [7] * 100
    tensor.fill_(8)
    assert tensor.tolist() == [8] * 100


def test_a_memoryview_held_after_close_is_no_dangling_pointer():
    held = HostMemory(MIB)
    view = held.bytes_view(100, 100)
    view[:] = b"\x07" * 100
    held.close()
    gc.collect()
    assert bytes(view) == b"\x07" * 100
    view[0] = 9
    assert view[0] == 9


def test_the_mapping_ends_with_its_last_view():
    held = HostMemory(MIB)
    tensor, view = held.tensor[:10], held.bytes_view(0, 10)
    mapping = weakref.ref(view.obj)
    held.close()
    assert mapping() is not None
    del tensor
    assert mapping() is not None
    del view
    assert mapping() is None


def test_use_after_close_raises():
    held = HostMemory(100)
    held.close()
    with pytest.raises(ValueError, match="after close"):
        _ = held.tensor
    with pytest.raises(ValueError, match="after close"):
        held.bytes_view(0, 1)


# ----------------------------------------------------------------------------------- registration


def test_registration_takes_exact_bytes_chunk_and_device(driver):
    held = HostMemory(3 * MIB + 5, device_index=1, chunk_bytes=2 * MIB)
    address = held.tensor.data_ptr()
    assert driver == [("register", address, 3 * MIB + 5, 2 * MIB, 1)]
    assert held.is_pinned
    held.close()
    assert driver[1:] == [("unregister", address, 3 * MIB + 5, 1)]
    assert not held.is_pinned
    held.close()
    assert len(driver) == 2


def test_memory_is_still_mapped_while_it_is_unregistered(driver, monkeypatch):
    held = HostMemory(MIB, device_index=0)
    mapping = weakref.ref(held.bytes_view(0, 1).obj)
    seen = []
    monkeypatch.setattr(ops, "host_unregister", lambda t, d: seen.append(mapping() is not None))
    held.close()
    assert seen == [True]
    assert mapping() is None


def test_memory_that_nobody_closed_is_unregistered_when_it_dies(driver):
    held = HostMemory(MIB, device_index=0)
    view = held.tensor[:1]
    del held
    gc.collect()
    assert [call[0] for call in driver] == ["register", "unregister"]
    assert view.tolist() == [0]


def test_a_forked_child_does_not_unregister_its_parents_memory(driver):
    held = HostMemory(MIB, device_index=0)
    child = os.fork()
    if child == 0:
        held.close()
        os._exit(len(driver) - 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    held.close()
    assert len(driver) == 2


def test_a_failed_registration_gives_its_pages_back_at_once(driver, monkeypatch, resident):
    def refuse(tensor, chunk_bytes, device_index):
        raise RuntimeError("kvio::host_register: tensor got nothing; needs a driver")

    monkeypatch.setattr(ops, "host_register", refuse)
    before = resident()
    with pytest.raises(RuntimeError, match="host_register") as caught:
        HostMemory(128 * MIB, device_index=0)
    # The error is still alive here, and its traceback with it.
    assert caught.value.__traceback__ is not None
    assert resident() - before < 32 * MIB
    assert driver == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_registration_without_a_gpu_raises_instead_of_giving_plain_memory(monkeypatch):
    monkeypatch.setattr(memory, "gpu_numa_node", lambda device_index: None)
    with pytest.raises((RuntimeError, AssertionError)):
        HostMemory(MIB, device_index=0)


# ----------------------------------------------------------------------------------------- chunks


@pytest.mark.parametrize(
    ("nbytes", "granularity", "limit", "want"),
    [
        (100, 10, 100, 0),
        (GIB, 3 * MIB, 4 * GIB, 0),
        (10 * MIB, 3 * MIB, 4 * MIB, 3 * MIB),
        (10 * MIB, MIB, 4 * MIB, 4 * MIB),
        # 1000 bytes fit a system page only every 125 * 4096 of them.
        (10 * MIB, 1000, MIB, 2 * 125 * mmap.PAGESIZE),
        (10 * MIB, 1, MIB, MIB),
    ],
)
@pytest.mark.skipif(mmap.PAGESIZE != 4096, reason="figures for 4 KiB pages")
def test_chunk_is_the_largest_whole_number_of_pages_within_the_limit(
    nbytes, granularity, limit, want
):
    assert registration_chunk(nbytes, granularity, limit) == want


@pytest.mark.parametrize("granularity", [1, 96, 1000, 4096, 4680 * 61, 2 * MIB + 8])
@pytest.mark.parametrize("limit", [MIB * 64, 1000 * MIB + 3, 16 * GIB])
def test_no_chunk_boundary_cuts_a_pool_page_or_shares_a_system_page(granularity, limit):
    try:
        chunk = registration_chunk(100 * GIB, granularity, limit)
    except ValueError:
        assert granularity * mmap.PAGESIZE > limit
        return
    assert 0 < chunk <= limit
    assert chunk % granularity == 0
    assert chunk % mmap.PAGESIZE == 0


def test_a_page_larger_than_the_chunk_limit_is_refused_with_both_sizes():
    with pytest.raises(ValueError, match=rf"chunk_bytes got {MIB}; needs at least {2 * MIB}"):
        registration_chunk(10 * MIB, 2 * MIB, MIB)


def test_a_refused_chunk_limit_is_called_by_the_name_it_came_under():
    with pytest.raises(ValueError, match=rf"KVIO_CHUNK got {MIB}; needs at least {2 * MIB}"):
        registration_chunk(10 * MIB, 2 * MIB, MIB, "KVIO_CHUNK")


def test_chunk_limit_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("KVIO_HOST_REGISTER_CHUNK_GB", raising=False)
    assert chunk_limit_from_env() == 256 * GIB
    monkeypatch.setenv("KVIO_HOST_REGISTER_CHUNK_GB", "16")
    assert chunk_limit_from_env() == 16 * GIB
    monkeypatch.setenv("KVIO_HOST_REGISTER_CHUNK_GB", "0.5")
    assert chunk_limit_from_env() == GIB // 2


@pytest.mark.parametrize("text", ["", "0", "-1", "many", "nan", "inf"])
def test_a_chunk_limit_that_is_no_size_is_refused_by_name(monkeypatch, text):
    monkeypatch.setenv("KVIO_HOST_REGISTER_CHUNK_GB", text)
    with pytest.raises(ValueError, match=f"KVIO_HOST_REGISTER_CHUNK_GB got {text!r}"):
        chunk_limit_from_env()


# ------------------------------------------------------------------------------------------- NUMA


@pytest.fixture
def pci(monkeypatch, tmp_path):
    """A machine whose GPU 0 is at 0001:c3:00.0; call it with what numa_node holds."""
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC3, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)

    def write(text):
        folder = tmp_path / "sys/bus/pci/devices/0001:c3:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(text)
        return tmp_path

    return write


def test_numa_node_is_read_at_the_gpus_pci_address(pci):
    assert gpu_numa_node(0, pci("3\n")) == 3


def test_an_unknown_numa_node_is_passed_over(pci, tmp_path):
    assert gpu_numa_node(0, tmp_path) is None
    assert gpu_numa_node(0, pci("-1\n")) is None


def test_a_torch_that_tells_no_pci_address_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    assert gpu_numa_node(0, tmp_path) is None


def test_the_kernel_takes_the_numa_preference():
    held = HostMemory(4 * MIB)
    address = held.tensor.data_ptr()
    if not prefer_numa_node(address, 4 * MIB, 0):
        pytest.skip(f"mbind is refused here: {os.strerror(ctypes.get_errno())}")
    if not os.path.exists("/proc/self/numa_maps"):
        pytest.skip("no numa_maps here")
    with open("/proc/self/numa_maps") as file:
        starts = [(int(line.split()[0], 16), line.split()[1]) for line in file]
    assert max(entry for entry in starts if entry[0] <= address)[1].startswith("prefer")


@pytest.mark.parametrize("node", [0, 5, 63, 64, 70])
@pytest.mark.parametrize(("machine", "number"), [("x86_64", 237), ("aarch64", 235)])
def test_the_node_is_one_bit_of_a_mask_that_the_kernel_reads_in_full(
    monkeypatch, node, machine, number
):
    calls = []

    class Libc:
        def syscall(self, number, address, nbytes, mode, mask, bits, flags):
            values = [part.value for part in (number, address, nbytes, mode, bits, flags)]
            calls.append((values, sum(word << (64 * i) for i, word in enumerate(mask))))
            return 0

    monkeypatch.setattr(memory.platform, "machine", lambda: machine)
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda *args, **options: Libc())
    assert prefer_numa_node(1 << 40, 8192, node)
    ((values, mask),) = calls
    preferred = 1
    # The kernel takes bits 0 .. maxnode - 2.
    assert mask == 1 << node
    assert values[:4] == [number, 1 << 40, 8192, preferred]
    assert values[4] - 1 > node
    assert (values[4] - 1) % 64 == 0
    assert values[5] == 0


def test_a_node_that_does_not_exist_is_refused_quietly():
    held = HostMemory(4096)
    assert prefer_numa_node(held.tensor.data_ptr(), 4096, 1000) is False


def test_an_unknown_machine_is_passed_over(monkeypatch):
    monkeypatch.setattr(memory.platform, "machine", lambda: "riscv64")
    held = HostMemory(4096)
    assert prefer_numa_node(held.tensor.data_ptr(), 4096, 0) is False


def test_pages_are_placed_before_they_are_touched(driver, monkeypatch):
    order = []
    touch = memory._first_touch
    monkeypatch.setattr(memory, "gpu_numa_node", lambda device_index: 5)
    monkeypatch.setattr(
        memory, "prefer_numa_node", lambda *call: order.append(("place", *call[1:])) or True
    )
    monkeypatch.setattr(memory, "_first_touch", lambda t: order.append(("touch",)) or touch(t))
    held = HostMemory(5000, device_index=0)
    assert order == [("place", -(-5000 // mmap.PAGESIZE) * mmap.PAGESIZE, 5), ("touch",)]
    assert held.numa_node == 5
    held.close()


# ----------------------------------------------------------------------------------------- limits


class Machine:
    """A fake / with /proc and /sys files, sizes in MiB."""

    def __init__(self, root):
        self.root = root

    def put(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(text))
        return self

    def meminfo(self, total, available):
        lines = [("MemTotal", total), ("MemFree", 1), ("MemAvailable", available)]
        text = "".join(f"{name}:   {mib * 1024} kB\n" for name, mib in lines)
        return self.put("proc/meminfo", text + "HugePages_Total:       0\n")

    def v2(self, path, limit, used, file_pages=0, mount="sys/fs/cgroup"):
        base = f"{mount}{path}"
        self.put(f"{base}/memory.max", "max\n" if limit is None else limit * MIB)
        self.put(f"{base}/memory.current", used * MIB)
        half = file_pages * MIB // 2
        return self.put(
            f"{base}/memory.stat", f"anon 1\nactive_file {half}\ninactive_file {half}\n"
        )

    def v1(self, path, limit, used, file_pages=0):
        base = f"sys/fs/cgroup/memory{path}"
        self.put(
            f"{base}/memory.limit_in_bytes", 9223372036854771712 if limit is None else limit * MIB
        )
        self.put(f"{base}/memory.usage_in_bytes", used * MIB)
        half = file_pages * MIB // 2
        return self.put(
            f"{base}/memory.stat",
            f"inactive_file 0\ntotal_active_file {half}\ntotal_inactive_file {half}\n",
        )

    def limits(self, memory_limit_bytes=None, reserve_bytes=0):
        return memory_limits(memory_limit_bytes, reserve_bytes, self.root)

    def allowed_mib(self, *args):
        allowed = self.limits(*args).allowed_bytes
        return None if allowed is None else allowed / MIB


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_available_memory_is_the_limit_without_a_cgroup(machine):
    machine.meminfo(100_000, 60_000)
    assert machine.allowed_mib() == 60_000
    assert machine.limits().bound_by == "MemAvailable"


def test_a_system_that_tells_nothing_limits_nothing(machine):
    assert machine.allowed_mib() is None
    check_fits(1 << 60, machine.limits())


@pytest.mark.parametrize(
    ("total", "want"), [(100_000, 2048), (40_960, 2048), (10_000, 500), (100, 5)]
)
def test_the_reserve_is_five_percent_but_at_most_two_gib(machine, total, want):
    machine.meminfo(total, total)
    assert machine.limits(reserve_bytes=None).reserve_bytes == want * MIB


def test_the_reserve_in_a_small_cgroup_is_a_share_of_the_cgroup(machine):
    machine.meminfo(1_000_000, 900_000).put("proc/self/cgroup", "0::/box\n").v2("/box", 4000, 0)
    assert machine.limits(reserve_bytes=None).reserve_bytes == 200 * MIB


def test_a_cgroup_v2_limit_below_available_memory_holds(machine):
    machine.meminfo(100_000, 60_000).put("proc/self/cgroup", "0::/box\n").v2("/box", 8000, 3000)
    assert machine.allowed_mib() == 5000
    assert machine.limits().bound_by == "cgroup"


def test_the_tightest_ancestor_holds(machine):
    machine.meminfo(100_000, 60_000).put("proc/self/cgroup", "0::/a/b/c\n")
    machine.v2("/a/b/c", None, 100).v2("/a/b", 9000, 8000).v2("/a", 5000, 1000).v2("", None, 9)
    assert machine.allowed_mib() == 1000


def test_a_cgroup_path_that_only_the_host_sees_ends_at_the_containers_mount(machine):
    machine.meminfo(100_000, 60_000).put("proc/self/cgroup", "0::/kubepods/pod1/box\n")
    machine.v2("", 7000, 1000)
    assert machine.allowed_mib() == 6000


def test_a_cgroup_path_cannot_lead_out_of_its_mount(machine):
    machine.meminfo(100_000, 60_000).put("proc/self/cgroup", "0::/../box\n")
    machine.v2("/box", 7000, 1000)
    machine.v2("", 500, 0, mount="sys/fs")
    assert machine.allowed_mib() == 6000


def test_a_cgroup_v1_limit_holds(machine):
    machine.meminfo(100_000, 60_000)
    machine.put("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/box\n0::/\n")
    machine.v1("/docker/box", 8000, 3000).v1("/docker", None, 5000).v1("", None, 5000)
    assert machine.allowed_mib() == 5000


def test_an_unlimited_cgroup_is_no_limit(machine):
    machine.meminfo(100_000, 60_000).put("proc/self/cgroup", "4:memory:/box\n0::/box\n")
    machine.v1("/box", None, 3000).v2("/box", None, 3000)
    assert machine.limits().cgroup_bytes is None
    assert machine.allowed_mib() == 60_000


def test_the_unified_mount_of_a_mixed_system_is_read(machine):
    machine.meminfo(100_000, 60_000).put("proc/self/cgroup", "0::/box\n")
    machine.v2("/box", 8000, 3000, mount="sys/fs/cgroup/unified")
    assert machine.allowed_mib() == 5000


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_file_pages_of_a_cgroup_do_not_count_as_used(machine, version):
    # A server that has read its weights from disk fills its cgroup with pages the kernel can drop.
    machine.meminfo(100_000, 60_000).put("proc/self/cgroup", "4:memory:/box\n0::/box\n")
    getattr(machine, version)("/box", 8000, 7900, 6000)
    assert machine.allowed_mib() == 8000 - 1900


def test_a_cgroup_over_its_limit_allows_nothing(machine):
    machine.meminfo(100_000, 60_000).put("proc/self/cgroup", "0::/box\n").v2("/box", 100, 300)
    assert machine.allowed_mib() == 0


def test_an_explicit_limit_replaces_available_memory_in_both_directions(machine):
    machine.meminfo(100_000, 60_000)
    assert machine.allowed_mib(80_000 * MIB) == 80_000
    assert machine.allowed_mib(1_000 * MIB) == 1_000
    assert machine.limits(MIB).bound_by == "memory_limit_bytes"


def test_an_explicit_limit_does_not_lift_a_cgroup_limit(machine):
    machine.meminfo(100_000, 60_000).put("proc/self/cgroup", "0::/box\n").v2("/box", 8000, 3000)
    assert machine.allowed_mib(80_000 * MIB) == 5000


def test_the_reserve_stays_free(machine):
    machine.meminfo(100_000, 60_000)
    assert machine.allowed_mib(None, 1_000 * MIB) == 59_000
    check_fits(59_000 * MIB, machine.limits(None, 1_000 * MIB))
    with pytest.raises(MemoryError):
        check_fits(59_000 * MIB + 1, machine.limits(None, 1_000 * MIB))


def test_a_refusal_holds_both_sizes_and_the_figure_that_bound(machine):
    machine.meminfo(100_000, 60_000)
    with pytest.raises(MemoryError) as caught:
        check_fits(70_000 * MIB, machine.limits(None, 1_000 * MIB))
    text = str(caught.value)
    assert f"num_pages asks for {70_000 * MIB} bytes (68.36 GiB)" in text
    assert f"{59_000 * MIB} bytes (57.62 GiB) are allowed" in text
    assert "MemAvailable" in text


@pytest.mark.parametrize("name", ["memory_limit_bytes", "reserve_bytes"])
@pytest.mark.parametrize("value", [-1, 1.5, "1", True, False])
def test_a_limit_that_is_no_size_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name} got {value!r}"):
        memory_limits(**{name: value})


def test_limits_may_be_numpys_ints(machine):
    numpy = pytest.importorskip("numpy")
    limits = machine.limits(numpy.int64(90 * MIB), numpy.int32(MIB))
    assert limits.allowed_bytes == 89 * MIB
    assert type(limits.allowed_bytes) is int


def test_this_machines_files_can_be_read():
    limits = memory_limits()
    assert limits.allowed_bytes is not None
    assert 0 <= limits.allowed_bytes < limits.total_bytes
