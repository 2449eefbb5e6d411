"""Columns that look like personal data or secrets, which prompts show only if they are named."""

import datetime
import hashlib
import uuid
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from laserbatch.jobs.commands.nightly import left_out_columns
from laserbatch.jobs.commands.try_one import with_only
from laserbatch.jobs.settings import Settings
from laserbatch.jobs.stages.inputs import (
    changed_inputs,
    checked_inputs,
    left_out_of_prompts,
    require_template_columns,
)
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.knowledge.questions import SideQuestions, shown_of_row
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.tables.personal import personal_columns
from laserbatch.pipeline.tables.read import read_tables

SOME = [f"some words {number}" for number in range(12)]

PERSONAL_NAMES = """
email e-mail E_Mail eMail emailAddress contact_email mail courriel correo email_hash EMAIL1 e_mail_adresse
phone phoneNumber phone_number Telefon telephone tel mobile mobile_phone Handynummer fax cell celular téléfono msisdn
password password_hash passwd pwd Passwort mot_de_passe contraseña salt api_key apiKey access_token refresh_token token
client_secret secret pin otp session_token private_key
ssn social_security_number passport_number tax_id Steuer-ID dni cpf national_id drivers_license
iban bic credit_card credit_card_number card_no cvv bank_account Kontonummer kreditkarte
name first_name lastName full_name surname Vorname Nachname prénom nom apellidos username user_name nickname login
birthdate date_of_birth dob birthday Geburtsdatum fecha_nacimiento date_naissance
address Straße street street_address home_address Anschrift PLZ zip zip_code postalCode postcode code_postal
lat lon lng latitude longitude geohash gps
ip ip_address IPAddress last_ip ipv6 device_id deviceId mac_address imei idfa user_agent uuid cookie_id session_id
last_login lastLogin last_login_at last_seen last_active letzter_Login dernière_connexion
religion ethnicity race sexual_orientation facebook_id linkedin_url
E-Mail-Adresse telephone_number Mobiltelefon telefoonnummer hashed_password pw_hash auth_key customerName Kundenname
patient_name nome_completo addressLine1 Privatadresse shipping_zip pin_code latitud lat_long coords client_ip
numero_de_telephone numero_securite_sociale Kreditkartennummer card_last4 пароль 电话 姓名
""".split()  # noqa: SIM905 (a word a column)

ORDINARY_NAMES = """
age age_band gender occupation city country region state language plan company_name plan_name city_name favorite_genre
email_opt_in email_verified email_domain has_phone is_mobile phone_model mobile_os device_type token_count login_count
num_orders birth_year about bio signup_channel name_of_plan passion ship_country trip_type relationship template latest
tell zipper mailing_list_topics hashtags ip_country email_frequency last_purchase last_order_date credit_score
nationality salary interests team_name device_name postcard_fan phonetics mailman namespace region_code
favourite_street_food
""".split()  # noqa: SIM905 (a word a column)

ITEM_NAMES = """
name title author isbn phone_compatible address street lat lon zip phone token salt key brand_name first_name birthday
uuid ip card_number session race
""".split()  # noqa: SIM905 (a word a column)


def test_a_name_of_personal_data_decides_alone():
    users = pa.table(dict.fromkeys(PERSONAL_NAMES, SOME))
    personal = personal_columns(users, "user", users.column_names)
    assert list(personal) == PERSONAL_NAMES and all(reason.endswith("by its name") for reason in personal.values())
    for some_rows in (users.slice(0, 1), users.slice(0, 0)):
        assert personal_columns(some_rows, "user", users.column_names) == personal


def test_ordinary_attributes_of_users_and_items_stay():
    users = pa.table(dict.fromkeys(ORDINARY_NAMES, SOME))
    assert personal_columns(users, "user", users.column_names) == {}
    items = pa.table(dict.fromkeys(ITEM_NAMES, SOME))
    assert personal_columns(items, "item", items.column_names) == {}


def test_flags_and_counts_named_after_personal_data_stay():
    users = {"email": [True, False], "phone": ["yes", "no"], "mobile": [0, 1], "emails": [12, 3], "token": [1.0, 250.0]}
    assert personal_columns(pa.table(users), "user", list(users)) == {}
    kept_out = {"zip": [1234, 99501], "lat": [48.1, 2.3], "phone": [4915112345678, 4915112345679]}
    assert set(personal_columns(pa.table(kept_out), "user", list(kept_out))) == set(kept_out)


