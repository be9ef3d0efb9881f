#!/usr/bin/env bash
# Builds every wheel that this machine's toolchains allow, checks each, and writes docs/wheel-matrix.md from what it saw.
#
#   ./build_wheels.sh [BACKEND...]     cpu, cuda, rocm; default: all whose compiler is here, the others are named
#   ./build_wheels.sh --tests          only the environments and the table, for the wheels of the last run
#   ./build_wheels.sh --table          only the table, from the last run and bench/results/wheel-*.json
#
# Wheels and the source distribution go to dist/, all else to build/wheels/. A wheel is built from the unpacked source
# distribution, so that nothing of this tree can slip in, with SOURCE_DATE_EPOCH (default: the last commit of what goes
# into a wheel); auditwheel strips it and names its policy. tools/wheels.py then refuses a wrong name, tag or
# requirement, a bundled library, a symbol outside the policy or the limited Python API, a kernel that lacks an
# architecture, 10 MB and more. Last, each wheel goes into new virtual environments, where a copy of tests/ runs.
#
#   KVIO_WHEEL_ENVS="3.10=2.10.0 ..."  PYTHON=TORCH pairs; a Python that is not here is named and left out. Empty: none
#   KVIO_WHEEL_TWICE="cpu ..."         backends that are built a second time and compared byte for byte (default: cpu)
#   PYTHON                             the Python that builds (default: python3; 3.10 or later)
#   MAX_JOBS                           parallel compile jobs
#
# Needs a C++ compiler, binutils, and packages by pip (tools/wheel_requirements.txt; torch for each environment, up to
# 7 GB on disk, removed after its tests). Tests: the first case of every test function with the cpu wheel; the others
# differ in the library alone, so they leave out what is Python's or torch's (`python_only`). Any failure ends the run
# with its status. About 18 minutes on two idle cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
umask 022
unset PYTHONPATH PYTHONHOME KVIO_BACKEND KVIO_CUDA_ARCHS KVIO_ROCM_ARCHS KVIO_LINK_LAST

work=$PWD/build/wheels
dist=$PWD/dist
table=$PWD/docs/wheel-matrix.md
tools=$work/tools/bin/python
workers=$(nproc)
((workers <= 4)) || workers=4
environments=${KVIO_WHEEL_ENVS-3.10=2.10.0 3.11=2.13.0 3.13=2.14.1}
twice=" ${KVIO_WHEEL_TWICE-cpu} "
into_wheels=(sgl_kvio csrc cmake CMakeLists.txt setup.py pyproject.toml README.md LICENSE tools/wheel_requirements.txt)
python_only="compile or export or memory or rates or cli or page_store or loader or fuzz"

say() { printf '== %4d s  %s\n' "$SECONDS" "$*"; }

leave_out() {
    echo "$*" >>"$work/left_out.txt"
    say "left out: $*"
}

write_table() {
    local arguments=(--epoch "$(cat "$work/epoch.txt")") line
    while read -r line; do arguments+=(--left-out "$line"); done < <(sort -u "$work/left_out.txt")
    while read -r line; do arguments+=(--built-twice "$line"); done <"$work/built_twice.txt"
    "$tools" tools/wheels.py describe "$work/run.json" "${arguments[@]}"
    mkdir -p "${table%/*}"
    shopt -s nullglob
    "$tools" tools/wheels.py matrix "$work" "$table" bench/results/wheel-*.json
    shopt -u nullglob
    "$tools" tools/ops_doc.py --seen # its last section is made of the table
    say "wrote ${table#"$PWD/"}"
}

make_tools() { # the environment that builds and audits, kept between runs
    local wanted=tools/wheel_requirements.txt stamp=$work/tools/requirements.txt
    cmp -s "$wanted" "$stamp" && return
    rm -rf "$work/tools"
    "${PYTHON:-python3}" -m venv "$work/tools"
    "$tools" -m pip install -q -r "$wanted"
    cp "$wanted" "$stamp"
}

# Why a backend cannot be built here, or nothing. What to look for is CMake's to know: it is asked.
missing_toolchain() {
    local backend=$1 probe=$work/probe
    case $backend in
    cuda)
        command -v "${CUDACXX:-nvcc}" >/dev/null || echo "no nvcc on the PATH"
        ;;
    rocm)
        rm -rf "$probe"
        if ! "$work/tools/bin/cmake" -S . -B "$probe" -G Ninja -DCMAKE_MAKE_PROGRAM="$work/tools/bin/ninja" \
            -DKVIO_BACKEND=rocm >"$work/probe.log" 2>&1; then
            tr -s ' \n' ' ' <"$work/probe.log" | grep -oE "KVIO_BACKEND is 'rocm' but [^;]*(no HIP compiler|hip_runtime_api.h)[^;]*" ||
                cat "$work/probe.log" >&2
        fi
        ;;
    esac
}

