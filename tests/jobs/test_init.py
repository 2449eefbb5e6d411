"""`laserbatch init`: its guesses about unknown tables, and its words about the bundled model."""

import datetime
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from laserbatch.jobs.commands.init import init
from laserbatch.jobs.settings import Settings, load_settings
from laserbatch.jobs.stages.inputs import needs_a_model
from laserbatch.pipeline.errors import ConfigError, TableError
from laserbatch.pipeline.knowledge.domains import domains
from laserbatch.pipeline.knowledge.histories import labels_of
from laserbatch.pipeline.knowledge.templates import KnowledgeSettings
from laserbatch.pipeline.sample.world import write_sample_world
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.tables.guess import guess_mapping, read_sources
from laserbatch.pipeline.tables.mapping import import_mapped, load_mapping
from laserbatch.pipeline.tables.read import read_tables

MAX_LINES = 25  # as many as a newcomer reads


@pytest.fixture
def job_board(tmp_path):
    """Exports of a job board: integer ids, clicks as 0 and 1, times in milliseconds."""
    folder = tmp_path / "exports"
    folder.mkdir()
    pq.write_table(pa.table({"member_id": [7, 8], "city": ["Oslo", "Rome"]}), folder / "members.parquet")
    pq.write_table(pa.table({"job_id": [1, 2], "title": ["Cook", "Nurse"]}), folder / "jobs.parquet")
    clicks = {"member_id": [7, 8], "job_id": [2, 1], "clicked_at": [1_740_000_000_000] * 2, "clicked": [0, 1]}
    pq.write_table(pa.table(clicks), folder / "clicks.parquet")
    return folder


def run_init(capsys, tables, out) -> dict:
    init(tables=tables, out=out, overwrite=False, as_json=True)
    assert len(out.read_text().splitlines()) <= MAX_LINES
    return json.loads(capsys.readouterr().out)


def test_a_job_board_is_guessed_with_its_types_and_clicks(job_board, tmp_path, capsys):
    printed = run_init(capsys, job_board, tmp_path / "night.yaml")
    assert "decoding.model" in printed["model"]
    mapping = yaml.safe_load((tmp_path / "mapping.yaml").read_text())
    assert mapping["items"]["id"] == "job_id"
    events = mapping["interactions"]
    assert events["timestamp"] == {"column": "clicked_at", "unit": "ms"} and events["rating"] == "clicked"
    settings = load_settings(tmp_path / "night.yaml")
    assert settings.ctr.label == "rating >= 1"
    words = settings.knowledge.words
    assert (words.user, words.item, words.items, words.collection) == ("applicant", "job", "jobs", "job board")
    assert "Seniority" in settings.knowledge.user_factors and "employer" in settings.knowledge.item_factors
    assert "    item: job  # guessed: by names and values of the tables\n" in (tmp_path / "night.yaml").read_text()


def test_a_label_is_the_rating_and_columns_of_a_log_that_are_not_used_are_named(tmp_path, capsys):
    folder = tmp_path / "exports"
    folder.mkdir()
    (folder / "films.csv").write_text("film_id,name\n1,Heat\n2,Up\n")
    (folder / "log.csv").write_text("user_id,film_id,ts,label,device\n7,1,1740000000,1,tv\n7,2,1740000001,0,web\n")
    (note,) = run_init(capsys, folder, tmp_path / "night.yaml")["notes"]
    assert note.startswith("columns of interactions that are not used: device; if one of them is the label")
    assert yaml.safe_load((tmp_path / "mapping.yaml").read_text())["interactions"]["rating"] == "label"
    assert load_settings(tmp_path / "night.yaml").ctr.label == "rating >= 1"


def test_events_of_text_are_guessed_and_the_strongest_is_the_positive(tmp_path, capsys):
    folder = tmp_path / "exports"
    folder.mkdir()
    (folder / "recipes.csv").write_text('recipe_id,name\n1,"Soup\nof peas"\n2,Bread\n')
    (folder / "log.csv").write_text("user_id,recipe_id,ts,event_type\n7,1,1740000000,view\n7,2,1740000001,save\n"
                                    "7,2,1740000002,  \n")  # fmt: skip
    (note,) = run_init(capsys, folder, tmp_path / "night.yaml")["notes"]
    assert "1 quoted field over several lines, first in column name, row 0" in note
    settings = load_settings(tmp_path / "night.yaml")
    assert settings.ctr.label == "event == 'save'"
    assert settings.knowledge.words.events == {"save": "saved", "view": "viewed"}  # guesses that the user may correct
    assert (settings.knowledge.words.item, settings.knowledge.words.items) == ("recipe", "recipes")
    import_mapped(load_mapping(tmp_path / "mapping.yaml"), folder, tmp_path / "tables")
    tables = read_tables(tmp_path / "tables").interactions
    assert tables["event"].to_pylist() == ["view", "save", "  "]
    assert labels_of(tables, {}).interacted == "saved or viewed"


