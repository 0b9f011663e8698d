"""The build: kernel budget, ptxas gate, incremental nvcc, and the rules that the sources follow."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
CPP_SUFFIXES = {".h", ".cpp", ".cuh", ".cu"}
CPP_FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in CPP_SUFFIXES)
PYTHON_FILES = [ROOT / "setup.py"] + sorted(
    path
    for folder in ("flashbpt", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
    if path.name != "_build.py" and "out" not in path.parts
)

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 120
MAX_COLUMNS = 100
BLOCK_FOLDERS = ("activation", "add_partials", "rope", "row_dropout", "row_norm")
KERNEL_BUDGET = {"sm80 attention": 80, "paged": 40, "sm90": 60, "block": 24, "other": 20}


def name_of(path):
    return str(path.relative_to(ROOT))


every_cpp_file = pytest.mark.parametrize("path", CPP_FILES, ids=name_of)
every_python_file = pytest.mark.parametrize("path", PYTHON_FILES, ids=name_of)


@pytest.fixture
def setup_py():
    """setup.py as a module: its functions, without a build."""
    spec = importlib.util.spec_from_file_location("flashbpt_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------ kernels


def kernels_by_source(log):
    """{source: kernel names} of a ptxas log as setup.py writes it."""
    found, source = {}, None
    for line in log.splitlines():
        if line.startswith("== "):
            source = line[3:]
        elif kernel := re.search(r"Compiling entry function '(\S+)'", line):
            found.setdefault(source, set()).add(kernel[1])
    return found


def family(source):
    backend, folder = re.fullmatch(r"csrc/(\w+)/(\w+)/.+", source).groups()
    if folder.startswith("paged"):
        return "paged"
    if folder in BLOCK_FOLDERS:
        return "block"
    if backend == "sm80" and folder.startswith("attn"):
        return "sm80 attention"
    return "sm90" if backend == "sm90" else "other"


@pytest.fixture
def built_kernels():
    from flashbpt import _C

    if _C.build_info()["cuda"] is None:
        pytest.skip("the CUDA part is not built")
    logs = sorted(ROOT.glob("build/temp*/ptxas.log"), key=lambda path: path.stat().st_mtime)
    if not logs or ROOT not in Path(_C.__file__).parents:
        pytest.skip("flashbpt was not built in this folder")
    return kernels_by_source(logs[-1].read_text()), _C


def test_kernel_count_is_within_budget(built_kernels):
    kernels, _ = built_kernels
    counts = dict.fromkeys(KERNEL_BUDGET, 0)
    for source, names in kernels.items():
        counts[family(source)] += len(names)
    assert sum(counts.values()) > 0
    over = {name: n for name, n in counts.items() if n > KERNEL_BUDGET[name]}
    assert not over, f"more kernels than budgeted: {over}"


def test_library_holds_the_kernels_of_the_log(built_kernels):
    kernels, module = built_kernels
    if not shutil.which("nm"):
        pytest.skip("nm is not installed")
    symbols = subprocess.run(["nm", module.__file__], capture_output=True, text=True).stdout
    # nvcc gives every kernel a stub on the host, mangled as <length><__device_stub_ and kernel>.
    named = re.findall(r"(\d+)(__device_stub_\w+)", symbols)
    stubs = {stub[: int(length)].removeprefix("__device_stub_") for length, stub in named}
    assert stubs == set().union(*kernels.values())


def test_kernel_list_names_what_is_built(built_kernels):
    kernels, module = built_kernels
    listed = module.kernels()
    assert len({(kernel["backend"], kernel["name"]) for kernel in listed}) == len(listed)
    assert 0 < len(listed) <= sum(map(len, kernels.values()))
    for kernel in listed:
        assert any(f"/{kernel['backend']}/" in source for source in kernels)
        assert kernel["config"] and all(isinstance(n, int) for n in kernel["config"].values())


def test_families():
    for folder in ("attn_fwd", "attn_bwd", "attn_bwd_prepare", "attn_bwd_finish", "attn_bwd_terms"):
        assert family(f"csrc/sm80/{folder}/launch.cu") == "sm80 attention"
    assert family("csrc/sm80/attn_fwd/launch_bf16.cu") == "sm80 attention"
    assert family("csrc/sm90/paged_decode/launch.cu") == "paged"
    assert family("csrc/sm90/attn_bwd/launch.cu") == "sm90"
    for folder in ("merge_states", "mask_tiles", "rng_state", "dropout_mask"):
        assert family(f"csrc/sm80/{folder}/launch.cu") == "other"


# What a block may have on sm_86, sm_89 and sm_120.
SMALL_SHARED_MEMORY = 99 * 1024


def test_every_head_dim_has_a_row_for_small_shared_memory():
    from flashbpt import _C

    smallest = {}
    for kernel in _C.kernels():
        head_dim = kernel["config"].get("head_dim")
        if head_dim and kernel["backend"] != "sm90":
            name = kernel["name"].partition(f"_d{head_dim}")[0], head_dim
            size = kernel["config"]["smem_bytes"]
            smallest[name] = min(size, smallest.get(name, size))
    if not smallest:
        pytest.skip("this build has no attention kernels")
    assert {name for name, size in smallest.items() if size > SMALL_SHARED_MEMORY} == set()
    kinds = {name for name, _ in smallest}
    assert {f"attn_{k}_{t}" for k in ("fwd", "bwd") for t in ("bf16", "fp16", "fp32")} <= kinds


# --------------------------------------------------------------------------------------- ptxas gate

CLEAN = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1aPf' for 'sm_90a'
ptxas info    : Function properties for _Z1aPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 176 bytes cmem[2]
ptxas info    : Compile time = 189.733 ms
"""
SPILL = CLEAN.replace("_Z1aPf", "_Z1bPf").replace("0 bytes spill loads", "24 bytes spill loads")
STACK = CLEAN.replace("_Z1aPf", "_Z1cPf").replace("0 bytes stack", "16 bytes stack")
SERIALIZED = """\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the wgmma pipeline in the function '_Z1dPf'
"""