build() { # BACKEND SOURCE_FOLDER OUT: one wheel, audited and stripped, into OUT
    local backend=$1 source=$2 out=$3
    rm -rf "$source" "$out"
    mkdir -p "$source" "$out/raw"
    tar -xzf "$dist/$sdist" -C "$source" --strip-components=1
    KVIO_BACKEND=$backend KVIO_LINK_LAST=$link_last "$tools" -m pip wheel -q --no-deps --no-build-isolation \
        --no-index -w "$out/raw" "$source"
    PATH=$work/tools/bin:$PATH "$tools" -m auditwheel repair --strip --exclude 'libtorch*' --exclude 'libc10*' \
        -w "$out" "$out"/raw/*.whl >"$out/auditwheel.log" 2>&1 || { cat "$out/auditwheel.log" >&2; return 1; }
    rm -rf "$out/raw"
}

find_python() { # VERSION: an interpreter that can make environments; nothing when there is none
    local version=$1 candidate
    for candidate in "$tools" "python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python \
        /opt/python/cp"${version/./}"-cp"${version/./}"/bin/python; do
        if [[ $("$candidate" -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) == "$version" ]]; then
            command -v "$candidate"
            return
        fi
    done
}

site_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

test_wheel() { # PYTHON BASE WHEEL CELL_NAME: a new environment on top of the one that has torch
    local python=$1 base=$2 wheel=$3 name=$4 cell=$work/cell site selection=()
    rm -rf "$cell"
    "$python" -m venv --without-pip "$cell"
    site=$(site_of "$cell/bin/python")
    site_of "$base/bin/python" >"$site/torch_and_pytest.pth"
    # From no index: whatever the wheel asks for besides torch would fail here.
    "$base/bin/python" -m pip --python "$cell/bin/python" install -q --no-index "$wheel"
    [[ $wheel == *+cpu-* ]] || selection=(-k "not ($python_only)")
    (cd "$work" && KVIO_TEST_CASES=1 "$cell/bin/python" "$OLDPWD/tools/wheel_cell.py" --tests "$work/outside/tests" \
        --within "$site" --wheel "${wheel##*/}" --out "$work/cells/$name.json" -- -n "$workers" --durations=10 "${selection[@]}") \
        >"$work/logs/$name.log" 2>&1 || { cat "$work/logs/$name.log" >&2; return 1; }
    grep -E "imported from|passed" "$work/logs/$name.log"
    rm -rf "$cell"
}

test_in_environments() { # every wheel in dist/ in every environment; leaves cells
    local pair version torch python base wheel name wheels=("$dist"/sgl_kvio-*.whl)
    [[ -f ${wheels[0]} ]] || { echo "dist/ holds no wheel" >&2; return 1; }
    rm -rf "$work/outside"
    mkdir -p "$work/outside"
    cp -r tests "$work/outside/tests"
    rm -rf "$work/outside/tests/native" # compiles csrc, and says nothing about a wheel
    for pair in $environments; do
        version=${pair%=*} torch=${pair#*=}
        python=$(find_python "$version")
        if [[ -z $python ]]; then
            leave_out "Python $version with torch $torch: no such Python with venv"
            continue
        fi
        say "environment: Python $version, torch $torch"
        base=$work/base-$version
        rm -rf "$base"
        "$python" -m venv "$base"
        "$base/bin/python" -m pip install -q "torch==$torch" pytest pytest-xdist hypothesis numpy
        for wheel in "${wheels[@]}"; do
            say "${wheel##*/}"
            name=${wheel##*/sgl_kvio-}
            test_wheel "$python" "$base" "$wheel" "$version-${name%%-*}"
        done
        rm -rf "$base"
    done
}

if [[ ${1:-} == --tests || ${1:-} == --table ]]; then
    [[ $1 == --table ]] || test_in_environments
    write_table
    exit
fi
asked=("$@")
((${#asked[@]})) || asked=(cpu cuda rocm)
for backend in "${asked[@]}"; do
    [[ $backend =~ ^(cpu|cuda|rocm)$ ]] || { echo "unknown backend $backend; it needs cpu, cuda or rocm" >&2; exit 2; }
done

mkdir -p "$work" "$dist"
rm -rf "$work"/{facts,cells,logs} "$dist"/sgl_kvio-*
mkdir -p "$work"/{facts,cells,logs}
: >"$work/left_out.txt"
: >"$work/built_twice.txt"
if [[ -z ${SOURCE_DATE_EPOCH:-} ]]; then
    SOURCE_DATE_EPOCH=$(git log -1 --format=%ct -- "${into_wheels[@]}" 2>/dev/null || true)
fi
# 2020-01-01 where there is no commit to ask.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-1577836800}
echo "$SOURCE_DATE_EPOCH" >"$work/epoch.txt"

say "tools: pip install -r tools/wheel_requirements.txt"
make_tools
link_last=$("$tools" tools/old_glibc.py "$work/stubs")

say "source distribution"
"$tools" setup.py -q sdist -d "$dist" >"$work/logs/sdist.log" 2>&1 || { cat "$work/logs/sdist.log" >&2; exit 1; }
sdist=$(cd "$dist" && ls sgl_kvio-*.tar.gz)

for backend in "${asked[@]}"; do
    missing=$(missing_toolchain "$backend")
    if [[ -n $missing ]]; then
        (($# == 0)) || { echo "$backend: $missing" >&2; exit 1; }
        leave_out "the $backend wheel: $missing"
        continue
    fi
    say "$backend: build"
    build "$backend" "$work/source-$backend" "$work/$backend"
    wheel=$(ls "$work/$backend"/*.whl)
    if [[ $twice == *" $backend "* ]]; then
        # nvcc and clang name what is local to a kernel's file after its full path: the same bytes need the same folder.
        where="in the same folder" source=$work/source-$backend
        [[ $backend != cpu ]] || where="in another folder" source=$work/again/elsewhere/$backend
        say "$backend: build again $where"
        build "$backend" "$source" "$work/again/$backend"
        cmp "$wheel" "$work/again/$backend/${wheel##*/}"
        echo "$backend=yes, $where" >>"$work/built_twice.txt"
        rm -rf "$work/again"
    fi
    cp "$wheel" "$dist/"
    "$tools" tools/wheels.py check "$dist/${wheel##*/}" "$work/facts/$backend.json" --moved "$work/stubs/moved.json"
    rm -rf "$work/source-$backend"
done
test_in_environments
write_table
say "wheels in dist/:"
(cd "$dist" && ls -l sgl_kvio-*)
