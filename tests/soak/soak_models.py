"""Two tiny language models, as real folders with different weights, and the names of two encoders."""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

SAMPLE = Path(__file__).resolve().parents[2] / "models" / "sample"
MODELS = ("model_a", "model_b")
ENCODERS = ("encoder_a", "encoder_b")


def write_model(folder: Path) -> None:
    """Copy the bundled model; every name but the first gets different weights."""
    shutil.copytree(SAMPLE, folder)
    if folder.name != MODELS[0]:
        weights = load_file(folder / "model.safetensors")
        name = next(name for name in weights if name.endswith("norm.weight"))
        weights[name] = weights[name] * 1.05
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
