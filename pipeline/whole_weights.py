"""Whether all weights of a model came from its folder. transformers fills what is missing with random numbers."""

from pathlib import Path

from laserbatch.pipeline.errors import ModelError

_MOST_NAMED = 3


def require_whole_weights(folder: Path, loading_info: dict, unused: tuple[str, ...] = ()) -> None:
    """Refuse a model some of whose weights are missing, or have another shape than its configuration says.

    Parameters
    ----------
    loading_info : of `from_pretrained(output_loading_info=True, ignore_mismatched_sizes=True)`.
    unused : beginnings of names that may be missing, since nothing reads them.

    Raises
    ------
    ModelError : naming the first of them.
    """
    missing = sorted(name for name in loading_info["missing_keys"] if not name.startswith(unused))
    others = [f"{name} {tuple(found)} where config.json says {tuple(expected)}"
              for name, found, expected in sorted(loading_info["mismatched_keys"])]  # fmt: skip
    for names, problem in ((missing, "lack"), (others, "have other shapes than expected:")):
        if names:
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            raise ModelError(
                f"the weights in {folder} {problem} {', '.join(names[:_MOST_NAMED])}{more}; copy the whole checkpoint "
                "again, or correct config.json (tie_word_embeddings says whether the output layer has weights)"
            )
