"""Builds flashbpt: one extension module, flashbpt._C, from the sources listed here.

C++ files go through torch's BuildExtension. CUDA files include no torch header, so nvcc compiles
each on its own, for the architectures of its folder. The build fails where ptxas reports a spill,
local memory or serialized wgmma in a kernel that SPILLS does not list.

Environment
    FLASHBPT_FORCE_CUDA=1    fail where the CUDA part cannot be built
    FLASHBPT_DISABLE_CUDA=1  leave the CUDA part out
    CUDA_HOME                the toolkit to use
    TORCH_CUDA_ARCH_LIST     architectures of csrc/sm80, as in "8.0;8.6+PTX" (csrc/sm90: 9.0a only)
    MAX_JOBS                 parallel compilations
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import setuptools

ROOT = Path(__file__).resolve().parent
CPP_SOURCES = [
    "csrc/ops.cpp",
    "csrc/module.cpp",
    "csrc/attention.cpp",
    "csrc/attention_call.cpp",
    "csrc/attention_cpu.cpp",
    "csrc/attention_sm80.cpp",
    "csrc/attention_sm90.cpp",
    "csrc/block_elementwise.cpp",
    "csrc/block_elementwise_sm80.cpp",
    "csrc/block_offload.cpp",
    "csrc/blockwise.cpp",
    "csrc/blockwise_check.cpp",
    "csrc/blockwise_ffn.cpp",
    "csrc/blockwise_ops.cpp",
    "csrc/blockwise_positions.cpp",
    "csrc/device_limits.cpp",
    "csrc/aten/attention.cpp",
    "csrc/aten/block_elementwise.cpp",
    "csrc/dropout.cpp",
    "csrc/linear.cpp",
    "csrc/merge_states.cpp",
    "csrc/paged.cpp",
    "csrc/paged_call.cpp",
    "csrc/paged_sm80.cpp",
    "csrc/paged_sm90.cpp",
    "csrc/stream_words.cpp",
    "csrc/cpu/attention_forward.cpp",
    "csrc/cpu/attention_backward.cpp",
    "csrc/cpu/score_tile.cpp",
    "csrc/cpu/row_math.cpp",
    "csrc/cpu/dropout_mask.cpp",
    "csrc/cpu/merge_states.cpp",
    "csrc/cpu/paged.cpp",
]
CUDA_SOURCES = [
    "csrc/sm80/activation/launch.cu",
    "csrc/sm80/add_partials/launch.cu",
    "csrc/sm80/append_kv/launch.cu",
    "csrc/sm80/attn_bwd/launch.cu",
    "csrc/sm80/attn_bwd/launch_bf16.cu",
    "csrc/sm80/attn_bwd/launch_fp16.cu",
    "csrc/sm80/attn_bwd/launch_fp32.cu",
    "csrc/sm80/attn_bwd_finish/launch.cu",
    "csrc/sm80/attn_bwd_prepare/launch.cu",
    "csrc/sm80/attn_bwd_terms/launch.cu",
    "csrc/sm80/attn_bwd_terms/launch_bf16.cu",
    "csrc/sm80/attn_bwd_terms/launch_fp16.cu",
    "csrc/sm80/attn_bwd_terms/launch_fp32.cu",
    "csrc/sm80/attn_fwd/launch.cu",
    "csrc/sm80/attn_fwd/launch_bf16.cu",
    "csrc/sm80/attn_fwd/launch_fp16.cu",
    "csrc/sm80/attn_fwd/launch_fp32.cu",
    "csrc/sm80/dropout_mask/launch.cu",
    "csrc/sm80/mask_tiles/launch.cu",
    "csrc/sm80/merge_states/launch.cu",
    "csrc/sm80/paged_decode/launch.cu",
    "csrc/sm80/paged_decode/launch_bf16.cu",
    "csrc/sm80/paged_decode/launch_e4m3.cu",
    "csrc/sm80/paged_decode/launch_e5m2.cu",
    "csrc/sm80/paged_decode/launch_fp16.cu",
    "csrc/sm80/paged_decode/launch_fp32.cu",
    "csrc/sm80/paged_prefill/launch.cu",
    "csrc/sm80/paged_prefill/launch_bf16.cu",
    "csrc/sm80/paged_prefill/launch_fp16.cu",
    "csrc/sm80/rng_state/launch.cu",
    "csrc/sm80/rope/launch.cu",
    "csrc/sm80/row_dropout/launch.cu",
    "csrc/sm80/row_norm/launch.cu",
    "csrc/sm90/attn_fwd/launch.cu",
    "csrc/sm90/attn_fwd/launch_bf16.cu",
    "csrc/sm90/attn_fwd/launch_bf16_all.cu",
    "csrc/sm90/attn_fwd/launch_bf16_masks.cu",
    "csrc/sm90/attn_fwd/launch_bf16_pages.cu",
    "csrc/sm90/attn_fwd/launch_fp16.cu",
    "csrc/sm90/attn_fwd/launch_fp16_all.cu",
    "csrc/sm90/attn_fwd/launch_fp16_masks.cu",
    "csrc/sm90/attn_fwd/launch_fp16_pages.cu",
]
CXX_FLAGS = ["-O3", "-g0", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wall"]
NVCC_FLAGS = ["-O3", "--std=c++20", "--expt-relaxed-constexpr", "-lineinfo"]
NVCC_FLAGS += ["-Xptxas=-v", "-Xcompiler=-fPIC", "-Icsrc"]

# Kernels that may spill or use local memory: kernel, rows of its table, why it is worth it. Of two
# rows the first is bf16, the second fp16 (of fp8 caches e4m3 and e5m2). The kernels' pages in docs
# have the bytes.
SPILLS = [
    ("sm80/attn_bwd", (0, 13), "d64: on sm_80; a third block a multiprocessor buys 15 %"),
    ("sm80/attn_bwd", (1, 14), "d128: words read once a step; a second block buys more"),
    ("sm80/attn_bwd", (2, 15), "d256: steps of 128 rows buy 15 %"),
    ("sm80/attn_bwd", (3, 16), "d64_mask: words read once a step; a third block buys more"),
    ("sm80/attn_bwd", (4, 17), "d128_mask: words read once a step; a second block buys more"),
    ("sm80/attn_bwd", (5, 18), "d64_dropout: a third block buys 7 %"),
    ("sm80/attn_bwd", (6, 19), "d128_dropout: a second block buys more"),
    ("sm80/attn_bwd", (7, 20), "d64_bias: words read once a step; a third block buys more"),
    ("sm80/attn_bwd", (8, 21), "d128_bias: words read once a step; a second block buys more"),
    ("sm80/attn_bwd", (10, 23), "d128_terms: state of the terms, read once a step"),
    ("sm80/attn_bwd", (26, 29), "fp32 d64, d128_small: words read once a step"),
    ("sm80/attn_fwd", (1, 11), "d128: a word read once a tile"),
    ("sm80/attn_fwd", (4, 14), "d128_dropout: state of the draws, read once a tile"),
    ("sm80/attn_fwd", (6, 16), "d128_terms: where dropout is drawn, not in the products"),
    ("sm80/attn_fwd", (20,), "fp32 d64: a third block a multiprocessor buys 30 % in TF32"),
    ("sm80/attn_fwd", (21,), "fp32 d128: a word read once a tile"),
    ("sm80/paged_decode", (21,), "fp32 d128: words read once a step"),
    ("sm80/paged_decode", (22,), "fp32 d256: O and its rests of 3xTF32 alone take 256 registers"),
    ("sm80/paged_prefill", (4, 10), "d128_terms: a word read once a tile"),
    ("sm90/attn_fwd", (10, 32), "d256_terms: words of the copying warp"),
    ("sm90/attn_fwd", (11, 33), "d64_pages: state of the copying warps around finding a work"),
    ("sm90/attn_fwd", (12, 13, 34, 35), "d96_pages, d128_pages: words of the same"),
    ("sm90/attn_fwd", (15, 37), "d256_pages: the same, and conditions of a work"),
]
# Part of the mangled name -> the reason.
ALLOWED = {
    f"4{folder}{len(name + '_kernel')}{name}_kernelILm{row}E": why
    for folder, name, rows, why in ((*path.split("/"), rows, why) for path, rows, why in SPILLS)
    for row in rows
}


def fail(sentence):
    raise SystemExit(f"flashbpt: {sentence}")


def import_torch():
    try:
        import torch
    except ModuleNotFoundError:
        fail(
            "torch is not visible to the build; install torch 2.11 or newer, then run "
            "`pip install --no-build-isolation .`"
        )
    if tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2]) < (2, 11):
        fail(f"torch {torch.__version__} is too old; flashbpt needs torch 2.11 or newer")
    return torch


def nvcc_release(root):
    """'major.minor' of the toolkit at `root`, or None where there is none."""
    nvcc = Path(root, "bin/nvcc")
    if not (nvcc.is_file() and Path(root, "include/cuda_runtime.h").is_file()):
        return None
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+\.\d+)", said)
    return release and release[1]


def toolkit_roots():
    """Where a toolkit may be, in the order of preference."""
    yield from filter(None, [os.environ.get("CUDA_HOME")])
    if nvcc := shutil.which("nvcc"):
        # An nvcc on PATH may be a wrapper: the real one says where it lives.
        ask = [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull]
        said = subprocess.run(ask, capture_output=True, text=True).stderr
        yield from (Path(here).resolve().parent for here in re.findall(r"_HERE_=(.+)", said))
    yield from sorted(Path("/usr/local").glob("cuda*"))
    for folder in sys.path:
        yield from sorted(Path(folder, "nvidia").glob("cu[0-9]*"), reverse=True)


def find_cuda(torch):
    """(toolkit, None), or (None, why the CUDA part is left out)."""
    if os.environ.get("FLASHBPT_DISABLE_CUDA") == "1":
        return None, "FLASHBPT_DISABLE_CUDA=1 was set"
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is not a CUDA build"
    else:
        found = [(Path(root), has) for root in toolkit_roots() if (has := nvcc_release(root))]
        major = torch.version.cuda.split(".")[0]
        for root, release in found[:1] if os.environ.get("CUDA_HOME") else found:
            if release.split(".")[0] == major:
                return root, None
        if found:
            fail(
                f"the CUDA toolkit at {found[0][0]} is {found[0][1]}, but torch "
                f"{torch.__version__} is built with CUDA {torch.version.cuda}; "
                f"set CUDA_HOME to a {major}.x toolkit, "
                "or FLASHBPT_DISABLE_CUDA=1 to build the CPU part alone"
            )
        reason = f"torch {torch.__version__} is a CUDA build, but no CUDA toolkit was found"
    if os.environ.get("FLASHBPT_FORCE_CUDA") == "1":
        fail(f"FLASHBPT_FORCE_CUDA=1 was set, but {reason}")
    return None, reason


def arch_codes(source):
    """The (compute, code) pairs that a .cu file is compiled for, by its folder."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if "/sm90/" in source:
        return [("compute_90a", "sm_90a")]
    codes = []
    for name in listed or ["8.0+PTX", "9.0a"]:
        arch = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", name)
        if not arch or int(arch[1]) < 8:
            fail(f"TORCH_CUDA_ARCH_LIST names {name!r}; write 8.0 or newer, as in '8.0;8.6+PTX'")
        number = arch[1] + arch[2]
        for kind in ("sm", "compute") if arch[3] else ("sm",):
            codes.append((f"compute_{number}", f"{kind}_{number}"))
    return codes


