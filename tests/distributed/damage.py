"""Ways in which a host's files of a partition are damaged, and what is said of each."""

import os
import shutil

# Words of the error, by what is done to the files.
SAID = {"truncated": "edge-0.indices.npy must have", "checksum": "edge-0.ids.npy does not have the checksum",
        "missing": "is missing; the manifest lists it", "version": "must have version 1, got 2"}  # fmt: skip


def damage(folder, kind, part):
    """Do it to a part, or to the manifest."""
    own = folder / f"part-{part:05d}"
    if kind == "truncated":
        os.truncate(own / "edge-0.indices.npy", 200)
    elif kind == "checksum":
        with (own / "edge-0.ids.npy").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x7f")
    elif kind == "missing":
        shutil.rmtree(own)
    else:
        manifest = folder / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