@pytest.mark.parametrize(
    ("columns", "label"),
    [({}, "all"), ({"event": ["play", "play"]}, "all"), ({"event": ["view", "cart"]}, "event == 'cart'"),
     ({"event": ["auf", "ab"]}, "all"), ({"rating": [1, 1]}, "all"), ({"rating": [0, 1]}, "rating >= 1"),
     ({"rating": [3, 5], "event": ["view", "buy"]}, "rating >= 4"), ({"rating": [1, 10]}, "rating >= 8"),
     ({"rating": [0, 100]}, "rating >= 75"), ({"rating": [-1, 1]}, "rating >= 1"),
     ({"rating": [0.5, 5]}, "rating >= 4")],
)  # fmt: skip
def test_what_is_positive_is_guessed_of_tables_in_the_schema(tmp_path, capsys, columns, label):
    folder = tmp_path / "tables"
    folder.mkdir()
    pq.write_table(pa.table({"user_id": [7]}), folder / "users.parquet")
    items = {"item_id": [1], "title": ["Blue"], "artist": ["Ay"]}
    pq.write_table(pa.table(items), folder / "items.parquet")
    events = {"user_id": [7, 7], "item_id": [1, 1], "timestamp": [1_740_000_000, 1_740_000_001]} | columns
    pq.write_table(pa.table(events), folder / "interactions.parquet")
    printed = run_init(capsys, str(folder), tmp_path / "night.yaml")
    assert printed["num_faults"] == 0 and "nightly --date 2025-02-19 " in printed["next"][2]  # of the newest row
    assert (
        "not known, so replace what is not a verb in the past: ab, auf" in (tmp_path / "night.yaml").read_text()
    ) == ("auf" in columns.get("event", ()))
    settings = load_settings(tmp_path / "night.yaml")
    assert settings.ctr.label == label
    assert settings.knowledge.words.user == "listener"  # because of the column `artist`


