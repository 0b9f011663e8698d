"""`python -m flashbpt.info`: versions, how the extension was built, GPUs, kernels."""

import platform

import torch

from flashbpt import _build, _loader


def lines():
    """What there is to say, line by line. Looks at the GPUs, so it initialises CUDA."""
    extension = _loader.load()
    build = extension.build_info()
    yield f"flashbpt    {build['version']}, Python {platform.python_version()}"
    yield f"torch       {torch.__version__} (built for {build['torch']})"
    if build["cuda"]:
        yield f"CUDA part   toolkit {build['cuda']}, for {' '.join(build['archs'])}"
    else:
        yield f"CUDA part   none: {_build.NO_CUDA_REASON}"
    yield from gpu_lines()
    yield f"compiler    {build['compiler']}, {' '.join(_build.CXX_FLAGS)}"
    if build["cuda"]:
        yield f"nvcc        {' '.join(_build.NVCC_FLAGS)}"
    kernels = extension.kernels()
    yield f"kernels     {len(kernels)}" + ("" if kernels else " (every op runs on the CPU)")
    for kernel in kernels:
        config = ", ".join(f"{name} {value}" for name, value in kernel["config"].items())
        yield f"  {kernel['backend']}  {kernel['name']}: {config}"


def gpu_lines():
    if not torch.cuda.is_available():
        yield "GPU         none visible"
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = gpu.total_memory / 2**30
        yield f"GPU {index}       {gpu.name}, sm_{gpu.major}{gpu.minor}, {memory:.0f} GiB"


if __name__ == "__main__":
    print(*lines(), sep="\n")
