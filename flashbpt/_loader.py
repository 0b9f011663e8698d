"""Loads the compiled module, and says in one sentence why that did not work."""

import importlib

import torch


def load():
    """Import flashbpt._C, which registers the ops.

    Raises ImportError where the extension is not built, or was built for another torch.
    """
    try:
        built_for = importlib.import_module("flashbpt._build").TORCH_VERSION
    except ModuleNotFoundError:
        built_for = None
    if built_for is not None and release(built_for) != release(torch.__version__):
        raise ImportError(other_torch(built_for))
    try:
        return importlib.import_module("flashbpt._C")
    except ModuleNotFoundError as error:
        raise ImportError(
            "flashbpt's extension is not built for this Python; run "
            "`pip install --no-build-isolation .`, or `make test` in a checkout"
        ) from error
    except ImportError as error:  # a symbol or a library that another torch had
        raise ImportError(f"{other_torch(built_for)} ({error})") from error


def release(version):
    """The parts of a torch version that its C++ ABI depends on: 2.14.1+cu130 -> 2.14, cu130."""
    number, _, local = str(version).partition("+")
    return number.split(".")[:2], local


def other_torch(built_for):
    return (
        f"flashbpt's extension was built for torch {built_for}, but torch {torch.__version__} is "
        "running; rebuild it with `pip install --no-build-isolation --force-reinstall --no-deps .`"
    )