def test_the_three_commands_that_follow_are_printed_as_they_are_typed(job_board, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    init(tables="exports", out=Path("laserbatch.yaml"), overwrite=False, as_json=False)
    printed = capsys.readouterr().out
    _, first, second, third, _ = printed[printed.index("next:") :].split("\n")
    assert first == "  laserbatch data import exports tables --mapping mapping.yaml"
    yesterday = datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(days=1)
    assert second == "  laserbatch try" and third == f"  laserbatch nightly --date {yesterday}"


ITEMS = {
    "films": {"genres": ["Animation Children's Comedy", "Action Thriller", "Drama"], "year": ["1995", "1995", "1996"]},
    "films by their titles": {"title": ["Toy Story (1995)", "Heat (1995)", "Ran"]},
    "books": {"shelves": [["fiction", "fantasy"], ["poetry"], ["history", "biography"]]},
    "books of the genres of films": {
        "authors": ["A. Bee", "C. Dee", "E. Eff"],
        "original_publication_year": [1960, 1925, 2008],
        "average_rating": [4.25, 3.89, 4.34],
        "genres": ["Romance|War", "Drama|Crime", "Romance|Action|Fantasy"],
    },
    "songs": {"style": ["Rock", "hip-hop; rap", "Jazz"]},
    "jobs": {"terms": ["Full-time", "Part-time, remote", "Contract"]},
    "news": {"category": ["sports", "politics", "world"]},
    "games": {"tags": ["RPG|Indie", "Strategy|Single-player", "Shooter"]},
    "games by a column": {"platforms": ["PC", "PC", "Switch"], "price": [1.0, 2.0, 3.0]},
    "news by an author": {"author": ["A. Bee", "C. Dee", "A. Bee"], "category": ["sports", "politics", "world"]},
    "none": {"kind": ["a", "b", "a"], "text": ["a drama of jazz and sports " * 9] * 3},
}


@pytest.mark.parametrize("case", ITEMS)
def test_items_are_known_by_their_values(tmp_path, capsys, case):
    folder, domain = tmp_path / "tables", case.split(" ")[0]
    items = {"item_id": [1, 2, 3], "title": ["A", "B", "C"]} | ITEMS[case]
    log = {"user_id": [7, 7], "item_id": [1, 2], "timestamp": [1_740_000_000, 1_740_000_001]}
    write_exports(folder, users={"user_id": [7]}, items=items, interactions=log)
    run_init(capsys, str(folder), tmp_path / "night.yaml")
    knowledge, usual = load_settings(tmp_path / "night.yaml").knowledge, KnowledgeSettings()
    expected = usual.words if domain == "none" else domains()[domain].words
    assert knowledge.words == expected
    assert knowledge.item_factors == (usual.item_factors if domain == "none" else domains()[domain].item_factors)


def test_ids_that_are_integers_here_and_strings_there_get_a_mapping_that_imports(tmp_path, capsys):
    """MovieLens is often repacked this way: the columns are those of the schema, but types of ids differ."""
    log = {"user_id": [7, 8], "item_id": [2, 1], "timestamp": [881_250_949, 881_250_950], "rating": [3, 5]}
    items = {"item_id": ["1", "2"], "title": ["Heat", "Ran"], "genres": ["Action Drama", "Drama War"]}
    write_exports(tmp_path / "exports", users={"user_id": ["7", "8"]}, items=items, interactions=log)
    printed = run_init(capsys, str(tmp_path / "exports"), tmp_path / "night.yaml")
    mapping = load_mapping(tmp_path / "mapping.yaml")
    assert (mapping.ids.user_id, mapping.ids.item_id) == ("string", "string")
    assert printed["next"][0].startswith("laserbatch data import")
    import_mapped(mapping, tmp_path / "exports", tmp_path / "tables")
    assert read_tables(tmp_path / "tables").interactions["item_id"].to_pylist() == ["2", "1"]
    assert load_settings(tmp_path / "night.yaml").knowledge.words.item == "film"


def test_the_sample_world_is_asked_about_in_its_own_words(tmp_path, capsys):
    write_sample_world(tmp_path / "tables", num_users=20, num_items=20)
    run_init(capsys, str(tmp_path / "tables"), tmp_path / "night.yaml")
    knowledge = load_settings(tmp_path / "night.yaml").knowledge
    assert [knowledge.template(side) for side in SIDES] == [
        Settings().effective_knowledge.template(side) for side in SIDES
    ]


def test_a_newcomer_reads_what_to_decide_and_what_of_it_is_a_guess(tmp_path, capsys):
    write_sample_world(tmp_path / "tables", num_users=20, num_items=20)
    run_init(capsys, str(tmp_path / "tables"), tmp_path / "night.yaml")
    lines = (tmp_path / "night.yaml").read_text().splitlines()
    assert lines[0].startswith("# `laserbatch config` shows every option")
    assert {line.split(":")[0] for line in lines[1:] if line[0] != " "} == {"tables", "knowledge", "decoding", "ctr"}
    options = {line.split(":")[0].strip() for line in lines[1:]}
    assert {"path", "user_template", "item_template", "user", "item", "items", "model", "label"} <= options
    assert "  label: rating >= 4  # guessed: the ratings seen are from 1 to 5" in lines
    is_guess = {line.split(":")[0].strip(): "# guessed: " in line for line in lines[1:]}
    assert is_guess["user_factors"] and is_guess["collection"] and not is_guess["user_template"]


def test_german_names_semicolons_and_another_encoding_are_guessed(tmp_path, capsys):
    folder = tmp_path / "exports"
    folder.mkdir()
    (folder / "kunden.csv").write_text("kunde;ort\nk1;Köln\n", encoding="cp1252")
    (folder / "artikel.csv").write_text("artikel_nr;bezeichnung\na1;Tee, grün\n", encoding="utf-8")
    (folder / "käufe.csv").write_text("kunde;artikel_nr;zeitstempel;bewertung\nk1;a1;01.03.2025 08:30;4,5\n")
    said = run_init(capsys, folder, tmp_path / "night.yaml")["notes"]
    assert any("kunden.csv is not UTF-8; it is read as cp1252 (Western Europe), a guess" in note for note in said)
    assert any("gives 'kunde;ort\\nk1;Köln\\n'. If letters are wrong there, set `encoding`" in note for note in said)
    assert "csv:  # guessed: numbers such as 4,5\n    decimal: ','" in (tmp_path / "mapping.yaml").read_text()
    import_mapped(load_mapping(tmp_path / "mapping.yaml"), folder, tmp_path / "tables")
    tables = read_tables(tmp_path / "tables")
    assert tables.users.to_pylist() == [{"user_id": "k1", "ort": "Köln"}]
    assert tables.items["title"].to_pylist() == ["Tee, grün"]
    assert str(tables.interactions["timestamp"][0].as_py()) == "2025-03-01 08:30:00+00:00"
    assert tables.interactions["rating"].to_pylist() == [4.5]


def test_accents_and_full_stops_in_names_hide_no_column(tmp_path, capsys):
    folder = tmp_path / "exports"
    folder.mkdir()
    (folder / "kunden.csv").write_text("kunde;edad\n1;20\n2;30\n")
    (folder / "films.csv").write_text("Film Nr.;Título;género\nF-1;El río;drama\nF-2;La casa;comedia\n")
    (folder / "log.csv").write_text("kunde;film;Wertung;wann\n1;F-1;4;01.10.2026 08:30\n2;F-2;2;02.10.2026 09:00\n")
    run_init(capsys, folder, tmp_path / "night.yaml")
    import_mapped(load_mapping(tmp_path / "mapping.yaml"), folder, tmp_path / "tables")
    tables = read_tables(tmp_path / "tables")
    assert tables.items.to_pylist()[0] == {"item_id": "F-1", "title": "El río", "género": "drama"}
    assert tables.interactions["rating"].to_pylist() == [4, 2]
    assert str(tables.interactions["timestamp"][1].as_py()) == "2026-10-02 09:00:00+00:00"


def test_a_list_of_numbers_beside_ratings_with_a_point_is_no_decimal_comma(job_board, tmp_path, capsys):
    (job_board / "more.csv").write_text("nr;groups;score\n1;1,5;4.5\n2;2,7;3.0\n")
    (source,) = (source for source in read_sources(job_board) if source.name == "more.csv")
    assert source.options == {"delimiter": ";"}


def test_a_csv_with_a_header_alone_is_passed_over(job_board, tmp_path, capsys):
    (job_board / "users.csv").write_text("user_id,title\n")
    run_init(capsys, job_board, tmp_path / "night.yaml")
    assert "users.csv" not in (tmp_path / "mapping.yaml").read_text()


def test_columns_of_one_name_are_named_and_no_guess(job_board, tmp_path, capsys):
    (job_board / "clicks.parquet").unlink()
    (job_board / "log.csv").write_text("member_id,member_id,job_id,time\n7,8,2,1740000000\n")
    with pytest.raises(TableError, match="no file looks like"):
        run_init(capsys, job_board, tmp_path / "night.yaml")
    assert "log.csv: columns are left out, because several have the same name: 'member_id'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("%m/%d/%Y %I:%M %p", "5/13/2024 2:09 PM"),
        ("%m/%d/%Y, %I:%M:%S %p", "5/13/2024, 2:09:42 PM"),
        ("%d-%b-%y", "13-MAY-24"),
        ("%a, %d %b %Y %H:%M:%S %z", "Mon, 13 May 2024 14:09:42 GMT"),
        ("%a %b %d %H:%M:%S %z %Y", "Mon May 13 16:09:42 CEST 2024"),
        ("%d/%b/%Y:%H:%M:%S %z", "13/May/2024:14:09:42 +0000"),
        ("%Y%m%d%H%M%S", 20240513140942),
        ("iso", "2024-05-13 14:09:42,123"),
    ],
)
def test_forms_of_times_are_guessed(tmp_path, form, text):
    log = {"user_id": [1], "item_id": [1], "time": [text]}
    write_exports(tmp_path / "exports", items={"item_id": [1], "title": ["A"]}, log=log)
    mapping, _ = guessed_mapping(tmp_path / "exports")
    assert mapping["interactions"]["timestamp"] == {"column": "time", "unit": form}
    (tmp_path / "mapping.yaml").write_text(yaml.safe_dump(mapping))
    import_mapped(load_mapping(tmp_path / "mapping.yaml"), tmp_path / "exports", tmp_path / "tables")
    (moment,) = read_tables(tmp_path / "tables").interactions["timestamp"].to_pylist()
    assert f"{moment:%Y-%m-%d %H:%M}" in ("2024-05-13 14:09", "2024-05-13 00:00")


