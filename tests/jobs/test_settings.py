"""Configuration: which values are refused, and with which messages."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from default_yaml import DEFAULT_YAML, default_yaml
from pydantic import BaseModel, ValidationError

from laserbatch.jobs.commands.config import options_of
from laserbatch.jobs.settings import PACKAGE_ROOT, Settings, load_settings
from laserbatch.jobs.stages.inputs import needs_a_model, require_files
from laserbatch.pipeline.decoding.endpoint_settings import EndpointSettings
from laserbatch.pipeline.decoding.model.folder import load_tokenizer
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.knowledge.prompts import Shown, render_shown
from laserbatch.pipeline.tables.settings import TablesSettings

MAX_OPTIONS = 65


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_need_no_file():
    assert load_settings(None) == Settings()


def test_an_empty_section_is_its_default(tmp_path):
    sections = [name for name, field in Settings.model_fields.items() if isinstance(field.default, BaseModel)]
    config = write(tmp_path / "c.yaml", "".join(f"{name}:\n  # an option\n" for name in sections))
    assert len(sections) > 5 and load_settings(config).model_dump() == Settings().model_dump()
    assert load_settings(config, {"cluster.ray_address": "b"}).cluster.ray_address == "b"
    assert load_settings(write(tmp_path / "c.yaml", "routing:\n")).model_dump() == Settings().model_dump()


def test_a_section_that_is_none_is_named_also_where_the_command_line_adds_to_it(tmp_path):
    with pytest.raises(ConfigError, match=r"cluster: .*found 5"):
        load_settings(write(tmp_path / "c.yaml", "cluster: 5\n"), {"cluster.ray_address": "b"})


def test_yes_and_no_are_not_read_as_numbers(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("night: {num_audited: yes, train_ctr: no}\ndecoding: {temperature: off}\n")
    with pytest.raises(ConfigError, match=r"night.num_audited: .*found True.*; decoding.temperature: .*found False"):
        load_settings(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cluster: {price_per_hour: .inf}", r"cluster\.price_per_hour: .*finite number \(found inf\)"),
        ("gates: {max_failed_share: .nan}", r"gates\.max_failed_share: .*\(found nan\)"),
        ("cluster: {price_per_hour: 1e300}", r"price_per_hour: .* of at most 1,000,000,000,000 \(found 1e"),
        ("cluster: {start_timeout_s: 1e11}", r"start_timeout_s: .*less than or equal to 604800"),
        ("refresh: {max_tokens: 9999999999999}", r"refresh\.max_tokens: expected a number of at most"),
    ],
)
def test_numbers_that_are_slips_are_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_settings(write(tmp_path / "c.yaml", text))


def test_no_float_of_the_configuration_may_be_infinite():
    prices = EndpointSettings(**SERVER, price_per_million_tokens={"input": 1, "output": 2}).model_dump()
    for place in ("requests_per_minute", "tokens_per_minute", "max_cost", "timeout_s"):
        with pytest.raises(ValidationError, match=place):
            EndpointSettings(**prices | {place: float("inf")})


def test_blank_words_and_numbers_as_names_of_plugins_are_refused(tmp_path):
    path = tmp_path / "c.yaml"
    for text, message in (
        ("knowledge: {words: {interacted: ' '}}", r"words\.interacted: expected a word, in one line \(found ' '\)"),
        ("knowledge: {words: {events: {play: ''}}}", r"words\.events\.play: expected a word"),
        ("extensions: {3: {}}", "no installed package provides 3"),
        ("ctr: {models: [din, gbdt, din]}", r"ctr\.models: names 'din' twice; keep one of them"),
        ("routing: {user_attributes: [a, b, a, a]}", r"c\.yaml: routing\.user_attributes: names 'a' twice; keep one"),
        ("knowledge: {paths: [b, b, a, a]}", r"knowledge\.paths: names 'a' twice.*; knowledge\.paths: names 'b' twice"),
        ("knowledge: {personal_attributes: [users.a, users.a]}", r"personal_attributes: names 'users\.a' twice"),
        ("decoding: {drafters: [pool, pool]}", r"decoding\.drafters: names a drafter twice"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_settings(write(path, text))


def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    settings = load_settings(write(tmp_path / "c.yaml", "workspace: ~/night\ndecoding: {model: ~/qwen}\n"))
    assert settings.workspace == tmp_path / "home" / "night" and settings.model_dir == tmp_path / "home" / "qwen"
    assert load_settings(None, {"workspace": Path("~/night")}).workspace == tmp_path / "home" / "night"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("workspace: $HOME/night\n", "workspace"),
        ("tables: {path: '${DATA}/tables'}\n", "path"),
        ("extensions: {recommending: {model: $HOME/ranker}}\n", "model"),
        ("tables: {path: 's3://${BUCKET}/tables'}\n", "path"),
        ("deliver_to: s3://$BUCKET/runs\n", "deliver_to"),
    ],
)
def test_a_variable_in_a_path_is_refused(tmp_path, text, place):
    with pytest.raises(ConfigError, match=rf"c\.yaml: {place}: no variable is expanded \(found '.*\$"):
        load_settings(write(tmp_path / "c.yaml", text))
    with pytest.raises(ConfigError, match=r"--workspace: no variable is expanded \(found '\$NIGHTS/a'\)"):
        load_settings(None, {"workspace": Path("$NIGHTS/a")})
    assert load_settings(write(tmp_path / "c.yaml", "workspace: a$/night\n")).workspace == tmp_path / "a$" / "night"


def test_paths_are_relative_to_the_file(tmp_path):
    routing = "routing: {user_embeddings: of_users.parquet}\n"
    config = write(tmp_path / "c.yaml", "workspace: night\ntables: {path: in}\ndecoding: {model: sample}\n" + routing)
    settings = load_settings(config)
    assert settings.workspace == tmp_path / "night"
    assert settings.tables.path == tmp_path / "in"
    assert settings.routing.user_embeddings == tmp_path / "of_users.parquet"
    assert settings.model_dir == PACKAGE_ROOT / "models" / "sample"


def test_the_command_line_wins(tmp_path):
    config = write(tmp_path / "c.yaml", "cluster: {ray_address: a}\n")
    assert load_settings(config, {"cluster.ray_address": "b"}).cluster.ray_address == "b"
    assert load_settings(config, {"cluster.ray_address": None}).cluster.ray_address == "a"


def test_commented_yaml_loads_into_the_defaults_again(tmp_path):
    text = default_yaml()
    assert Settings.model_validate(yaml.safe_load(text)) == Settings()


def test_the_committed_default_configuration_is_the_generated_one():
    """If it is not, run `python tests/jobs/default_yaml.py`."""
    assert DEFAULT_YAML.read_text(encoding="utf-8") == default_yaml()


def leaf_options(model: type[BaseModel], within: str = "") -> list[str]:
    """Dotted names of all options that a file may set; the words of prompts count as one."""
    names = []
    for name, field in model.model_fields.items():
        section = field.annotation
        if field.description is not None:
            names.append(f"{within}{name}")
        elif isinstance(section, type) and issubclass(section, BaseModel):
            names += leaf_options(section, f"{within}{name}.")
    return names


def internal_fields(model: type[BaseModel], within: str = "") -> list[str]:
    """Dotted names of fields without a description that are no sections, and so no options."""
    names = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names += internal_fields(field.annotation, f"{within}{name}.")
        elif field.description is None:
            names.append(f"{within}{name}")
    return names


@pytest.mark.parametrize("option", [*internal_fields(Settings), "ctr.dropout", "pool_building.memory_mb"])
def test_neither_a_field_for_code_alone_nor_an_option_of_an_earlier_version_is_ignored(tmp_path, option):
    section, _, key = option.rpartition(".")
    config = write(tmp_path / "c.yaml", f"{section}: {{{key}: 1}}\n" if section else f"{key}: 1\n")
    unknown = option if section in ("", *Settings.model_fields) else section
    with pytest.raises(ConfigError, match=rf"c\.yaml: {unknown}: no such key; (did you mean|there are) ") as raised:
        load_settings(config)
    assert option not in leaf_options(Settings) and f"did you mean {key!r}" not in str(raised.value)


def test_the_core_has_at_most_65_options():
    """Teams must be able to set an option without a study of their own; a new one replaces another."""
    options = leaf_options(Settings)
    assert len(options) <= MAX_OPTIONS, options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"decoding": {"engine": "vllm", "verifier": "relaxed"}},
            "relaxed with engine vllm: set `verifier: greedy`",
        ),
        ({"decoding": {"engine": "vllm", "temperature": 1.0}}, "temperature 1 with engine vllm"),
        ({"decoding": {"engine": "vllm", "vllm": {"trust_remote_code": True}}}, r"vllm\.trust_remote_code with engine"),
        ({"decoding": {"vllm": {"enforce_eager": True}}}, "vllm is not used by engine laserbatch"),
        ({"decoding": {"engine": "vllm"}, "night": {"compare_with_plain": True}}, "texts are those of plain decoding"),
    ],
)
def test_what_vllm_cannot_do_is_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        Settings.model_validate(options)


def test_engine_vllm_alone_is_greedy_and_takes_as_many_gpus_as_it_spreads_over():
    decoding = Settings.model_validate({"decoding": {"engine": "vllm", "vllm": {"tensor_parallel_size": 2}}}).decoding
    assert decoding.verifier == "greedy" and decoding.gpus_a_worker == 2
    assert decoding.provenance() == Settings.model_validate({"decoding": {"verifier": "greedy"}}).decoding.provenance()


def test_the_page_of_vllm_shows_options_that_there_are():
    page = (PACKAGE_ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    assert Settings.model_validate(yaml.safe_load(block)).decoding.gpus_a_worker == 2


SERVER = {"url": "http://localhost:8000/v1", "model": "qwen"}


def with_server(**options):
    """Settings of a night whose texts a server writes."""
    return Settings.model_validate({"decoding": {"engine": "endpoint", "endpoint": SERVER | options}})


@pytest.mark.parametrize(
    ("decoding", "message"),
    [
        ({"verifier": "relaxed"}, "verifier relaxed with engine endpoint: set `verifier: greedy`"),
        ({"temperature": 0.5}, "temperature 0.5 with engine endpoint"),
        ({"adapter": "lora"}, r"adapter lora with engine endpoint: load it into the server"),
        ({"drafters": ["pool"]}, "drafters pool with engine endpoint"),
        ({"endpoint": None}, r"engine endpoint needs a server: set `endpoint: \{url"),
        ({"engine": "laserbatch"}, "endpoint is not used by engine laserbatch"),
        ({"endpoint": SERVER | {"max_cost": 1}}, "max_cost needs price_per_million_tokens"),
        ({"endpoint": SERVER | {"url": "localhost:8000"}}, "expected a URL such as"),
        ({"endpoint": SERVER | {"extra_body": {"n": 2}}}, "extra_body has n, which laserbatch sets"),
        ({"endpoint": SERVER | {"max_tokens": 2}}, "max_tokens"),
    ],
)
def test_what_an_endpoint_cannot_do_is_refused(decoding, message):
    with pytest.raises(ValidationError, match=message):
        Settings.model_validate({"decoding": {"engine": "endpoint", "endpoint": SERVER} | decoding})


@pytest.mark.parametrize(
    "section",
    [{"night": {"compare_with_plain": True}}, {"cluster": {"num_workers": 2}}],
    ids=lambda options: next(iter(options)),
)
def test_one_worker_asks_a_server_and_nothing_is_compared_with_plain_texts(section):
    with pytest.raises(ValidationError, match=r"with decoding\.engine endpoint"):
        Settings.model_validate({"decoding": {"engine": "endpoint", "endpoint": SERVER}} | section)


@pytest.mark.parametrize("options", [{"api_key_env": "sk-secret"}, {"url": "http://me:sk-secret@host/v1"}])
def test_a_key_in_the_configuration_is_refused_without_being_shown(tmp_path, options):
    text = yaml.safe_dump({"decoding": {"engine": "endpoint", "endpoint": SERVER | options}})
    with pytest.raises(ConfigError, match="api_key_env") as raised:
        load_settings(write(tmp_path / "c.yaml", text))
    assert "sk-secret" not in str(raised.value)


def test_a_night_keeps_its_name_if_its_server_moves_or_gets_more_money_but_not_if_texts_change():
    named = with_server().identity()
    prices = {"input": 1, "output": 2}
    moved = with_server(url="http://other/v1", api_key_env="K", price_per_million_tokens=prices, max_cost=5)
    assert moved.identity() == named
    for changed in ({"model": "other"}, {"api": "chat"}, {"extra_body": {"seed": 1}}):
        assert with_server(**changed).identity() != named
    assert "endpoint" not in Settings().identity()["decoding"]
    greedy = Settings.model_validate({"decoding": {"verifier": "greedy"}}).decoding
    assert with_server().decoding.provenance() == greedy.provenance()  # so a change of engine alone rewrites nothing
    assert with_server().decoding.gpus_a_worker == 0


def test_texts_of_a_chat_server_are_not_those_of_the_bundled_model(tmp_path):
    columns = {"users": {"user_id": [1]}, "items": {"item_id": [1], "title": ["Heat"]}}
    columns["interactions"] = {"user_id": [1], "item_id": [1], "timestamp": [1_700_000_000]}
    for name, values in columns.items():
        pq.write_table(pa.table(values), tmp_path / f"{name}.parquet")
    tables = {"tables": TablesSettings(path=str(tmp_path))}
    chat, completions = (with_server(**api).model_copy(update=tables) for api in ({"api": "chat"}, {}))
    assert chat.effective_knowledge == chat.knowledge and completions.effective_knowledge != completions.knowledge
    assert not needs_a_model(chat) and needs_a_model(completions)
    with pytest.raises(ConfigError, match=r"names no folder.* or decoding\.endpoint\.api to chat"):
        require_files(completions)
    require_files(chat)


def test_the_options_of_an_endpoint_are_shown_with_their_defaults():
    shown = {entry["option"]: entry for entry in options_of(with_server(timeout_s=5), Settings())}
    assert shown["decoding.endpoint.timeout_s"]["is_changed"] and shown["decoding.endpoint.timeout_s"]["default"] == 600
    assert not shown["decoding.endpoint.give_up_after_s"]["is_changed"]
    assert shown["decoding.endpoint.url"]["value"] == SERVER["url"]


def test_the_page_of_endpoints_has_every_option_and_its_examples_are_configurations():
    page = (PACKAGE_ROOT / "docs" / "endpoint.md").read_text(encoding="utf-8")
    blocks = [yaml.safe_load(entry) for entry in re.findall(r"^```yaml\n(.*?)```", page, re.MULTILINE | re.DOTALL)]
    assert len(blocks) == 2 and all(Settings.model_validate(entry).decoding.endpoint for entry in blocks)
    shown = re.findall(r"^\| `(\w+)`", page, re.MULTILINE)
    assert [name for name in shown if name in EndpointSettings.model_fields] == list(EndpointSettings.model_fields)


THINKS = "{{ messages[0].content }}{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"


@pytest.mark.parametrize(
    ("option", "own", "ends_with"),
    [("off", "", "Go."), ("cut", "", "Go.<think>"), ("off", "chat_options: {enable_thinking: true}", "Go.<think>")],
)
def test_thinking_sets_the_switch_of_the_chat_template_unless_a_template_of_prompts_does(
    tmp_path, option, own, ends_with
):
    own = f"name: mine\nversion: 1\nframework: own\nside: item\nparser: free\ninstruction: Go.\n{own}\n"
    write(tmp_path / "mine.yaml", own)
    knowledge = f"knowledge: {{template_dir: {tmp_path}, item_template: mine}}"
    settings = load_settings(write(tmp_path / "c.yaml", f"{knowledge}\ndecoding: {{thinking: {option}}}\n"))
    template, tokenizer = settings.template("item"), load_tokenizer(settings.model_dir)
    tokenizer.chat_template = THINKS
    rendered = render_shown(template, Shown(None, (), 0), tokenizer, 100)
    assert tokenizer.decode(rendered.token_ids).endswith(ends_with)
