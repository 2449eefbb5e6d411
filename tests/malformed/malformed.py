"""The corpus: mistakes of people and exporters, each made by a few lines, with the words of the expected error.

A case changes a sound folder (`sound_folder`) and names a command. The command must end with the exit code, its error
line must have all the words, and the workspace must stay untouched.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

SAMPLE_MODEL = Path(__file__).resolve().parents[2] / "models" / "sample"
NIGHTLY = ("nightly", "--config", "laserbatch.yaml", "--date", "2025-03-01")
IMPORT = ("data", "import", "exports", "out", "--mapping", "mapping.yaml")
INIT = ("init", "exports", "--out", "prompts/new.yaml")
DAY_S = 1_740_787_200  # 2025-03-01
USERS = {"user_id": ["u1", "u2", "u3"], "age": [30, 40, 50], "mood": ["calm", "keen", None]}
ITEMS = {"item_id": ["i1", "i2"], "title": ["Heat", "Ran"], "category": [["Film", "Crime"], []], "price": [1.5, 2.0]}
EVENTS = {"user_id": ["u2", "u1", "u1"], "item_id": ["i2", "i2", "i1"],
          "timestamp": [DAY_S + 5, DAY_S + 5, DAY_S - 5], "rating": [4, 5, 1]}  # fmt: skip
TABLES = {"users": USERS, "items": ITEMS, "interactions": EVENTS}
CONFIG = {
    "workspace": "workspace",
    "tables": {"path": "tables"},
    "knowledge": {"template_dir": "prompts", "user_template": "my_user", "item_template": "my_item"},
    "decoding": {"max_new_tokens": 8, "max_draft_tokens": 4, "min_acceptance": 0.1},
    "night": {"train_ctr": False},
}
TEMPLATE = {"version": 1, "framework": "kar", "parser": "free", "instruction": "Describe."}
MAPPING = """
users: {files: people.csv, id: person, attributes: {age: {column: age, type: int64}, home: city}}
items: {files: things.csv, id: nr, title: name, attributes: {price: {column: price, type: float64}}}
interactions: {files: log.csv, user_id: who, item_id: what, timestamp: {column: when, unit: iso}, rating: stars}
"""
EXPORTS = {
    "people.csv": "person,age,city\nann,30,Rome\nbob,40,Oslo\n",
    "things.csv": "nr,name,price\n1,Heat,1.5\n2,Ran,2.5\n",
    "log.csv": "who,what,when,stars\nann,1,2025-02-01,5\nbob,2,2025-02-02,1\n",
}


@dataclass(frozen=True)
class Case:
    """A malformed input. `words` must be in the error line: the place, the value found, and what to do."""

    name: str
    change: Callable[[Path], object]
    words: tuple[str, ...]
    command: tuple[str, ...] = NIGHTLY
    code: int = 3


def sound_folder(folder: Path) -> Path:
    """Write tables, a configuration, templates, exports with a mapping, and a workspace with a published run."""
    for name, table in TABLES.items():
        _write(folder, name, **table)
    (folder / "prompts").mkdir()
    for side in ("user", "item"):
        _yaml(folder / "prompts" / f"my_{side}.yaml", TEMPLATE | {"name": f"my_{side}", "side": side})
    _yaml(folder / "laserbatch.yaml", CONFIG)
    (folder / "mapping.yaml").write_text(MAPPING)
    (folder / "exports").mkdir()
    for name, text in EXPORTS.items():
        (folder / "exports" / name).write_text(text)
    run = folder / "workspace" / "runs" / "2025-02-28-0a1b2c3d"
    run.mkdir(parents=True)
    (run / "_SUCCESS").write_text("")
    (folder / "workspace" / "workspace.json").write_text('{"format_version": 1}')
    (folder / "workspace" / "published.json").write_text(f'{{"run_id": "{run.name}"}}')
    return folder


def _yaml(path: Path, data: object) -> None:
    path.write_text(yaml.safe_dump(data, allow_unicode=True))


def _write(folder: Path, name: str, **columns: object) -> None:
    (folder / "tables").mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / "tables" / f"{name}.parquet")


# ---- how a sound folder is spoilt


def table(name: str, **columns: object) -> Callable[[Path], None]:
    """A table with columns replaced or added; None leaves one out."""
    columns_present = {key: value for key, value in (TABLES[name] | columns).items() if value is not None}
    return lambda folder: _write(folder, name, **columns_present)


def raw_table(name: str, made: pa.Table) -> Callable[[Path], None]:
    return lambda folder: pq.write_table(made, folder / "tables" / f"{name}.parquet")


def table_bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "tables" / f"{name}.parquet"
        path.write_bytes(change(path.read_bytes()))

    return spoil


def text(name: str, content: str | bytes) -> Callable[[Path], None]:
    """A file with other contents."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def config(**sections: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        data = {key: dict(value) if isinstance(value, dict) else value for key, value in CONFIG.items()}
        for name, values in sections.items():
            data[name] = data.get(name, {}) | values if isinstance(values, dict) else values
        _yaml(folder / "laserbatch.yaml", data)

    return spoil