def test_files_of_other_formats_are_named_whatever_is_guessed(job_board, tmp_path, capsys):
    (job_board / "jobs.parquet").rename(job_board / "jobs.jsonl.gz")
    with pytest.raises(TableError, match="no file looks like"):
        run_init(capsys, job_board, tmp_path / "night.yaml")
    assert f"left out, because it is neither Parquet nor CSV: {job_board}/jobs.jsonl.gz" in capsys.readouterr().err


def test_the_bundled_model_knows_the_sample_world_alone(tmp_path, capsys):
    write_sample_world(tmp_path / "tables", num_users=5, num_items=20)
    printed = run_init(capsys, tmp_path / "tables", tmp_path / "night.yaml")
    assert "model" not in printed and printed["next"][0].startswith("laserbatch doctor")
    items = pq.read_table(tmp_path / "tables" / "items.parquet")
    pq.write_table(items.rename_columns([*items.column_names[:-1], "posted"]), tmp_path / "tables" / "items.parquet")
    printed = run_init(capsys, tmp_path / "tables", tmp_path / "other.yaml")
    assert "safetensors" in printed["model"]
    tables = {"path": tmp_path / "tables"}
    assert needs_a_model(Settings(tables=tables))
    assert not needs_a_model(Settings(tables=tables, decoding={"model": "qwen"}))


