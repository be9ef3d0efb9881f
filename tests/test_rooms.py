"""The rooms' arrows: who may include whom in csrc, who may import whom in the package."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "sgl_kvio"
ROOMS = ("request", "plan", "cpu", "gpu")
GPU_HEADER = re.compile(r"^(cuda|hip|cublas|nvml|nv|driver_types|cooperative_groups|device_)|gpu/")

pytestmark = pytest.mark.skipif(not CSRC.is_dir(), reason="not run from a source tree")


def sources(room):
    return sorted(path for path in (CSRC / room).rglob("*") if path.is_file())


def includes(path):
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def room_of(path, include):
    """The room that an include leads to, or "" when it leaves csrc."""
    for base in (path.parent, CSRC):
        target = (base / include).resolve()
        if target.is_file() and CSRC in target.parents:
            first = target.relative_to(CSRC).parts[0]
            return first if first in ROOMS else ""
    return ""


def may_include_torch(path):
    return path.parent.name == "request" and path.name.startswith("torch_")


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_files(room):
    assert sources(room)


@pytest.mark.parametrize("room", ["request", "plan"])
def test_request_and_plan_include_no_gpu_and_no_torch_header(room):
    wrong = [
        (path.name, include)
        for path in sources(room)
        for include in includes(path)
        if GPU_HEADER.search(include)
        or (include.startswith(("torch/", "ATen/", "c10/")) and not may_include_torch(path))
    ]
    assert wrong == []


# The arrows ops -> request -> plan -> {cpu, gpu}: a later room consumes what an earlier one made.
FORBIDDEN = {
    "request": {"plan", "cpu", "gpu"},
    "plan": {"cpu", "gpu"},
    "cpu": {"gpu"},
    "gpu": {"cpu"},
}


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_includes_one_that_it_must_not_know(room):
    wrong = [
        (path.name, include)
        for path in sources(room)
        for include in includes(path)
        if room_of(path, include) in FORBIDDEN[room]
    ]
    assert wrong == []


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_includes_the_front_door(room):
    wrong = [path.name for path in sources(room) if any("ops.h" in i for i in local(path))]
    assert wrong == []


def local(path):
    return [include for include in includes(path) if (CSRC / include).is_file()]


def test_no_include_cycle_in_csrc():
    files = [path for path in CSRC.rglob("*") if path.suffix in (".h", ".cuh", ".cpp", ".cu")]
    graph = {
        str(path.relative_to(CSRC)): {
            str(target.relative_to(CSRC))
            for include in includes(path)
            for target in [(path.parent / include).resolve(), (CSRC / include).resolve()]
            if target.is_file() and CSRC in target.parents
        }
        for path in files
    }
    assert find_cycle(graph) == []


def test_ops_cpp_is_the_only_place_that_registers_ops():
    registering = {
        path.name
        for path in CSRC.rglob("*")
        if path.is_file() and "STABLE_TORCH_LIBRARY" in path.read_text()
    }
    assert registering == {"ops.cpp"}


def test_kernel_bodies_hold_no_inline_assembly():
    """Inline assembly lives in headers of wrappers; a `.cu` file reads as a protocol."""
    wrong = [
        path.name for path in (CSRC / "gpu").glob("*.cu") if re.search(r"\basm\b", path.read_text())
    ]
    assert wrong == []


def imported_modules(path, *, at_load_time):
    """Modules of the package that a file imports; names like `ops`, `_C`."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if at_load_time else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "sgl_kvio":
                    found.add(alias.name.removeprefix("sgl_kvio").removeprefix(".") or "__init__")
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level == 0 and module.split(".")[0] != "sgl_kvio":
                continue
            module = module.removeprefix("sgl_kvio").removeprefix(".")
            if module:
                found.add(module)
            else:
                known = {name.stem for name in PACKAGE.glob("*.py")} | {"_C"}
                found |= {a.name if a.name in known else "__init__" for a in node.names}
    return found


def find_cycle(graph):
    """One cycle of a graph {node: nodes}, or []."""
    done, trail = set(), []

    def visit(node):
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in done:
            return []
        trail.append(node)
        for target in sorted(graph.get(node, ())):
            cycle = visit(target)
            if cycle:
                return cycle
        trail.pop()
        done.add(node)
        return []

    for node in sorted(graph):
        cycle = visit(node)
        if cycle:
            return cycle
    return []


MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))
# Public modules first; each may import only what stands behind it.
ORDER = [
    "__init__",
    "loader",
    "page_store",
    "pool",
    "memory",
    "layouts",
    "rates",
    "ops",
    "_binary",
    "_version",
    "_C",
]
COMMANDS = {"__main__", "demo", "doctor", "calibrate"}


def test_python_has_no_import_cycle():
    graph = {
        name: imported_modules(PACKAGE / f"{name}.py", at_load_time=True) - {name}
        for name in MODULES
    }
    # The command line sits on top of the public module, as any user does.
    assert find_cycle({name: graph[name] for name in graph if name not in COMMANDS}) == []


@pytest.mark.parametrize("name", [name for name in MODULES if name in ORDER])
def test_python_imports_go_from_the_public_module_inwards(name):
    allowed = set(ORDER[ORDER.index(name) + 1 :])
    assert imported_modules(PACKAGE / f"{name}.py", at_load_time=False) <= allowed


def test_ops_knows_nothing_of_the_package_but_the_library():
    assert imported_modules(PACKAGE / "ops.py", at_load_time=False) <= {"_binary"}


def test_nothing_imports_the_command_line():
    for name in MODULES:
        if name not in COMMANDS:
            assert not imported_modules(PACKAGE / f"{name}.py", at_load_time=False) & COMMANDS
