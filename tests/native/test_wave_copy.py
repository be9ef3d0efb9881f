"""The row copy of 32- and 64-lane waves (csrc/gpu/wave_copy.h), without a GPU.

Emulated: the same source, lane by lane on the CPU, rows by wave_copy_rows.cpp and the loop over the
rows of a wave by wave_copy_units.cpp. Compiled: the machine code that clang makes of it for AMD
GPUs, and nvcc for NVIDIA's, from wave_copy_kernel.cpp. Neither is a run on AMD hardware.
"""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from native import build

EMULATIONS = ("wave_copy_rows", "wave_copy_units")
KERNEL = build.HERE / "wave_copy_kernel.cpp"
WAVES = ("rows_by_wave_of_32", "rows_by_wave_of_64")
SEVERAL = ("several_by_wave_of_32", "several_by_wave_of_64")  # rows at a time


def built(folder: Path, *flags: str) -> dict[str, Path]:
    try:
        compiler = build.compiler()
    except build.CannotBuildError as missing:
        pytest.skip(f"the emulation cannot be built: {missing}")
    # With -fsanitize=undefined gcc folds members of different sizes into one, and then warns of it.
    warnings = ("-Wall", "-Wextra", "-Werror", "-Wno-array-bounds")
    flags = ("-std=c++17", *warnings, f"-I{build.CSRC}", *flags)

    def compiled(name: str) -> Path:
        build.run([*compiler, *flags, str(build.HERE / f"{name}.cpp"), "-o", str(folder / name)])
        return folder / name

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(EMULATIONS, pool.map(compiled, EMULATIONS), strict=True))


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return built(tmp_path_factory.mktemp("wave_copy"), "-O2")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wave_copy_sanitized")
    flags = ("-fsanitize=address", "-fno-omit-frame-pointer")
    trial = folder / "trial.cpp"
    trial.write_text("int main() {}\n")
    try:
        build.run([*build.compiler(), *flags, str(trial), "-o", str(folder / "trial")])
        build.run([str(folder / "trial")])
    except (build.CannotBuildError, RuntimeError) as missing:
        pytest.skip(f"no AddressSanitizer here: {missing}")
    return built(folder, "-O1", *flags)


def ran(program, *arguments):
    return subprocess.run([program, *arguments], capture_output=True, text=True)


def test_any_row_at_any_alignment_is_copied_whatever_the_order_of_lanes(programs):
    done = ran(programs["wave_copy_rows"], "all")
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 500_000


def test_rows_of_a_wave_are_copied_by_lane_groups_of_any_size(programs):
    """One or several rows a group at a time, fewer rows than groups, rows that are left out."""
    done = ran(programs["wave_copy_units"], "all")
    assert done.returncode == 0, done.stdout + done.stderr
    waves, rows = (int(word) for word in re.findall(r"\d+", done.stdout))
    assert waves > 20_000
    assert rows > 400_000


@pytest.mark.parametrize(
    ("program", "fault", "found"),
    [
        ("wave_copy_rows", "past-row", "outside of the destination row"),
        ("wave_copy_rows", "one-lane-twice", "not the ordinary loads|wrong bytes"),
        ("wave_copy_rows", "no-gate", "not the 16-byte non-temporal loads|not the ordinary loads"),
        ("wave_copy_units", "past-row", "outside of the destination row"),
        ("wave_copy_units", "wrong-lane", "outside of the destination row|wrong bytes"),
        ("wave_copy_units", "count-ignored", "outside of the destination row"),
        ("wave_copy_units", "null-written", "wrong bytes"),
        ("wave_copy_units", "one-by-one", "rows that could be on their way together are not"),
    ],
)
def test_the_emulation_finds_a_fault_that_was_put_in(programs, program, fault, found):
    done = ran(programs[program], "few", fault)
    assert done.returncode == 1
    assert re.search(found, done.stdout)


@pytest.mark.parametrize("program", EMULATIONS)
def test_address_sanitizer_sees_no_access_outside_of_a_row(sanitized, program):
    done = ran(sanitized[program], "few")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("program", EMULATIONS)
def test_address_sanitizer_sees_one_byte_too_many(sanitized, program):
    done = ran(sanitized[program], "few", "past-row")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


# ---- machine code for AMD GPUs

NON_TEMPORAL = {"gfx90a": {"glc", "slc"}, "gfx942": {"nt"}, "gfx950": {"nt"}}
CACHE_BITS = {"glc", "slc", "dlc", "scc", "nt", "sc0", "sc1"}
CLANGS = ("clang-19", "clang-20", "clang-21", "/opt/rocm/llvm/bin/clang")


def says(command):
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def hip_clang():
    for name in CLANGS:
        if shutil.which(name) is None or "amdgcn" not in says([name, "--print-targets"]):
            continue
        tools = (says([name, f"-print-prog-name={tool}"]).strip() for tool in AMD_TOOLS)
        missing = [tool for tool in tools if shutil.which(tool) is None]
        if missing:
            pytest.skip(f"{name} is there, but {missing[0]} is not: install lld and llvm beside it")
        return name
    pytest.skip(f"no clang that compiles for AMD GPUs: none of {', '.join(CLANGS)}")


AMD_TOOLS = ("ld.lld", "llvm-objdump", "llvm-readelf")