def ptxas_faults(log):
    """Every (kernel, line) of a ptxas log that shows a spill, local memory or serialized wgmma."""
    kernel, faults = "?", []
    for line in map(str.strip, log.splitlines()):
        if named := re.search(r"(?:entry function|properties for) '?([\w$.]+)", line):
            kernel = named[1]
        used = re.findall(r"(\d+) bytes (?:stack frame|spill|lmem|cumulative stack)", line)
        if re.search(r"\(C75[12]\d\)|wgmma.*serialized", line):
            inside = re.search(r"function '([\w$.]+)'", line)
            faults.append((inside[1] if inside else kernel, line))
        elif any(map(int, used)):
            faults.append((kernel, line))
    return [fault for fault in faults if not any(part in fault[0] for part in ALLOWED)]


def compile_cuda(source, temp, toolkit):
    """(object, ptxas log) of a .cu file, compiled if it, a header or the command has changed."""
    obj = temp / Path(source).with_suffix(".o")
    log, deps = obj.with_suffix(".ptxas.log"), obj.with_suffix(".d")
    command = [str(toolkit / "bin/nvcc"), *NVCC_FLAGS, "-MD", "-MF", str(deps)]
    for compute, code in arch_codes(source):
        command += ["-gencode", f"arch={compute},code={code}"]
    command += ["-c", source, "-o", str(obj)]
    head = f"== {source}\n{shlex.join(command)}\n"
    if obj.exists() and deps.exists() and log.exists() and log.read_text().startswith(head):
        needed = deps.read_text().partition(":")[2].replace("\\\n", " ").split()
        if all(os.path.exists(f) and os.path.getmtime(f) <= obj.stat().st_mtime for f in needed):
            return str(obj), log.read_text()
    print(f"nvcc {source}", flush=True)
    obj.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        obj.unlink(missing_ok=True)
        fail(f"nvcc failed on {source}:\n{shlex.join(command)}\n{done.stdout}")
    log.write_text(head + done.stdout)
    return str(obj), log.read_text()