@pytest.mark.parametrize(
    "log, faulty",
    [
        (CLEAN, []),
        (SPILL, ["_Z1bPf"]),
        (STACK, ["_Z1cPf"]),
        (SERIALIZED, ["_Z1dPf"]),
        (CLEAN + STACK + CLEAN + SERIALIZED + SPILL, ["_Z1cPf", "_Z1dPf", "_Z1bPf"]),
        (CLEAN.replace("1 barriers", "1 barriers, 8 bytes cumulative stack size"), ["_Z1aPf"]),
    ],
    ids=["clean", "spill", "stack", "serialized", "mixed", "cumulative"],
)
def test_ptxas_faults(setup_py, log, faulty):
    assert [kernel for kernel, _ in setup_py.ptxas_faults(log)] == faulty


def test_allowed_kernels_pass_the_gate(setup_py):
    setup_py.ALLOWED = {"1b": "the spill is outside the loop and buys 5 % occupancy"}
    assert [kernel for kernel, _ in setup_py.ptxas_faults(SPILL + STACK)] == ["_Z1cPf"]


# ----------------------------------------------------------------------------------- nvcc and setup

FAKE_NVCC = """\
#!/bin/sh
while [ $# -gt 0 ]; do
  case $1 in -MF) deps=$2;; -o) object=$2;; esac; shift
done
echo "$object : {header}" > $deps
echo object > $object
echo run >> {runs}
cat {log}
"""


@pytest.fixture
def fake_build(setup_py, tmp_path, monkeypatch):
    """compile_all_cuda of one source; its nvcc prints `log`, depends on `header`, counts `runs`."""
    fake = SimpleNamespace(log=tmp_path / "log", header=tmp_path / "a.h", runs=tmp_path / "runs")
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(FAKE_NVCC.format(header=fake.header, runs=fake.runs, log=fake.log))
    nvcc.chmod(0o755)
    fake.log.write_text(CLEAN)
    fake.header.write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    setup_py.CUDA_SOURCES = ["csrc/sm80/one/launch.cu"]
    fake.build = lambda: setup_py.compile_all_cuda(tmp_path / "temp", tmp_path)
    fake.count = lambda: len(fake.runs.read_text().splitlines())
    return fake


