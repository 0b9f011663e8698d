"""What is shipped, what the build refuses and how, what an import leaves alone."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    str(path.relative_to(ROOT))
    for folder, suffixes in {"csrc": (".h", ".cpp", ".cuh", ".cu"), "flashbpt": (".py",)}.items()
    for path in (ROOT / folder).rglob("*")
    if path.suffix in suffixes and path.name != "_build.py"
]


def python(*arguments, cwd=ROOT, path=None, **environment):
    environment = {**os.environ, **environment, "PYTHONPATH": str(path or cwd)}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )


# ------------------------------------------------------------------------------- refusals to build


def fake_torch(folder, source):
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text(source)
    return folder


def torch_of(version, cuda):
    return f"__version__ = {version!r}\nclass version:\n    cuda = {cuda!r}\n"


def fake_toolkit(folder, release):
    (folder / "bin").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "include/cuda_runtime.h").touch()
    (folder / "bin/nvcc").write_text(
        f"#!/bin/sh\necho 'Cuda compilation tools, release {release}'\n"
    )
    (folder / "bin/nvcc").chmod(0o755)
    return folder


@pytest.mark.parametrize(
    "source, toolkit, sentence",
    [
        (
            "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')",
            "13.0",
            "flashbpt: torch is not visible to the build; install torch 2.11 or newer, then run "
            "`pip install --no-build-isolation .`",
        ),
        (
            torch_of("2.10.1+cu128", "12.8"),
            "12.8",
            "flashbpt: torch 2.10.1+cu128 is too old; flashbpt needs torch 2.11 or newer",
        ),
        (
            torch_of("2.14.1+cu126", "12.6"),
            "13.0",
            "flashbpt: the CUDA toolkit at {toolkit} is 13.0, but torch 2.14.1+cu126 is built with "
            "CUDA 12.6; set CUDA_HOME to a 12.x toolkit, or FLASHBPT_DISABLE_CUDA=1 to build the "
            "CPU part alone",
        ),
        (
            torch_of("2.14.1+cpu", None),
            "13.0",
            "flashbpt: FLASHBPT_FORCE_CUDA=1 was set, but torch 2.14.1+cpu is not a CUDA build",
        ),
    ],
    ids=["missing", "old", "mismatch", "forced"],
)
def test_build_refuses_in_one_sentence(tmp_path, source, toolkit, sentence):
    path = fake_torch(tmp_path / "site", source)
    toolkit = fake_toolkit(tmp_path / "cuda", toolkit)
    environment = {"FLASHBPT_FORCE_CUDA": "1", "CUDA_HOME": str(toolkit)}
    for command in ("build_ext", "bdist_wheel", "editable_wheel"):
        done = python("setup.py", command, path=path, **environment)
        assert done.returncode == 1
        assert done.stderr.strip() == sentence.format(toolkit=toolkit)


def test_old_setuptools_is_refused(tmp_path):
    (tmp_path / "setuptools.py").write_text("__version__ = '65.5.0'\n")
    for command in ("egg_info", "bdist_wheel"):
        done = python("setup.py", command, path=tmp_path)
        assert done.returncode == 1
        assert done.stderr.strip() == (
            "flashbpt: setuptools 65.5.0 is too old; run `pip install --upgrade setuptools`, "
            "flashbpt needs 77 or newer"
        )


@pytest.fixture
def setup_py(monkeypatch):
    for name in ("FLASHBPT_FORCE_CUDA", "FLASHBPT_DISABLE_CUDA", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("flashbpt_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CUDA_TORCH = SimpleNamespace(__version__="2.14.1+cu130", version=SimpleNamespace(cuda="13.0"))
CPU_TORCH = SimpleNamespace(__version__="2.14.1+cpu", version=SimpleNamespace(cuda=None))


def test_cpu_part_alone_says_why(setup_py, monkeypatch):
    monkeypatch.setattr(setup_py, "toolkit_roots", list)
    none = "torch 2.14.1+cu130 is a CUDA build, but no CUDA toolkit was found"
    assert setup_py.find_cuda(CUDA_TORCH) == (None, none)
    assert setup_py.find_cuda(CPU_TORCH) == (None, "torch 2.14.1+cpu is not a CUDA build")
    monkeypatch.setenv("FLASHBPT_FORCE_CUDA", "1")
    with pytest.raises(
        SystemExit, match=f"FLASHBPT_FORCE_CUDA=1 was set, but {none}".replace("+", r"\+")
    ):
        setup_py.find_cuda(CUDA_TORCH)


def test_toolkit_of_the_right_major_is_taken(setup_py, monkeypatch, tmp_path):
    old, right = fake_toolkit(tmp_path / "a", "12.9"), fake_toolkit(tmp_path / "b", "13.2")
    monkeypatch.setattr(setup_py, "toolkit_roots", lambda: [tmp_path / "none", old, right])
    assert setup_py.find_cuda(CUDA_TORCH) == (right, None)
    monkeypatch.setenv("FLASHBPT_DISABLE_CUDA", "1")
    assert setup_py.find_cuda(CUDA_TORCH) == (None, "FLASHBPT_DISABLE_CUDA=1 was set")


# ------------------------------------------------------------------------------- what is shipped


def test_sdist_is_complete(tmp_path):
    done = python("setup.py", "-q", "egg_info", "-e", tmp_path, "sdist", "-d", tmp_path)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("flashbpt-*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    wanted = {*SOURCES, "setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"}
    assert wanted <= names
    folders = {name.split("/")[0] for name in names if "/" in name}
    assert folders <= {"csrc", "flashbpt", "flashbpt.egg-info"}
    assert not any(name.endswith((".so", ".o", "_build.py")) for name in names)


def test_wheel_holds_the_package_alone(tmp_path):
    done = python("setup.py", "-q", "build_py", "-d", tmp_path, path=ROOT)
    assert done.returncode == 0, done.stderr
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    package = {name for name in SOURCES if name.startswith("flashbpt/")}
    assert files - {"flashbpt/_build.py"} == package


# ------------------------------------------------------------------------------- import


def test_readme_examples_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) >= 5
    exec("".join(blocks), {})
    assert "cpu" in capsys.readouterr().out


def test_import_leaves_torch_alone():
    done = python(
        "-c",
        "import torch, torch.nn.functional as F\n"
        "sdpa, seed = F.scaled_dot_product_attention, torch.initial_seed()\n"
        "threads = torch.get_num_threads()\n"
        "import flashbpt\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert F.scaled_dot_product_attention is sdpa\n"
        "assert torch.initial_seed() == seed and torch.get_num_threads() == threads\n"
        "print(flashbpt.__version__)\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() and done.stderr == ""


def test_runtime_libraries_are_those_of_torch():
    """A second OpenMP runtime is a second thread pool; a second libstdc++ breaks exceptions."""
    done = python("-c", "import flashbpt; print(open('/proc/self/maps').read())")
    for library in ("libgomp", "libstdc[+][+]"):
        files = set(re.findall(rf"/.*/{library}.*", done.stdout))
        assert len(files) == 1, files
    extension = importlib.import_module("flashbpt._C")
    assert b"libstdc++.so.6" in Path(extension.__file__).read_bytes()


def test_info_tells_versions_and_build():
    done = python("-m", "flashbpt.info")
    assert done.returncode == 0, done.stderr
    told = dict(line.split(None, 1) for line in done.stdout.splitlines() if line[0] != " ")
    assert torch.__version__ in told["torch"]
    assert told["compiler"].startswith("g++")
    extension = importlib.import_module("flashbpt._C")
    cuda = extension.build_info()["cuda"]
    assert f"CUDA part   {f'toolkit {cuda}' if cuda else 'none: '}" in done.stdout
    assert int(told["kernels"].split()[0]) == len(extension.kernels())


@pytest.mark.parametrize(
    "built_for, sentence",
    [
        (None, "flashbpt's extension is not built for this Python; run `pip install"),
        (
            "2.9.1+cu130",
            f"was built for torch 2.9.1+cu130, but torch {torch.__version__} is running",
        ),
        (torch.__version__, "file too short"),
    ],
    ids=["not built", "another torch", "broken"],
)
def test_import_error_names_the_cause(tmp_path, built_for, sentence):
    package = tmp_path / "flashbpt"
    shutil.copytree(ROOT / "flashbpt", package, ignore=shutil.ignore_patterns("*.so", "_build.py"))
    if built_for:
        (package / "_build.py").write_text(f"TORCH_VERSION = {built_for!r}\n")
        (package / "_C.so").touch()
    done = python("-c", "import flashbpt", cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: flashbpt's extension") and sentence in last
