"""The tree hash that git gives a folder, from the files that lie there, committed or not."""

import hashlib
import os
from pathlib import Path


def git_tree(folder: Path) -> str:
    return _tree(folder).hex()


def _tree(folder: Path) -> bytes:
    entries = []
    for path in folder.iterdir():
        name = path.name.encode()
        if not path.is_dir():
            mode = b"100755 " if os.access(path, os.X_OK) else b"100644 "
            entries.append((name, mode + name, _hash(b"blob", path.read_bytes())))
        elif any(one.is_file() for one in path.rglob("*")):  # git knows no empty folders
            entries.append((name + b"/", b"40000 " + name, _tree(path)))
    return _hash(b"tree", b"".join(head + b"\0" + digest for _, head, digest in sorted(entries)))


def _hash(kind: bytes, content: bytes) -> bytes:
    return hashlib.sha1(b"%s %d\0%s" % (kind, len(content), content)).digest()
