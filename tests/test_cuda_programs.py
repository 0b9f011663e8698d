"""The test programs of tests/cuda, which check kernels and the tile layer alone, without torch."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import CUDA_HOME

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = sorted((ROOT / "tests/cuda").glob("*_main.cu"))


def sources(program):
    """The program, and what lies beside every launch.h that it includes."""
    headers = re.findall(r'#include "\.\./\.\./(csrc/.+)/launch\.h"', program.read_text())
    return [program] + [source for folder in headers for source in ROOT.glob(f"{folder}/*.cu")]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem.removesuffix("_main"))
def test_program(cuda, tmp_path, program):
    nvcc = Path(CUDA_HOME or "", "bin/nvcc")
    if not nvcc.is_file():
        pytest.skip("needs the CUDA Toolkit")
    major, minor = torch.cuda.get_device_capability(cuda)
    hopper = re.search("sm90|wgmma", program.name)  # elsewhere it says that it has nothing to check
    arch = "90a" if hopper else f"{major}{minor}" + "a" * (major == 9)
    built = tmp_path / program.stem
    flags = ["-O3", "--std=c++20", "--expt-relaxed-constexpr", "-cudart", "static", "-t", "4"]
    flags += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    command = [nvcc, *flags, *sources(program), "-o", built]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    ran = subprocess.run([built], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