def many(make) -> list:
    return [make(number) for number in range(40)]


def card(number: int) -> str:
    digits = f"4{number:014d}"
    doubled = sum(sum(divmod(2 * int(digit), 10)) for digit in digits[::-1][::2])
    return f"{digits}{-(doubled + sum(map(int, digits[::-1][1::2]))) % 10}"


def iban(number: int) -> str:
    account = f"{37040044:08d}{number:010d}"
    return f"DE{98 - int(account + '131400') % 97:02d}{account}"


VALUES = {
    "e-mail addresses": lambda n: f"Person{n}@mail.example.org",
    "phone numbers": lambda n: [f"+49 15 12{n:04d}", f"555 234-{n:04d}", f"0171 / 234{n:02d}", "01 23 45 67 89"][n % 4],
    "network or device identifiers": lambda n: [f"192.168.0.{n}", f"2001:db8::{n:x}", f"00:1b:44:11:3a:{n:02x}"][n % 3],
    "bank details": iban,
    "numbers of payment cards": card,
    "hashes": lambda n: hashlib.sha256(bytes([n])).hexdigest(),
    "secrets": lambda n: [f"$2b$12${n:053d}", f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIi{n:02d}.c2ln", f"sk_live_{n:024d}"][n % 3],
    "identifiers": lambda n: str(uuid.UUID(int=n)),
    "numbers of papers of identity": lambda n: f"078-05-{n:04d}",
    "places on the map": lambda n: f"48.{n:04d}, 11.{n:04d}",
}  # fmt: skip


@pytest.mark.parametrize("what", VALUES)
def test_values_of_personal_data_under_a_harmless_name_are_found(what):
    values = many(VALUES[what])
    assert personal_columns(pa.table({"note": values}), "user", ["note"])["note"].startswith(f"{what}, by 100%")
    sparse = pa.table({"note": values + [None] * 60, "parts": [[value] for value in values] + [[]] * 60})
    assert set(personal_columns(sparse, "user", ["note", "parts"])) == {"note", "parts"}
    is_of_items = what in ("e-mail addresses", "secrets", "bank details")
    assert bool(personal_columns(pa.table({"note": values}), "item", ["note"])) is is_of_items


def test_uuid_and_json_columns_are_searched_too():
    ids, bios = pa.array(many(lambda n: uuid.UUID(int=n).bytes), pa.uuid()), many(lambda n: f'{{"to": "a{n}@b.org"}}')
    users = pa.table({"ref": ids, "extra": pa.array(bios, pa.json_())})
    assert set(personal_columns(users, "user", ["ref", "extra"])) == {"ref", "extra"}


def test_numbers_and_texts_that_only_resemble_personal_data_stay():
    rng = np.random.default_rng(0)
    ordinary = {
        "joined": many(lambda n: f"{1 + n % 9:02d}.05.2024"),
        "day": many(lambda n: f"2024-05-{1 + n % 28:02d}"),
        "years": many(lambda n: f"{1950 + n}-{1960 + n}"),
        "at_s": many(lambda n: 1_740_000_000 + n),
        "at_ms": many(lambda n: 1_740_000_000_000 + 7919 * n),
        "number": rng.integers(10**15, 10**16, 40).tolist(),
        "time": many(lambda n: f"12:30:{n:02d}"),
        "app_version": many(lambda n: f"5.12.0.{n}"),
        "income": many(lambda n: f"{n + 10} 345 678"),
        "about": many(lambda n: f"Likes films @ home, {n} a year, e.g. 192.168.0.1 is a joke"),
    }
    assert personal_columns(pa.table(ordinary), "user", list(ordinary)) == {}
    items = {"support": many(lambda n: f"Write to help{n}@example.org"), "ean": many(card)}
    assert personal_columns(pa.table(items), "item", list(items)) == {}


def test_neither_the_order_of_rows_nor_another_row_decides():
    bios = many(lambda n: f"mine is a{n}@b.org" if n % 2 else "none")
    harmless = [*SOME, "me@example.org"]
    for values, is_found in ((bios, True), (bios[::-1], True), ([*bios, "x"], True), (harmless, False)):
        assert bool(personal_columns(pa.table({"bio": values}), "user", ["bio"])) is is_found


@pytest.fixture
def world(tmp_path):
    """Users with e-mail addresses in a column `note`, except in the first row, and zip codes; items with API keys."""
    users = {
        "user_id": [1, 2, 3],
        "zip_code": ["1", "2", "3"],
        "note": ["-", "a@b.org", "c@d.org"],
        "age": [20, 30, 40],
    }
    items = {"item_id": [7], "title": ["Heat"], "name": ["De Niro"], "api_key": ["k"]}
    log = {"user_id": [1, 2], "item_id": [7, 7], "timestamp": [1_740_000_000] * 2, "rating": [5, 4]}
    for name, columns in {"users": users, "items": items, "interactions": log}.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    return tmp_path


def prompt_parts(path, settings: Settings) -> list[str]:
    """Everything that prompts show of the first user and the first item."""
    tables = read_tables(path)
    parts = []
    for side in SIDES:
        questions = SideQuestions(with_only(tables, side, None), side, settings.effective_knowledge.template(side), "")
        (row,) = questions.shown(np.array([0])).to_pylist()
        shown = shown_of_row(row)
        parts += [shown.attributes, *(event[1] for event in shown.events)]
    return parts


def test_prompts_leave_personal_data_out_until_it_is_named(world):
    assert prompt_parts(world, Settings()) == ["- age: 20", "De Niro", "- title: Heat\n- name: De Niro"]
    listed = ["users.zip_code", "users.note", "items.api_key"]
    settings = Settings(tables={"path": world}, knowledge={"personal_attributes": listed})
    assert prompt_parts(world, settings) == [
        "- age: 20\n- zip_code: 1\n- note: -", "De Niro | k", "- title: Heat\n- name: De Niro\n- api_key: k",
    ]  # fmt: skip
    require_template_columns(world, settings, "user")
    wrong = Settings(knowledge={"personal_attributes": ["users.zipcode"]})
    with pytest.raises(ConfigError, match=r"personal_attributes names users\.zipcode.*zip_code"):
        require_template_columns(world, wrong, "user")


def test_a_template_that_names_a_column_shows_it(world):
    (world / "mine.yaml").write_text(
        "name: mine\nversion: 1\nframework: mine\nside: user\nparser: free\ninstruction: Describe.\n"
        "attributes: {columns: ['*', note]}\n"
    )
    settings = Settings(knowledge={"template_dir": world, "user_template": "mine"})
    assert prompt_parts(world, settings)[0] == "- age: 20\n- note: -"
    left_out = left_out_of_prompts(settings, read_tables(world))
    assert [finding.column for finding in left_out] == ["api_key", "zip_code"]


def test_what_prompts_leave_out_is_said_with_the_line_that_shows_it(world):
    api_key, note, zip_code = left_out_of_prompts(Settings(), read_tables(world))
    assert str(zip_code) == (
        "warning: users.zip_code: the column looks like parts of postal addresses, by its name, so prompts leave it "
        "out; expected no data that identifies a person; to show it in prompts, add to `knowledge` in the "
        'configuration: `personal_attributes: ["users.zip_code"]`'
    )
    assert "e-mail addresses, by 67% of its values" in str(note) and api_key.table == "items"


def test_a_night_says_what_prompts_leave_out_and_its_manifest_keeps_it(world, capfd):
    items = pq.read_table(world / "items.parquet").to_pylist()
    items[0]["title"] = "Heat " * 20
    pq.write_table(pa.Table.from_pylist(items), world / "items.parquet")
    inputs, _ = checked_inputs(Settings(tables={"path": world}), datetime.date(2025, 3, 1))
    assert inputs["items"]["cut_in_prompts"] == {"title": "prompts cut 1 of its values"}
    assert set(inputs["users"]["left_out_of_prompts"]) == {"zip_code", "note"}
    assert "warning: users.note: the column looks like e-mail addresses" in capfd.readouterr().err
    assert left_out_columns(SimpleNamespace(origin=SimpleNamespace(inputs=inputs))) == [
        "users.note",
        "users.zip_code",
        "items.api_key",
    ]
    assert changed_inputs({name: {"sha256": of["sha256"]} for name, of in inputs.items()}, inputs) == []
