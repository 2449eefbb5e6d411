"""Names in texts: which words count as names, and from which inputs they may come."""

import pyarrow as pa
import pytest

from laserbatch.pipeline.knowledge.names import names_in, texts_of, unfounded


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("They like stories. Calm ones, told slowly.", set()),
        ("She likes Tova Garrity's work, and O'Brien.", {"tova garrity", "brien"}),
        ("1. Genre: Drama and Science Fiction/Thriller", {"science fiction", "thriller"}),
        ("**Preferred Genres**: drama", {"genres"}),
        ("The Salt Ledger (Otto Quill) is dear to them", {"salt ledger", "otto quill"}),
        ('a “feel-good” piece like “The Pier”; she saw "1984"', {"the pier", "1984"}),
        ("他喜欢《三体》和「星の夜」", {"三体", "星の夜"}),
        ("Élodie aime l'œuvre d'Émile Zola", {"émile zola"}),
        ("", set()),
    ],
)
def test_names_are_quoted_titles_and_capitalised_words_within_sentences(text, names):
    assert names_in(text) == names


def test_a_name_is_founded_where_it_stands_as_whole_words_in_any_value():
    table = pa.table(
        {
            "item_id": [1, 2, 3],
            "title": pa.array(["The PIER!", None, "Élodie: a life"], pa.large_string()),
            "genres": [["Science-fiction", "Drama"], None, []],
            "maker": pa.array(["Tova Garrity", "Rhea Birch", "Tova Garrity"]).dictionary_encode(),
        }
    )
    names = {"the pier", "pier", "pie", "science fiction", "fiction drama", "tova garrity", "élodie", "otto quill"}
    assert unfounded(names, texts_of(table)) == {"pie", "fiction drama", "otto quill"}
    assert unfounded(names, []) == names and unfounded(set(), texts_of(table)) == set()


def test_names_that_stand_behind_very_many_others_are_found():
    values = pa.array([f"Common {number}" for number in range(3000)] + ["Rare one"])
    assert unfounded({"common", "rare", "absent"}, [values]) == {"absent"}
