"""Texts encoded per second: in the night's own process, and by one and by two tasks of a Ray cluster.

    python benchmarks/encoding_workers.py --quick --json encoding_workers.json

Texts are random words of the sample catalogue's titles, about a hundred tokens each. The encoder is the bundled MiniLM
with one thread per task. Systems take turns; their vectors are compared, and the bytes sent through Ray are counted.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from common import SEED, Figure, Spread, benchmark_parser, finish, scale_of, turns
from ray import cloudpickle

from laserbatch.pipeline.distributed import encoding
from laserbatch.pipeline.distributed.cluster import WorkerLayout, ray_cluster
from laserbatch.pipeline.distributed.encoding import ClusterEncoder
from laserbatch.pipeline.distributed.settings import ClusterSettings
from laserbatch.pipeline.encoding.encoder import TextEncoder
from laserbatch.pipeline.encoding.identity import with_dtype
from laserbatch.pipeline.encoding.settings import EncodingSettings
from laserbatch.pipeline.encoding.text_parts import LocalEncoder, PartsEncoder, TextPart, text_parts
from laserbatch.pipeline.encoding.vector_files import NewVectors
from laserbatch.pipeline.sample.catalogue import make_catalogue
from laserbatch.pipeline.storage.parquet import write_parquet

WORDS_A_TEXT = 75
HERE = "here, 2 threads"


def write_texts(folder: Path, num_texts: int) -> None:
    """Write texts of random words from the catalogue's titles."""
    rng = np.random.default_rng(SEED)
    titles = make_catalogue(400, 30, rng).titles
    words = np.array(sorted({word for title in titles for word in title.split()}))
    texts = [" ".join(rng.choice(words, WORDS_A_TEXT)) for _ in range(num_texts)]
    write_parquet(pa.table({"text": texts}), folder / "00000.parquet")


def parts_of(folder: Path, num_texts: int, dim: int) -> tuple[list[TextPart], NewVectors]:
    """The texts in parts, and the files of their vectors, which are not written yet."""
    vectors = NewVectors(folder / "vectors", max(16, num_texts // 8), num_texts, dim)
    return text_parts([folder / "texts" / "00000.parquet"], np.arange(num_texts), (), vectors), vectors


def encoded(encoder: PartsEncoder, parts: list[TextPart], vectors: NewVectors) -> tuple[float, np.ndarray]:
    """The seconds to encode all parts, and the vectors in the order of texts; removes the vectors' files."""
    begun = time.perf_counter()
    encoder.encode_parts(parts, lambda num_texts: None)
    taken_s, read = time.perf_counter() - begun, vectors.read(np.arange(vectors.num_rows))
    for path in vectors.files:
        path.unlink()
    return taken_s, read


def main() -> None:
    """Measure, print, and write the JSON."""
    arguments = benchmark_parser(__doc__).parse_args()
    num_texts = scale_of(arguments, 4096, 1024, 64)
    settings = with_dtype(EncodingSettings(), None)
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory(prefix="encoding-") as name, ray_cluster(ClusterSettings(num_workers=2)):
        folder = Path(name)
        write_texts(folder / "texts", num_texts)
        here = TextEncoder.load(settings)
        systems: dict[str, PartsEncoder] = {HERE: LocalEncoder(lambda: here)}
        for num in (1, 2):
            layout = WorkerLayout(num, 1, 0, "cpu")
            encoding.OPEN_TASKS = 1  # otherwise one worker gets two tasks, since the cluster has room for both
            systems[f"{num} {'task' if num == 1 else 'tasks'} of 1 thread"] = ClusterEncoder(
                settings, lambda layout=layout: layout
            )
        parts, files = parts_of(folder, num_texts, here.dim)
        seconds: dict[str, list[float]] = {system: [] for system in systems}
        vectors = {}
        num_rounds = scale_of(arguments, 5, 3, 1)
        for number, order in zip(range(1 + num_rounds), turns(list(systems)), strict=False):
            for system in order:
                taken_s, vectors[system] = encoded(systems[system], parts, files)
                print(number, system, f"{taken_s:.1f} s", file=sys.stderr, flush=True)
                if number:  # the first round starts the processes and loads the encoder
                    seconds[system].append(taken_s)
    rates = {system: Spread.of([num_texts / taken_s for taken_s in durations]) for system, durations in seconds.items()}
    single, double = (rates[system].median for system in list(systems)[1:])
    num_bytes = sum(len(cloudpickle.dumps((part, settings, 1))) for part in parts)
    num_equal = sum(np.array_equal(of_system, vectors[HERE]) for of_system in vectors.values())
    figures = [
        Figure.at_least("two tasks over one, texts a second", double / single, 1.8),
        Figure.at_least("two tasks of one thread over here with two", double / rates[HERE].median, 0.9),
        Figure.at_least("systems with the same vectors, to the last bit", num_equal, len(systems)),
        Figure.at_most("bytes through Ray for each text (a vector has 1,536)", num_bytes / num_texts, 16),
    ]
    lines = [f"{system:24}{spread} texts a second" for system, spread in rates.items()]
    content = {"num_texts": num_texts, "words_a_text": WORDS_A_TEXT, "dtype": settings.dtype, "texts_a_second": rates}
    finish(arguments.json, figures, ["\n".join(lines)], content)


if __name__ == "__main__":
    main()