def compile_for(clang, target, output):
    flags = ["-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", f"-I{build.CSRC}"]
    flags += ["-x", "hip", "--cuda-device-only", "-nogpulib", "-nogpuinc"]
    flags += ["--no-gpu-bundle-output", f"--offload-arch={target}"]
    command = [clang, *flags, "-c", str(KERNEL), "-o", str(output)]
    return subprocess.run(command, capture_output=True, text=True)


class CodeObject:
    def __init__(self, clang, target, path):
        tool = {name: says([clang, f"-print-prog-name={name}"]).strip() for name in AMD_TOOLS}
        self.notes = says([tool["llvm-readelf"], "--notes", str(path)])
        self.kernels = {}
        for line in says([tool["llvm-objdump"], "-d", str(path)]).splitlines():
            if begins := re.match(r"[0-9a-f]+ <(\w+)>:", line):
                kernel = self.kernels.setdefault(begins[1], [])
            elif line.startswith("\t"):
                kernel.append(line.split("//")[0].replace(",", " ").split())

    def noted(self, key):
        return [int(value) for value in re.findall(rf"\.{key}: +(\d+)", self.notes)]


@pytest.fixture(scope="module", params=list(NON_TEMPORAL))
def code(request, hip_clang, tmp_path_factory):
    target = request.param
    path = tmp_path_factory.mktemp(target) / "wave_copy.o"
    done = compile_for(hip_clang, target, path)
    if target == "gfx950" and "invalid target ID" in done.stderr:
        pytest.skip(f"{hip_clang} is too old for gfx950: it needs LLVM 20")
    assert done.returncode == 0, done.stderr
    code = CodeObject(hip_clang, target, path)
    code.target = target
    return code


def memory_instructions(code, wave):
    return [
        words for words in code.kernels[wave] if re.match("(global|flat|scratch|buffer)_", words[0])
    ]


def test_the_code_object_is_for_the_target_that_was_asked_for(code):
    assert f"amdgcn-amd-amdhsa--{code.target}" in code.notes
    assert set(code.kernels) == {*WAVES, *SEVERAL}


@pytest.mark.parametrize("wave", [*WAVES, *SEVERAL])
def test_wide_loads_are_non_temporal_and_everything_else_is_cached(code, wave):
    bits_of = {}
    for words in memory_instructions(code, wave):
        bits_of.setdefault(words[0], []).append(CACHE_BITS & set(words))
    wide_loads = bits_of.pop("global_load_dwordx4")
    assert all(bits == NON_TEMPORAL[code.target] for bits in wide_loads)
    assert len(bits_of["global_store_dwordx4"]) == len(wide_loads)
    assert not any(bits for found in bits_of.values() for bits in found)


@pytest.mark.parametrize("wave", [*WAVES, *SEVERAL])
def test_no_access_goes_through_scratch_or_a_flat_address(code, wave):
    kinds = {words[0].split("_")[0] for words in memory_instructions(code, wave)}
    assert kinds == {"global"}
    for key in ("private_segment_fixed_size", "vgpr_spill_count", "sgpr_spill_count"):
        assert code.noted(key) == [0] * 4


def shape(code, wave):
    """The kernel as a text: L and S for wide loads and stores, l and s for others, w where a wait
    leaves nothing in flight."""
    letters = []
    for words in code.kernels[wave]:
        if words[0].startswith(("global_load", "global_store")):
            letter = words[0][len("global_")]
            letters.append(letter.upper() if words[0].endswith("x4") else letter)
        elif words[0] == "s_waitcnt" and "vmcnt(0)" in words:
            letters.append("w")
    return "".join(letters)


@pytest.mark.parametrize("wave", WAVES)
def test_loads_are_in_flight_together_and_no_store_waits_for_another(code, wave):
    text = shape(code, wave)
    assert "LLLL" in text  # the loop over long rows
    assert re.search("LLLlll+w+[sS]", text)  # the last wide steps, words and bytes: one trip
    assert not re.search("[sS]w[sS]", text)


@pytest.mark.parametrize("wave", SEVERAL)
def test_loads_of_several_rows_are_in_flight_together(code, wave):
    text = shape(code, wave)
    assert re.search("L{16}w+S{16}", text)  # the loop over long rows
    assert re.search("(?:LLLlll){4}w+[sS]", text)  # what is left of four rows: one trip
    # Four rows below the gate: two words of each, which is all they can have, or four, and bytes.
    assert re.search("(?:l{12}|l{20})w+s", text)
    assert not re.search("[sS]w[sS]", text)


def test_a_made_up_target_is_refused_by_name(hip_clang, tmp_path):
    done = compile_for(hip_clang, "gfx9zz", tmp_path / "none.o")
    assert done.returncode != 0
    assert re.search("(invalid|unsupported).*gfx9zz", done.stderr)
    assert not (tmp_path / "none.o").exists()


# ---- machine code for NVIDIA GPUs


def test_cuda_compiles_waves_of_32_and_groups_of_64_threads_without_a_stack(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    flags = ["-std=c++17", "-x", "cu", "-arch=sm_90", f"-I{build.CSRC}", "-Xptxas", "-v", "-cubin"]
    said = says(["nvcc", *flags, str(KERNEL), "-o", str(tmp_path / "wave_copy.cubin")])
    assert (tmp_path / "wave_copy.cubin").exists(), said
    for wave in (*WAVES, *SEVERAL):
        assert re.search(
            rf"properties for {wave}\s+0 bytes stack frame, 0 bytes spill stores", said
        ), said