def template(side: str, **values: object) -> Callable[[Path], None]:
    name = f"my_{side}"
    return lambda folder: _yaml(folder / "prompts" / f"{name}.yaml", TEMPLATE | {"name": name, "side": side} | values)


def model(spoil: Callable[[Path], object]) -> Callable[[Path], None]:
    """A copy of the bundled model, spoilt, as the configuration's."""

    def change(folder: Path) -> None:
        shutil.copytree(SAMPLE_MODEL, folder / "model", copy_function=lambda source, to: Path(to).symlink_to(source))
        spoil(folder / "model")
        config(decoding={"model": "model"})(folder)

    return change


def replaced(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Replace a link by a file with changed contents."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(change(data))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")


def encoder(spoil: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "encoder").mkdir()
        spoil(folder / "encoder")
        config(encoding={"encoder": "encoder"})(folder)

    return change


def vectors(made: pa.Table) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        pq.write_table(made, folder / "vectors.parquet")
        config(routing={"item_embeddings": "vectors.parquet"})(folder)

    return change


def step_cost(content: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "cost.yaml").write_text(content)
        config(decoding={"step_cost": "cost.yaml", "max_draft_tokens": None, "min_acceptance": None})(folder)

    return change


def remove(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def nothing(folder: Path) -> None:
    """Changes nothing: the command itself is wrong."""


def date(value: str) -> tuple[str, ...]:
    return (*NIGHTLY[:-1], value)


TWICE = pa.Table.from_arrays([pa.array(["u1"]), pa.array([1]), pa.array([2])], ["user_id", "age", "age"])
NOT_UTF8 = pa.array([b"caf\xe9", b"b", b"c"], pa.binary()).cast(pa.string(), safe=False)
ITEM_VECTORS = {"item_id": ["i1", "i2"], "vector": [[0.1, 0.2], [0.3, 0.4]]}

CASES = [
    # Tables
    Case("a table is missing", remove("tables/items.parquet"), ("items", "the table is missing", "data import")),
    Case("the folder of tables is missing", remove("tables"), ("tables", "is not there", "check the path")),
    Case("a table is an empty file", table_bytes("users", lambda data: b""), ("users.parquet", "cannot be read")),
    Case("a table is cut off", table_bytes("users", lambda data: data[:-30]), ("users.parquet", "cannot be read",
         "write it again")),
    Case("a page inside a table is damaged", table_bytes("users", lambda data: data[:4] + b"\xff" * 40 + data[44:]),
         ("users.parquet", "cannot be read")),
    Case("a CSV is called Parquet", text("tables/users.parquet", "user_id,age\nu1,3\n"), ("users.parquet",
         "cannot be read", "expected a Parquet file")),
    Case("a table has no rows", raw_table("users", pa.table(USERS).slice(0, 0)), ("users", "has no rows")),
    Case("there is both a file and a folder", lambda folder: shutil.copytree(
         folder / "tables", folder / "tables" / "users"), ("both", "users.parquet", "remove the other")),
    Case("the id column is missing", table("users", user_id=None, id=["a", "b", "c"]), ("users.user_id",
         "the column is missing", "age, mood, id", "rename")),
    Case("an id is null", table("users", user_id=["u1", None, "u3"]), ("users.user_id", "row 1", "null or empty")),
    Case("an id is twice", table("users", user_id=["u1", "u2", "u1"]), ("users.user_id", "row 2", "there already",
         "'u1'")),
    Case("ids are fractions", table("users", user_id=[1.0, 2.0, float("nan")]), ("users.user_id", "double",
         "a string or an integer")),
    Case("ids differ in type between tables", table("interactions", item_id=[2, 2, 1]), ("interactions.item_id",
         "int64", "items.item_id is of type string", "`ids`")),
    Case("most interactions are of nobody", table("interactions", user_id=["u2", "u9", "u8"]), ("interactions.user_id",
         "row 1", "users has no such user_id", "'u9'")),
    Case("a time is null", table("interactions", timestamp=[DAY_S, None, DAY_S]), ("interactions.timestamp", "row 1",
         "null")),
    Case("some times are milliseconds", table("interactions", timestamp=[t * 1000 for t in EVENTS["timestamp"][:2]]
         + EVENTS["timestamp"][2:]),
         ("interactions.timestamp", "out of range", "divide milliseconds by 1000")),
    Case("times are text", table("interactions", timestamp=["2025-03-01"] * 3), ("interactions.timestamp", "string",
         "a timestamp", "data import")),
    Case("everybody comes later", lambda folder: (table("users", created_at=[DAY_S + 10**6] * 3)(folder),
         table("items", created_at=[DAY_S + 10**6] * 2)(folder)), ("2025-03-01",
         "later --date")),
    Case("a rating is no number", table("interactions", rating=[4.0, float("inf"), 1.0]), ("interactions.rating",
         "row 1", "no number")),
    Case("ratings are text", table("interactions", rating=["good", "bad", "bad"]), ("interactions.rating", "string",
         "a number")),
    Case("no item has a title", table("items", title=["", None]), ("items.title", "2 rows", "the title is empty",
         "gates.max_failed_share")),
    Case("titles are numbers", table("items", title=[1, 2]), ("items.title", "int64", "a string")),
    Case("an attribute is a struct", table("users", home=[{"city": "Rome"}] * 3), ("users.home", "struct",
         "leave it out")),
    Case("an attribute is a list of numbers", table("users", scores=[[1], [2], [3]]), ("users.scores", "list",
         "list of strings")),
    Case("a list has nulls in it", table("items", category=[["Film", None], []]), ("items.category", "row 0", "nulls")),
    Case("a column is twice", raw_table("users", TWICE), ("users.age", "several columns of this name", "rename")),
    Case("text is not UTF-8", table("users", mood=NOT_UTF8), ("users.mood", "row 0", "UTF-8")),
    # The configuration
    Case("the configuration is missing", remove("laserbatch.yaml"), ("laserbatch.yaml", "is not there",
         "laserbatch init")),
    Case("a key is misspelled", config(decoding={"batchsize": 3}), ("decoding.batchsize", "batch_size")),
    Case("a section is misspelled", config(decodin={"batch_size": 3}), ("decodin", "did you mean 'decoding'")),
    Case("a value is of another type", config(decoding={"batch_size": "many"}), ("decoding.batch_size", "integer",
         "'many'")),
    Case("a number is negative", config(decoding={"max_new_tokens": -5}), ("decoding.max_new_tokens", "greater",
         "-5")),
    Case("a share is a percentage", config(gates={"max_failed_share": 5}), ("gates.max_failed_share", "less than",
         "5")),
    Case("a choice is none", config(decoding={"verifier": "strict"}), ("decoding.verifier", "relaxed",
         "'strict'")),
    Case("tabs indent", text("laserbatch.yaml", "decoding:\n\tbatch_size: 3\n"), ("laserbatch.yaml", "is not YAML",
         "line 2")),
    Case("the configuration is a list", text("laserbatch.yaml", "- decoding\n"), ("laserbatch.yaml",
         "expected sections", "list")),
    Case("the configuration is empty", text("laserbatch.yaml", ""), ("set tables.path", "laserbatch init")),
    Case("a section is a word", config(decoding="fast"), ("decoding", "expected keys with values", "'fast'")),
    Case("the configuration is not UTF-8", text("laserbatch.yaml", b"workspace: caf\xe9\n"), ("laserbatch.yaml",
         "not YAML")),
    Case("the workspace is another folder", config(workspace="tables"), ("tables", "not a workspace", "new or empty")),
    # Templates
    Case("a template is missing", config(knowledge={"user_template": "nobody"}), ("no prompt template 'nobody'",
         "my_user")),
    Case("a template is of the other side", config(knowledge={"user_template": "my_item"}), ("is for items",
         "knowledge.user_template")),
    Case("a template shows an unknown column", template("item", attributes={"columns": ["title", "prize"]}),
         ("my_item", "'prize'", "did you mean 'price'")),
    Case("a template is an empty file", text("prompts/my_user.yaml", ""), ("my_user.yaml", "nothing")),
    # Models, encoders and other files
    Case("a model folder is missing", config(decoding={"model": "nowhere"}), ("no model folder", "nowhere")),
    Case("a model has no tokenizer", model(lambda folder: [(folder / name).unlink() for name in
         ("tokenizer.json", "tokenizer_config.json")]), ("has no tokenizer", "tokenizer.json")),
    Case("a model is pickled", model(pickled), ("pytorch_model.bin", "convert it to safetensors")),
    Case("a model's weights are cut off", model(lambda folder: replaced(folder / "model.safetensors",
         lambda data: data[:-1000])), ("model.safetensors", "copy")),
    Case("a model's configuration is cut off", model(lambda folder: replaced(folder / "config.json",
         lambda data: data[:100])), ("config.json",)),
    Case("a model's tokenizer is cut off", model(lambda folder: replaced(folder / "tokenizer.json",
         lambda data: data[:1000])), ("tokenizer.json", "copy it again")),
    Case("the encoder is missing", config(encoding={"encoder": "nowhere"}), ("encoder folder", "nowhere")),
    Case("the encoder is pickled", encoder(lambda folder: (folder / "pytorch_model.bin").touch()),
         ("model.safetensors", "pytorch_model.bin")),
    Case("vectors have no id", vectors(pa.table({"vector": ITEM_VECTORS["vector"]})), ("vectors.parquet", "item_id")),
    Case("vectors differ in length", vectors(pa.table(ITEM_VECTORS | {"vector": [[0.1], [0.2, 0.3]]})),
         ("vectors.parquet", "vector", "row 1")),
    Case("a file of vectors is no Parquet", lambda folder: (text("vectors.parquet", "item_id,vector\n")(folder),
         config(routing={"item_embeddings": "vectors.parquet"})(folder)), ("vectors.parquet", "Parquet")),
    Case("a step cost is no number", step_cost("name: a\nsteps: [{batch_size: 1, num_tokens: 1, seconds: fast}]"),
         ("cost.yaml", "seconds", "'fast'")),
    Case("a step cost is not there", config(decoding={"step_cost": "cost.yaml", "max_draft_tokens": None}),
         ("cost.yaml", "not there")),
    # Dates and options
    Case("a date is none", nothing, ("'2025-02-30' is not a date", "YYYY-MM-DD"), date("2025-02-30")),
    Case("a date is American", nothing, ("'03/01/2025' is not a date", "YYYY-MM-DD"), date("03/01/2025")),
    Case("an option is unknown", nothing, ("--dat",), ("nightly", "--dat", "2025-03-01"), 2),
    Case("a run is unknown", nothing, ("no run 2025-01-01-ffffffff", "2025-02-28"), ("runs", "show",
         "2025-01-01-ffffffff", "--config", "laserbatch.yaml")),
    # Imports
    Case("a mapping is missing", remove("mapping.yaml"), ("mapping.yaml", "is not there"), IMPORT),
    Case("a mapping has an unknown key", text("mapping.yaml", MAPPING.replace("rating:", "ratings:")),
         ("interactions.ratings", "did you mean 'rating'"), IMPORT),
    Case("a mapping names an unknown column", text("mapping.yaml", MAPPING.replace("id: nr", "id: number")),
         ("things.csv", "'number'"), IMPORT),
    Case("a mapping names files elsewhere", text("mapping.yaml", MAPPING.replace("things.csv", "../tables/x.csv")),
         ("items.files", "inside the source folder", "../tables"), IMPORT),
    Case("a source file is missing", remove("exports/log.csv"), ("log.csv", "interactions"), IMPORT),
    Case("a CSV has semicolons", text("exports/things.csv", EXPORTS["things.csv"].replace(",", ";")),
         ("things.csv", "nr;name;price", "delimiter"), IMPORT),
    Case("a quote is never closed", text("exports/things.csv", 'nr,name,price\n1,"Heat,1.5\n2,Ran,2.5\n'),
         ("things.csv", "every quote is closed"), IMPORT),
    Case("the last quote is never closed", text("exports/people.csv", 'person,age,city\nann,30,"Rome\nbob,40,Oslo\n'),
         ("people.csv", "line 2", '"Rome', "never closed"), IMPORT),
    Case("a CSV is Latin-1", text("exports/things.csv", "nr,name,price\n1,Caf\xe9,1\n".encode("latin-1")),
         ("things.csv", "utf-8", "encoding"), IMPORT),
    Case("a CSV is UTF-16", text("exports/things.csv", EXPORTS["things.csv"].encode("utf-16")), ("things.csv",
         "encoding"), IMPORT),
    Case("rows of a CSV differ in length", text("exports/things.csv", "nr,name,price\n1,Heat\n2,Ran,3\n"),
         ("things.csv", "Expected 3 columns, got 2"), IMPORT),
    Case("a CSV has no header", text("exports/things.csv", "1,Heat,1.5\n2,Ran,2.5\n"), ("things.csv", "no column",
         "column_names"), IMPORT),
    Case("numbers have decimal commas", text("exports/things.csv", 'nr,name,price\n1,Heat,"1,5"\n'), ("things.csv",
         "price", "row 0", "'1,5'", "a number"), IMPORT),
    Case("a CSV is empty", text("exports/things.csv", ""), ("things.csv",), IMPORT),
    Case("a time is no time", text("exports/log.csv", "who,what,when,stars\nann,1,yesterday,5\n"), ("log.csv", "when",
         "row 0", "'yesterday'", "ISO 8601"), IMPORT),
    Case("a folder has no tables", lambda folder: shutil.rmtree(folder / "exports") or (folder / "exports").mkdir(),
         ("exports", "no Parquet or CSV"), INIT),
    Case("no file looks like interactions", remove("exports/log.csv"), ("interactions", "people.csv: person"), INIT),
]  # fmt: skip