def compile_all_cuda(temp, toolkit):
    """The objects of CUDA_SOURCES, once ptxas reports no loss."""
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count())) as pool:
        built = list(pool.map(lambda source: compile_cuda(source, temp, toolkit), CUDA_SOURCES))
    log = "".join(text for _, text in built)
    (temp / "ptxas.log").write_text(log)
    if faults := ptxas_faults(log):
        told = "\n".join(f"  {kernel}: {line}" for kernel, line in faults)
        fail(f"ptxas reports what SPILLS in setup.py does not list:\n{told}")
    return [obj for obj, _ in built]


def precompile(compiler, module, temp):
    """Compiles csrc/precompiled.h with the flags of the module's files, which then start from it.

    g++ alone, which passes over one that does not fit its flags. It stays while the command does:
    every file depends on it.
    """
    ask = [compiler.compiler_so[0], "--version"]
    said = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
    if "Free Software Foundation" not in said:
        return
    folder = temp.resolve() / "precompiled"
    header, log = folder / "precompiled.h", folder / "command"
    macros = [f"-D{name}" + ("" if v is None else f"={v}") for name, v in module.define_macros]
    command = [*compiler.compiler_so, *macros, *(f"-I{path}" for path in module.include_dirs)]
    command += module.extra_compile_args["cxx"]
    command += ["-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=_C", "-std=c++20"]
    command += ["-x", "c++-header", str(header), "-o", f"{header}.gch"]
    # torch's headers switch this warning off where it does not apply, which g++ does not keep.
    module.extra_compile_args["cxx"] += ["-Wno-sign-compare", "-include", str(header)]
    text = (ROOT / "csrc/precompiled.h").read_text()
    wanted = shlex.join(command) + "\n" + text
    if log.exists() and log.read_text() == wanted:
        return
    folder.mkdir(parents=True, exist_ok=True)
    header.write_text(text.replace("#pragma once\n", ""))  # of which g++ warns in a main file
    print("precompiling csrc/precompiled.h", flush=True)
    if subprocess.run(command, check=False).returncode == 0:
        log.write_text(wanted)