def write_exports(folder, **tables) -> None:
    folder.mkdir()
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")


def guessed_mapping(folder) -> tuple[dict, str]:
    """The guessed mapping, and its comments."""
    text = guess_mapping(read_sources(folder)).as_yaml()
    return yaml.safe_load(text), "\n".join(line.partition("  # ")[2] for line in text.splitlines())


def amazon(num_items: int = 12) -> dict:
    """Reviews of 2023 in the published form, and their metadata; `parent_asin` joins the two, `asin` does not."""
    meta = {
        "main_category": ["All Beauty", "Books"] * (num_items // 2), "title": [f"Lotion {n}" for n in range(num_items)],
        "average_rating": [4.5] * num_items, "images": [{"hi_res": ["u"]}] * num_items,
        "description": [["Soft."]] * num_items, "details": ['{"Brand": "X; Y"}'] * num_items,
        "videos": [[{"url": "v"}]] * num_items, "parent_asin": [f"B0{n:03d}" for n in range(num_items)],
    }  # fmt: skip
    reviews = {
        "rating": [float(1 + n % 5) for n in range(60)], "title": [f"review {n}" for n in range(60)],
        "asin": [f"V{n % 30}" for n in range(60)], "parent_asin": [f"B0{n % num_items:03d}" for n in range(60)],
        "user_id": [f"AG{n % 8}" for n in range(60)], "helpful_vote": [0] * 60,
        "timestamp": [1588687728923 + n * 86400000 for n in range(60)],
    }  # fmt: skip
    return {"meta_All_Beauty": meta, "All_Beauty": reviews}


def test_metadata_of_amazon_are_joined_by_the_id_that_both_files_have(tmp_path, capsys):
    write_exports(tmp_path / "exports", **amazon())
    printed = run_init(capsys, str(tmp_path / "exports"), tmp_path / "night.yaml")
    text = (tmp_path / "mapping.yaml").read_text()
    mapping = yaml.safe_load(text)
    assert (mapping["items"]["id"], mapping["items"]["title"]) == ("parent_asin", "title")
    events = mapping["interactions"]
    assert [events[key] for key in ("user_id", "item_id", "rating")] == ["user_id", "parent_asin", "rating"]
    assert events["timestamp"] == {"column": "timestamp", "unit": "ms"} and "event" not in events
    assert "# guessed: by its name and values, 2020-05-05 to 2020-07-03" in text
    assert "12 rows seen; 100% of the parent_asin of All_Beauty.parquet are among them" in text
    assert "  # images: images  # left out: of type struct<" in text
    assert any("images" in note for note in printed["notes"])
    assert mapping["items"]["attributes"]["details"] == "details"  # its values contain `;`, which is no separator
    import_mapped(load_mapping(tmp_path / "mapping.yaml"), tmp_path / "exports", tmp_path / "tables")
    assert read_tables(tmp_path / "tables").interactions.num_rows == 60


def test_an_id_that_repeats_is_no_guess(tmp_path, capsys):
    tables = amazon()
    tables["meta_All_Beauty"]["parent_asin"][1] = "B0000"
    write_exports(tmp_path / "exports", **tables)
    printed = run_init(capsys, str(tmp_path / "exports"), tmp_path / "night.yaml")
    mapping = yaml.safe_load((tmp_path / "mapping.yaml").read_text())
    assert mapping["items"]["id"] is None
    assert any("items.id is empty in the mapping; fill it in (no guess: " in note for note in printed["notes"])
    with pytest.raises(ConfigError, match=r"items\.id"):
        load_mapping(tmp_path / "mapping.yaml")


NAMES = {  # export -> columns of items, columns of interactions, guess for each
    "amazon 2018": (
        {"category": ["a", "b", "c"], "asin": ["x", "y", "z"], "title": ["Heat", "Ran", "Big"]},
        {"overall": [5.0, 4.0, 5.0], "reviewTime": ["09 13, 2009", "01 2, 2012", "12 31, 2012"],
         "reviewerID": ["A", "B", "A"], "asin": ["x", "x", "y"], "reviewerName": ["Al", "Bo", "Al"]},
        ("asin", "title", "reviewerID", "asin", "reviewTime", "%m %d, %Y", "overall"),
    ),
    "movielens": (
        {"movieId": [1, 2, 3], "title": ["Heat", "Ran", "Big"], "genres": ["A|B", "C|D", "E|F"]},
        {"userId": [1, 1, 2], "movieId": [1, 2, 2], "rating": [3.5, 4.0, 1.0], "timestamp": [964982703] * 3},
        ("movieId", "title", "userId", "movieId", "timestamp", "s", "rating"),
    ),
    "a runtime, a brand's name and a rating's count": (
        {"brand_name": ["A", "A", "A"], "product_id": ["p1", "p2", "p3"], "product_name": ["Soap", "Oil", "Tea"]},
        {"customer_id": [1.0, 2.0, 2.0], "product_id": ["p1", "p3", "p3"], "dwell_time": [12, 90, 4],
         "click_id": [901, 902, 903], "rating_count": [7, 8, 9],
         "updated_at": ["31/12/2024 08:30", "01/02/2025 9:00", None], "like": ["yes", "no", "yes"]},
        ("product_id", "product_name", "customer_id", "product_id", "updated_at", "%d/%m/%Y %H:%M", None),
    ),
    "H&M, whose days have no usual name": (
        {"article_id": ["07", "08"], "product_type_name": ["Top", "Top"], "prod_name": ["Strap", "Hood"]},
        {"t_dat": ["2018-09-20", "2018-09-21"], "customer_id": ["a"] * 2, "article_id": ["08"] * 2, "price": [0.5, 1]},
        ("article_id", "prod_name", "customer_id", "article_id", "t_dat", "iso", None),
    ),
    "days as numbers": (
        {"sku": [10, 11], "name": ["Soap", "Oil"], "category_id": [1, 1]},
        {"uid": ["a", "b"], "sku": [11, 11], "date": [20240531, 20240601], "score": ["4,5", "3"]},
        ("sku", "name", "uid", "sku", "date", "%Y%m%d", None),
    ),
    "a job board, with the day before the moment": (
        {"vacancy_id": [100, 101], "title": ["Welder", "Nurse"]},
        {"candidate": ["a", "b"], "vacancy": [100, 100], "date": ["2024-05-31", "2024-06-01"],
         "ts_ms": [1717146000000, 1717232461000]},
        ("vacancy_id", "title", "candidate", "vacancy", "ts_ms", "ms", None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMES)
def test_a_guess_that_values_contradict_is_none(tmp_path, case):
    items, log, expected = NAMES[case]
    write_exports(tmp_path / "exports", things=items, log=log)
    mapping, comments = guessed_mapping(tmp_path / "exports")
    events, time = mapping["interactions"], mapping["interactions"]["timestamp"]
    guessed = (mapping["items"]["id"], mapping["items"]["title"], events["user_id"], events["item_id"], time["column"],
             time["unit"], events.get("rating"))  # fmt: skip
    assert guessed == expected and "event" not in events
    assert comments.count("guessed: ") >= 5


def test_what_is_not_there_is_no_guess_and_is_said(tmp_path):
    items = {"item_id": [1, 2], "name": ["A", "A"]}
    log = {"user_id": [1, 2], "item_id": [8, 9], "date": ["yesterday", "today"]}
    write_exports(
        tmp_path / "exports", items=items, log=log, more={"a": [1]}, users={"user_id": [1, 1], "email": ["a", "b"]}
    )
    guess = guess_mapping(read_sources(tmp_path / "exports"))
    events = guess.mapping["interactions"]
    assert (guess.mapping["items"]["title"], guess.mapping["users"]["id"]) == (None, None)
    assert (events["item_id"], events["timestamp"]["column"]) == (None, None)
    notes = "\n".join(guess.notes)
    for message in ("more.parquet is not used", "users.email is left out of the mapping: looks like e-mail addresses",
                 "none of the values of item_id is a item_id of items", "is date (today, yesterday)"):  # fmt: skip
        assert message in notes


@pytest.mark.parametrize("ids", [["1", "2"], ["1.0", "2.0"]])
def test_columns_named_like_those_of_the_schema_are_imported(tmp_path, ids):
    users = {"user_id": [1, 2], "created_at": ["2024-01-01", "2024-02-01"]}
    items = {"sku": ["a", "b"], "title": ["Mr", "Mr"], "product_name": ["Soap", "Oil"], "item_id": [7, 7]}
    log = {"user_id": ids, "sku": ["a", "a"], "date": ["2025-01-02"] * 2}  # interactions have ids of another type
    write_exports(tmp_path / "exports", users=users, items=items, log=log)
    (tmp_path / "mapping.yaml").write_text(guess_mapping(read_sources(tmp_path / "exports")).as_yaml())
    import_mapped(load_mapping(tmp_path / "mapping.yaml"), tmp_path / "exports", tmp_path / "tables")
    tables = read_tables(tmp_path / "tables")
    assert (tables.items["source_title"].to_pylist(), tables.items["item_id"].to_pylist()) == (["Mr"] * 2, ["a", "b"])
    assert tables.interactions["user_id"].to_pylist() == tables.users["user_id"].to_pylist()
    assert str(tables.users["created_at"][1].as_py()).startswith("2024-02-01")


@pytest.mark.parametrize("name", ["angelegt", "erstellt_am", "Registriert", "created on"])
def test_other_names_of_created_at_and_notes_with_a_semicolon_are_guessed(tmp_path, name):
    notes = ["mag Oper; hasst Lärm", None, "mag Jazz; hasst Lärm"]
    users = {"user_id": [1, 2, 3], name: ["01.02.2024", "13.02.2024", None], "notiz": notes}
    items = {"item_id": [1, 2, 3], "title": ["A", "B", "C"], "tags": ["a;b", "b;c", "a;c"]}
    items |= {f"tags{mark}": [f"a{mark}b", f"b{mark} c", f"a{mark}c"] for mark in "、；؛،"}
    items["angelegt"] = ["von Anna", "von Ben", "von Ida"]
    items["until"] = pa.array([2**63 - 1, 0, None], pa.timestamp("us"))  # infinity of PostgreSQL and DuckDB
    log = {"user_id": [1, 2], "item_id": [1, 1], "date": ["2025-01-02"] * 2}
    write_exports(tmp_path / "exports", users=users, items=items, log=log)
    mapping, comments = guessed_mapping(tmp_path / "exports")
    assert mapping["users"]["created_at"] == {"column": name, "unit": "%d.%m.%Y"}
    assert mapping["users"]["attributes"] == {"notiz": "notiz"} and "created_at" not in mapping["items"]
    tags = {f"tags{mark}".rstrip(";"): {"column": f"tags{mark}".rstrip(";"), "separator": mark} for mark in ";、；؛،"}
    assert mapping["items"]["attributes"] == {**tags, "angelegt": "angelegt", "until": "until"}
    assert "in 100% of the values; if they are no lists, write `tags: tags` instead" in comments


def test_days_that_could_be_months_are_said(tmp_path):
    log = {"user_id": [1, 2], "item_id": [1, 1], "date": ["01/02/2025", "03/04/2025"]}
    write_exports(tmp_path / "exports", items={"item_id": [1], "title": ["A"]}, log=log)
    (note,) = guess_mapping(read_sources(tmp_path / "exports")).notes
    assert "%m/%d/%Y and %d/%m/%Y fit all date in the rows seen; check which one is right" in note
