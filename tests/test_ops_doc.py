"""docs/ops.md: what the library registers, a contract of every op, errors as they are raised."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from test_schema import fake_kernel

import sgl_kvio

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "ops_doc.py"

pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="not run from a source tree")


def load_tool():
    spec = importlib.util.spec_from_file_location("ops_doc", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool() if TOOL.exists() else None


def contracts():
    return tool.CONTRACTS.items() if tool else ()


def canonical(text):
    """Schemas as this torch prints them, without what a build that has no GPU code cannot say."""

    def schema(match):
        return str(torch._C.parse_schema(" ".join(match[1].split())))

    text = re.sub(r"```\n(kvio::.*?)\n```", schema, text, flags=re.DOTALL)
    if sgl_kvio.capabilities()["backend"] != "cpu":
        return text
    return re.sub(r"^\| kernels \|.*$", lambda m: m[0].replace("`CUDA`, ", ""), text, flags=re.M)


def test_the_file_is_what_the_tool_makes_of_this_library():
    made = tool.document(tool.registered_ops(), tool.MATRIX.read_text())
    text = "docs/ops.md is out of date: run python tools/ops_doc.py"
    assert canonical(tool.DOC.read_text()).splitlines() == canonical(made).splitlines(), text


def test_every_registered_op_has_a_contract_and_no_other_has():
    registered = {
        name.removeprefix("kvio::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("kvio::")
    }
    assert set(tool.CONTRACTS) == registered


def test_the_file_has_every_overload_and_marks_what_it_writes():
    text = " ".join(tool.DOC.read_text().split())
    for overloads in tool.registered_ops().values():
        for overload in overloads.values():
            assert f"{overload.schema.partition('(')[0]}(" in text
            assert overload.written == () or tool.code_list(overload.written) in text


def test_a_schema_is_cut_between_arguments_and_loses_none():
    for overloads in tool.registered_ops().values():
        for overload in overloads.values():
            lines = tool.wrapped(overload.schema)
            assert " ".join(line.strip() for line in lines) == overload.schema
            assert max(map(len, lines)) <= tool.WIDTH


def test_readme_names_every_op_and_the_file():
    readme = (ROOT / "README.md").read_text()
    for op, _ in contracts():
        assert re.search(rf"`{op}\b", readme), op
    assert "docs/ops.md" in readme


@pytest.mark.parametrize(("op", "contract"), contracts())
def test_a_contract_names_what_python_has(op, contract):
    for owner, name in re.findall(r"`(sgl_kvio|HostKVPool)\.(\w+)", str(contract)):
        assert hasattr(sgl_kvio if owner == "sgl_kvio" else sgl_kvio.HostKVPool, name), name
    assert "`sgl_kvio." in contract.python


def quoted(text):
    """Texts in double quotes, but for those that are code."""
    return re.findall(r'"([^"]+)"', re.sub(r"`[^`]*`", "", tool.flat(text)))


def literals_of(path):
    """String literals, neighbouring ones joined as compilers do; no comments, no docstrings."""
    text = path.read_text()
    if path.suffix == ".py":
        nodes = list(ast.walk(ast.parse(text)))
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = (n for n in nodes if isinstance(n, ast.Constant) and id(n) not in docs)
        return [node.value for node in texts if isinstance(node.value, str)]
    code = re.sub(r'"\s*\n\s*"', "", re.sub(r"^\s*//.*$", "", text, flags=re.M))
    return re.findall(r'"((?:[^"\\\n]|\\.)*)"', code)


def test_every_quoted_error_is_one_of_the_library():
    files = [*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h")]
    files.append(ROOT / "sgl_kvio" / "ops.py")
    source = "\n".join(literal for path in files for literal in literals_of(path))
    quotes = [quoted(getattr(c, field)) for _, c in contracts() for field in tool.FIELDS]
    quotes += [quoted(" ".join(row)) for row in tool.BACKENDS]
    found = [quote for texts in quotes for quote in texts]
    assert len(found) > 20
    assert [quote for quote in found if quote not in source] == []


REFUSED = [(op, c) for op, c in contracts() if c.traced.startswith("Refused: ")]
RETURN_TEXT = [op for op, c in contracts() if c.modes.exported == "text of the trace"]


@pytest.mark.parametrize(("op", "contract"), REFUSED, ids=[op for op, _ in REFUSED])
def test_an_op_that_refuses_to_be_traced_says_what_its_contract_says(op, contract):
    (text,) = quoted(contract.traced)
    schema = tool.registered_ops()[op]["default"].schema
    parameters = [a for a in torch._C.parse_schema(schema).arguments if not a.has_default_value()]
    with pytest.raises(RuntimeError, match=f"kvio::{op}: {re.escape(text)}"):
        fake_kernel(op)(*(None for _ in parameters))
    assert (contract.modes.compiled, contract.modes.exported) == ("refused", "refused")


def text_call(op):
    rows, at = torch.zeros(8, 1, 4), torch.arange(4)
    others = {
        "explain": (([rows], [rows + 1], at, at), {}),
        "explain_staged": (
            ([rows], [rows + 1], at, at, torch.zeros(512, dtype=torch.uint8)),
            {"page_size": 4},
        ),
        "build_info": ((), {}),
    }
    arguments, options = others[op]

    class Ask(torch.nn.Module):
        def forward(self, x):
            return getattr(torch.ops.kvio, op)(*arguments, **options), x + 1

    return Ask(), rows


@pytest.mark.parametrize("op", RETURN_TEXT)
def test_an_op_that_returns_text_breaks_the_graph(op):
    ask, x = text_call(op)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(ask, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()
    assert torch.compile(ask, backend="eager")(x)[0] == ask(x)[0]


@pytest.mark.parametrize("op", RETURN_TEXT)
def test_an_export_returns_the_text_of_its_trace(op):
    ask, x = text_call(op)
    text, _ = torch.export.export(ask, (x,), strict=False).module()(x)
    told = tool.CONTRACTS[op].traced
    assert f'"{text.strip()}"' in told or f"`{text}`" in told


# --- the last section, from docs/wheel-matrix.md

RUN = "| cpu | 3.12.1 | 2.14.1 | some GPU | 2.35 | 5 passed | `gpu`, every case | 3 s |\n"


def matrix_with(run):
    before, rule, after = tool.MATRIX.read_text().partition("| wheel | Python | torch |")
    head, line, rest = after.split("\n", 2)
    return f"{before}{rule}{head}\n{line}\n{run}{rest}"


def test_the_last_section_alone_can_be_written_anew():
    old = tool.DOC.read_text()
    assert tool.with_new_seen_section(old, tool.MATRIX.read_text()) == old
    new = tool.with_new_seen_section(old, matrix_with(RUN))
    assert new.partition(tool.SEEN)[0] == old.partition(tool.SEEN)[0]
    assert "| cpu | 3.12.1 | 2.14.1 | some GPU | 2.35 | 5 passed | `gpu`, every case |\n" in new
    assert "No run of the tests" not in new


def test_what_failed_and_what_was_left_out_stand_in_the_last_section():
    text = tool.MATRIX.read_text().replace("# Wheel matrix\n", "# Wheel matrix\n\n**It failed.**\n")
    text = text.replace("## Left out\n", "## Left out\n\n* Python 9\n")
    seen = tool.seen_section(text).splitlines()
    assert "> **It failed.**" in seen
    assert "* Python 9" in seen[seen.index("Left out of that run:") :]


def test_a_wheel_is_seen_with_what_it_asks_for_and_holds():
    head, *rows = tool.rows_under(tool.MATRIX.read_text(), "## Wheels")
    facts = {name: cells for name, *cells in rows}
    seen = tool.seen_section(tool.MATRIX.read_text())
    for i, wheel in enumerate(head[1:]):
        for name in ("metadata", "machine code for", "newest glibc version it asks for"):
            assert any(
                line.startswith(f"| {wheel} |") and f"| {facts[name][i]} |" in line
                for line in seen.splitlines()
            ), name


def test_a_matrix_of_another_form_is_refused():
    with pytest.raises(ValueError, match="no heading '## Installed and tested'"):
        tool.seen_section("# Wheel matrix\n")
    with pytest.raises(ValueError, match="no heading"):
        tool.with_new_seen_section("# Ops\n", tool.MATRIX.read_text())