def build_with(torch, toolkit, reason):
    """The extension and the command that builds it."""
    if toolkit:
        os.environ["CUDA_HOME"] = str(toolkit)  # cpp_extension reads it on import
    from torch.utils import cpp_extension

    version = re.search(r'__version__ = "(.+)"', (ROOT / "flashbpt/version.py").read_text())[1]
    macros = {"VERSION": f'"{version}"', "TORCH_VERSION": f'"{torch.__version__}"'}
    if toolkit:
        archs = " ".join(dict.fromkeys(code for cu in CUDA_SOURCES for _, code in arch_codes(cu)))
        macros |= {"WITH_CUDA": None, "CUDA_ARCHS": f'"{archs}"'}
    # A second OpenMP runtime would be a second thread pool, and with a static libstdc++, as some
    # compilers link, exceptions crash: name the files that torch has loaded.
    maps = Path("/proc/self/maps").read_text()
    openmp, stdcpp = (re.findall(rf"/.*/{lib}.*", maps)[:1] for lib in ("libgomp", "libstdc[+][+]"))
    make = cpp_extension.CUDAExtension if toolkit else cpp_extension.CppExtension
    module = make(
        "flashbpt._C",
        CPP_SOURCES,
        include_dirs=[str(ROOT / "csrc")],
        define_macros=[(f"FLASHBPT_{name}", value) for name, value in macros.items()],
        extra_compile_args={"cxx": [*CXX_FLAGS]},
        extra_link_args=(openmp or ["-fopenmp"]) + stdcpp,
        depends=[str(header) for header in Path("csrc").rglob("*.h")],
    )
    module.libraries.remove("torch_python")  # tensors pass through the dispatcher alone
    if toolkit:  # what a slim toolkit lacks of headers and libraries comes with torch
        major = torch.version.cuda.split(".")[0]
        pip_cuda = Path(torch.__file__).parents[1] / f"nvidia/cu{major}"
        module.include_dirs.append(str(pip_cuda / "include"))
        module.library_dirs.append(str(pip_cuda / "lib"))
        module.libraries[module.libraries.index("cudart")] = f":libcudart.so.{major}"

    class BuildExt(cpp_extension.BuildExtension):
        def build_extensions(self):
            temp = Path(self.build_temp)
            if toolkit:
                module.extra_objects = compile_all_cuda(temp, toolkit)
            precompile(self.compiler, module, temp)
            super().build_extensions()

        def run(self):
            super().run()
            folder = ROOT if self.inplace else Path(self.build_lib)
            facts = {"TORCH_VERSION": str(torch.__version__), "NO_CUDA_REASON": reason}
            facts |= {"CXX_FLAGS": CXX_FLAGS, "NVCC_FLAGS": NVCC_FLAGS if toolkit else []}
            text = "".join(f"{name} = {value!r}\n" for name, value in facts.items())
            (folder / "flashbpt/_build.py").write_text(f"# Written by setup.py.\n{text}")

    return {"ext_modules": [module], "cmdclass": {"build_ext": BuildExt}}


def main():
    if int(setuptools.__version__.split(".")[0]) < 77:
        fail(
            f"setuptools {setuptools.__version__} is too old; run "
            "`pip install --upgrade setuptools`, flashbpt needs 77 or newer"
        )
    compiling = {"build", "build_ext", "bdist_wheel", "editable_wheel", "install", "develop"}
    if compiling.isdisjoint(sys.argv):  # the metadata and the sdist need no torch
        setuptools.setup()
        return
    torch = import_torch()
    toolkit, reason = find_cuda(torch)
    print(f"flashbpt: CUDA toolkit {toolkit}" if toolkit else f"flashbpt: CPU part only: {reason}")
    setuptools.setup(**build_with(torch, toolkit, reason))


if __name__ == "__main__":
    main()