def test_nvcc_runs_only_for_what_changed(fake_build, monkeypatch):
    objects = fake_build.build()
    assert [Path(obj).read_text() for obj in objects] == ["object\n"]
    fake_build.build()
    assert fake_build.count() == 1
    later = Path(objects[0]).stat().st_mtime + 10

    os.utime(fake_build.header, (later, later))
    fake_build.build()
    assert fake_build.count() == 2
    os.utime(fake_build.header, (later - 20, later - 20))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6")
    fake_build.build()
    assert fake_build.count() == 3


def test_a_fault_fails_every_build_until_it_is_mended(fake_build):
    fake_build.log.write_text(CLEAN + SPILL)
    for _ in range(2):
        with pytest.raises(SystemExit, match="_Z1bPf: .*24 bytes spill loads"):
            fake_build.build()
    assert fake_build.count() == 1


def test_architectures(setup_py, monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    sm80, sm90 = "csrc/sm80/a/launch.cu", "csrc/sm90/a/launch.cu"
    assert [code for _, code in setup_py.arch_codes(sm80)] == ["sm_80", "compute_80", "sm_90a"]
    assert setup_py.arch_codes(sm90) == [("compute_90a", "sm_90a")]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6;12.0+PTX")
    assert setup_py.arch_codes(sm80) == [
        ("compute_86", "sm_86"),
        ("compute_120", "sm_120"),
        ("compute_120", "compute_120"),
    ]
    assert setup_py.arch_codes(sm90) == [("compute_90a", "sm_90a")]
    for refused in ("7.5", "Hopper"):
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", refused)
        with pytest.raises(SystemExit, match=refused):
            setup_py.arch_codes(sm80)


def test_toolkit_behind_a_wrapper_is_found(setup_py, tmp_path, monkeypatch):
    wrapper = tmp_path / "wrapper/nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f"#!/bin/sh\necho '#$ _HERE_={tmp_path}/toolkit/bin' >&2\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", str(wrapper.parent), prepend=":")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert next(setup_py.toolkit_roots()) == tmp_path / "toolkit"
    monkeypatch.setenv("CUDA_HOME", "elsewhere")
    assert next(setup_py.toolkit_roots()) == "elsewhere"


def test_every_source_is_built(setup_py):
    listed = setup_py.CPP_SOURCES + setup_py.CUDA_SOURCES
    assert sorted(listed) == sorted(
        name_of(path) for path in CPP_FILES if path.suffix in (".cpp", ".cu")
    )


# ------------------------------------------------------------------------------------------ sources


def code_of(text):
    """C++ without comments, literals and preprocessor lines; every line keeps its number."""
    pattern = r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'"""
    pattern += r"|^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*"
    return re.sub(pattern, lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)


def functions(text):
    """(first line, lines) of every function of a C++ file, by matching braces."""
    code = code_of(text)
    found, scopes, head = [], [], 0  # scopes: None for a namespace or a type, else the first line
    for at, char in enumerate(code):
        if char in ";}" and not any(scopes):
            head = at + 1
        if char == "{":
            opening = code[head:at]
            is_scope = re.search(r"\b(namespace|struct|class|union|enum|extern)\b[^()=]*$", opening)
            first = code.count("\n", 0, head + len(opening) - len(opening.lstrip())) + 1
            scopes.append(None if is_scope and not any(scopes) else (first, "(" in opening))
            if not any(scopes):
                head = at + 1
        elif char == "}":
            scope = scopes.pop()
            if scope and not any(scopes):
                if scope[1]:
                    found.append((scope[0], code.count("\n", 0, at) + 2 - scope[0]))
                head = at + 1
    assert not scopes, "braces do not match"
    return found


def test_brace_matcher():
    text = """\
// a comment {
namespace a {
template <typename T>
struct S : Base<T> {
  int f(int x) const {
    if (x) { return '{'; }
    return 1'000;
  }
  int table[2] = {1, 2};
};
#define X {
void g() {}
const auto h = [](int a,
                  int b) {
  return "}";
};
}  // namespace a
"""
    assert functions(text) == [(5, 4), (12, 1), (13, 4)]


@every_cpp_file
def test_cpp_lengths(path):
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    long = [f"line {at}: {n} lines" for at, n in functions(text) if n > MAX_FUNCTION_LINES]
    assert not long, f"functions over {MAX_FUNCTION_LINES} lines: {long}"


@every_python_file
def test_python_lengths(path):
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, node.name


KERNEL_FILES = [path for path in CPP_FILES if path.suffix in (".cu", ".cuh")]


@pytest.mark.parametrize("path", KERNEL_FILES, ids=name_of)
def test_kernels_follow_earlier_grids(path):
    """Launched by launch_kernel alone, which lets them start early, and waiting before all else."""
    code = code_of(path.read_text())
    assert "<<<" not in code
    bodies = re.findall(r"__global__[^{]*\{\s*([^;]*;)", code)
    assert len(bodies) == code.count("__global__")
    assert set(bodies) <= {"ptx::follow_earlier_grids();"}


@pytest.mark.parametrize("path", CPP_FILES + PYTHON_FILES, ids=name_of)
def test_columns(path):
    wide = [n for n, line in enumerate(path.read_text().split("\n"), 1) if len(line) > MAX_COLUMNS]
    assert not wide, f"lines over {MAX_COLUMNS} columns: {wide}"


@every_cpp_file
def test_asm_only_in_ptx(path):
    if CSRC / "ptx" not in path.parents:
        assert not re.search(r"\b(asm|__asm__)\b", code_of(path.read_text()))


def includes(path):
    """The headers of csrc that a file names in quotes, and the names in angle brackets."""
    text = path.read_text()
    own = re.findall(r'^\s*#\s*include\s*"(.+?)"', text, re.M)
    found = [
        next((p for p in (path.parent / name, CSRC / name) if p.is_file()), None) for name in own
    ]
    assert None not in found, f"{own[found.index(None)]} is not in csrc"
    return [p.resolve() for p in found], re.findall(r"^\s*#\s*include\s*<(.+?)>", text, re.M)


def all_includes(path, seen=None):
    """Every angle-bracket include that compiling `path` leads to, with the file that names it."""
    seen = set() if seen is None else seen
    seen.add(path)
    own, system = includes(path)
    found = [(path, name) for name in system]
    for header in own:
        if header not in seen:
            found += all_includes(header, seen)
    return found


@pytest.mark.parametrize(
    "path",
    [p for p in CPP_FILES if p.suffix in (".cu", ".cuh") or p.name in ("launch.h", "config.h")],
    ids=name_of,
)
def test_kernels_compile_without_torch(path):
    torch = [
        f"{name_of(where)}: {name}"
        for where, name in all_includes(path)
        if name.split("/")[0] in ("torch", "ATen", "c10", "caffe2", "pybind11")
    ]
    assert not torch


LAYERS = {"ptx": 0, "tile": 1, "attention": 2, "sm80": 3, "sm90": 3}


@every_cpp_file
def test_layers_point_one_way(path):
    layer = path.relative_to(CSRC).parts[0]
    if layer not in LAYERS:
        return
    for header in includes(path)[0]:
        other = header.relative_to(CSRC).parts[0]
        if other in LAYERS and other != layer:
            assert LAYERS[other] < LAYERS[layer], f"{layer} includes {name_of(header)}"


@every_cpp_file
def test_no_dispatch_macros(path):
    text = path.read_text()
    assert not re.findall(r"\b(?:AT_DISPATCH|THO_DISPATCH)\w*", code_of(text))
    if path != CSRC / "ptx/wgmma.h":  # asm that names up to 128 registers
        found = re.findall(r"^[ \t]*#[ \t]*define[ \t]+\w+\(", text, re.M)
        assert not found, "a macro with arguments"


def test_no_paths_of_a_machine():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    home = re.compile(r"(?<![\w.:])/(?:root|home|work|Users)/\w")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.suffix not in (".png",):
            assert not home.search(path.read_text()), name
