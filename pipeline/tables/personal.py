"""Attributes that look like personal data or secrets, by the name of their column or by its values.

Prompts show them only if they are named (`Columns.shown`). A name is enough, so that a column does not come and go with
its rows; values count if a large share of them has one form. Attributes of users are searched for everything that tells
who or where somebody is. Attributes of items are public and are searched only for credentials, bank details and e-mail
addresses: names, authors, a venue's address, codes of digits or the phone that a case fits describe items.
"""

import ipaddress
import re
import unicodedata
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.tables.schema import ENTITY_TABLES, attribute_columns, is_text, plain_column

MAX_VALUES = 10_000  # values of a column that are examined; if it has more, evenly spread ones
MAX_CHARS = 2_000  # characters of a value that are examined
MIN_SHARE = 0.3  # share of values in a form that only personal data have
MIN_DIGITS_SHARE = 0.9  # share of values in a form that other numbers may have by chance
MIN_FLAG_SHARE = 0.95  # share of yes or no: such a column says whether somebody has an address, not which
MIN_NUMBER = 10_000  # a column with smaller numbers only counts e-mails, tokens or phones
FLAGS = frozenset(
    ["y", "n", "yes", "no", "t", "f", "true", "false", "0", "1", "0.0", "1.0", "j", "ja", "nein", "oui", "non"]
)


@dataclass(frozen=True)
class _Kind:
    """One kind of personal data.

    `words`: a pattern for names in lower case with underscores, which any words may precede. `whole`: a pattern for
    names that only a word for a person may precede.
    """

    what: str
    words: str = "(?!)"
    whole: str = "(?!)"
    of_items: str | None = None  # the pattern in place of `words` for items; None: nothing
    is_number: bool = False  # whether small numbers can be of this kind


_EMAIL = (
    r"e_?mails?|mails?|courriel|correos?|correo_electronico|correio|posta_elettronica|(e_?)?mail_?(address|adresse)|"
    r"(adresse|direccion|indirizzo|endereco)_(de_)?(e_?mail|courriel|correo)|почта|邮箱"
)
_SECRETS = (
    r"pass_?words?|passwor[dt]|passwd|pwd|pw|pass_?(phrase|code)|kennwort|mot_de_passe|mdp|contrasena|senha|wachtwoord|haslo|losenord|пароль|密码|"
    r"(api|auth|access|private|secret|encryption|ssh|session|client)_?(key|secret)|"
    r"(auth|access|refresh|session|bearer|id|csrf|api|reset|fcm|push)_?tokens?|jwt|totp_?secret"
)
_KINDS = (
    _Kind("e-mail addresses", _EMAIL, of_items=_EMAIL),
    _Kind("secrets", whole="pin", of_items=_SECRETS, words=rf"{_SECRETS}|"
        r"tokens?|secret|credentials?|t?otp|salt|hash|digest|(security|secret)_(question|answer)|recovery_codes?"),
    _Kind("bank details", of_items=r"iban|bank_?account|cvv2?|cvc2?", words=
        r"iban|bank_?account|(account|konto|acct)_?(number|no|nr|nummer)|(credit|debit|payment)_?card|(card|cc)_?(number|no|num)|"
        r"ccn|cvv2?|cvc2?|kredit_?karten?_?(nummer|nr)?|carte_(bancaire|bleue|de_credit)|tarjeta(_de)?_credito|sort_code|bic|"
        r"swift(_code)?|routing_number|last_?4"),
    _Kind("numbers of papers of identity", words=
        r"ssn|social_?(security|insurance)|securite_sociale|seguridad_social|(id|identity)_(card|number)|nino|personnummer|"
        r"cedula|cnpj|rfc|vat_(id|number|no)|sozialversicherungs_?(nummer|nr)|national_?(id|insurance)|passport|reisepass|"
        r"passeport|pasaporte|(personal)?ausweis(_?(nummer|nr))?|driv(er|ers|ing)_?licen[cs]e|tax_?(id|number|no|code)|"
        r"steuer_?(id|nummer|nr)|nif|dni|curp|cpf|bsn|aadhaa?r|pesel|codice_fiscale|licen[cs]e_plate|kennzeichen"),
    _Kind("network or device identifiers", words=
        r"ip|ipv[46]|ip_?addr(ess)?|remote_addr|hostname|adresse_ip|direccion_ip|mac_?addr(ess)?|device_?(id|uuid|token|fingerprint)"
        r"|im[es]i|idf[av]|gaid|aaid|udid|msisdn|(advertising|ad|android|cookie|session|visitor|browser)_?id|cookie|"
        r"fingerprint|user_?agent|[ug]uid"),
    _Kind("phone numbers", words=
        r"(tele)?(ph|f)on[eo]?s?|tel|(tele)?fax|mobile|mobile?_?phone|mobil|movil|celular|cell(phone|ulare)?|handy|whatsapp|"
        r"rufnummer|((mobil_?)?telefon|handy|mobil|mobilfunk|fax)_?(nummer|nr)?|telefoon(nummer)?|phone_?(number|no)|"
        r"contact_(number|no|num)|телефон|电话|手机号?|電話(番号)?"),
    _Kind("names of people",
        whole="names?|nom|nombre|nome|naam|nick|log_?in|handle|initials|pseudo(nyme?)?|usuario", words=
        r"(first|last|full|given|family|middle|maiden|sur|fore|nick|user|screen|display|real|legal|birth|holder)_?names?|"
        r"[fl]name|vorname|(nach|familien|geburts|benutzer|nutzer|kunden)_?name|emergency_contact|prenom|apellidos?|cognome|sobrenome|nickname|"
        r"voornaam|achternaam|nom_(de_famille|complet|utilisateur)|nom(br)?e_completo|nazwisko|imie|f[oø]r(nam[en]|navn)|"
        r"ef?ter(namn|navn)|фамилия|имя|姓名|氏名"),
    _Kind("dates of birth", is_number=True, words=
        r"birth_?(date|day)|b_?day|date_?(of_?)?birth|dob|geburts_?(datum|tag)|geb_?datum|fecha_(de_)?nac(imiento)?|"
        r"date_(de_)?naissance|data_(di_)?nascita|data_(de_)?nascimento|geboorte_?datum|born(_on)?|дата_рождения|生日|生年月日"),
    _Kind("parts of postal addresses", is_number=True, words=
        r"address(es)?|addr|((privat|wohn|heim|post|rechnungs|liefer)_?)?adresse|anschrift|adres|direccion|indirizzo|endereco|strasse|stra?at|street(_name)?|rue|calle|"
        r"address_?line(_?\d)?|house_?(number|no)|haus_?(nummer|nr)|huisnummer|apartment|zip|postal|pin_?code|(zip|post|postal)_?code|plz|postleitzahl|"
        r"code_postal|codigo_postal|cep|адрес|地址|住所"),
    _Kind("places on the map", is_number=True, words=
        r"lat|lon|lng|latitude?|longitude?|gps|geo_?(location|hash|point|coordinates?)|coord(inate)?s?|lat_?lo?ng?"),
    _Kind("times of the last visit", is_number=True, words=
        r"(last|latest|letzter?|derniere?|ultim[oa]|prev(ious)?)_?(log_?in|log_?on|sign_?in|seen|active|activity|access|visit"
        r"|connexion|connection|anmeldung|besuch|acceso|accesso|acesso)"),
    _Kind("sensitive data", is_number=True, words=
        r"religion|ethnicity|ethnic_(group|origin)|race|caste|sexual_?(orientation|preference)|sexuality|"
        r"political_?(party|affiliation|views?|orientation)|disabilit(y|ies)|diagnos[ei]s|(medical|health)_(conditions?|history)|"
        r"blood_(type|group)|criminal_(record|history)|union_member(ship)?"),
    _Kind("profiles elsewhere", words=
        r"(facebook|twitter|instagram|linkedin|telegram|skype|discord|github|google|wechat|tiktok)_?"
        r"(id|handle|url|user(name)?|profile|account)|(profile|avatar|photo|picture)_?(url|link)|gravatar"),
)  # fmt: skip
# Words that may follow a kind: phone_number, but not phone_model; email_hash, but not email_verified.
_BEHIND = (
    r"(_?(numbers?|num|no|nr|nummer|id|ids|address|adresse|hash|hashed|digest|md5|sha\d*|bcrypt|encrypted|enc|value|text|"
    r"raw|primary|secondary|home|work|private|current|normali[sz]ed|clean|masked|e164|at|on|date|time|ts|timestamp|utc|\d))*"
)
_PERSON = (
    r"(users?|customer|client|member|person|contact|account|kunden?|profile|my|subscriber|reader|listener|patient|employee|"
    r"student|guest|owner|spouse|child|mother|father|parent)"
)
_IS_FLAG = (
    r"(has|have|is|was|num|n|count|nb|number_of|no_of|total|days_since|since|wants?|accepts?|allows?|opt|uses?)_.*"
)

# Forms of whole values. Other numbers may have a form in `_BY_CHANCE` by chance.
_EMAIL_FORM = r"[^\s@<>()\[\],;:\"']{1,64}@[\w-]{1,63}(\.[\w-]{1,63}){1,8}"
_FORMS = {
    "secret": (
        r"\$(2[abxy]?|1|5|6|y|argon2\w*|scrypt|pbkdf2[\w-]*)\$.+|pbkdf2_\w+\$.+|\{S?SHA\d*\}.+|"
        r"eyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]*|(Bearer|Basic) [\w.~+/=-]{8,}|-----BEGIN .+|(AKIA|ASIA)[0-9A-Z]{16}|"
        r"AIza[\w-]{35}|(gh[pousr]|glpat|xox[abprs]|hf|github_pat)[-_][\w-]{10,}|[spr]k[-_](live_|test_|proj-|ant-)?\w[\w-]{15,}"
    ),
    "hash": r"(?=.*[a-f])[0-9a-f]{32}|(?=.*[A-F])[0-9A-F]{32}|(?i:[0-9a-f]{40}|[0-9a-f]{56}|[0-9a-f]{64}|[0-9a-f]{96}|"
            r"[0-9a-f]{128})|[A-Za-z0-9+/]{22}==|[A-Za-z0-9+/]{27}=|[A-Za-z0-9+/]{43}=|[A-Za-z0-9+/]{86}==",
    "iban": r"(?i:[a-z]{2}\d{2}( ?[a-z0-9]){11,30})",
    "uuid": r"\{?[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\}?",
    "mac": r"[0-9A-Fa-f]{2}([:-][0-9A-Fa-f]{2}){5}",
    "ip": r"\d{1,3}(\.\d{1,3}){3}(:\d+|/\d+)?|(?=.*:.*:)[0-9A-Fa-f:.]{3,45}",
    "ssn": r"\d{3}-\d{2}-\d{4}",
    "profile": r"https?://(www\.)?(linkedin\.com/in|facebook\.com|instagram\.com|twitter\.com|x\.com|t\.me)/\S+",
    "place": r"\(?-?\d{1,3}\.\d{3,}[,; ]\s*-?\d{1,3}\.\d{3,}\)?|POINT ?\(.+\)",
    "phone": r"(tel:)?\+[1-9][\d\s().\-/]{6,18}\d|0\d([ .\-]\d{2}){4}",
    "card": r"\d{13,19}|\d{4}([ -]\d{4}){3}|\d{4}[ -]\d{6}[ -]\d{5}",
    "local": (
        r"(1[ .-]?)?\(?[2-9]\d{2}\)?[ .\-]{0,2}[2-9]\d{2}[ .\-]?\d{4}|\d{3}-\d{4}|0\d{8,13}|[1-9]\d{10,11}|"
        r"(?!\d{2}[./-]\d{2}[./-]\d{2,4}$)\(?0\d{1,5}\)?[ ./\-]{1,3}\d[\d \-]{3,12}"
    ),
}  # fmt: skip
_WHAT = {
    "email": "e-mail addresses", "secret": "secrets", "hash": "hashes", "iban": "bank details", "uuid": "identifiers",
    "mac": "network or device identifiers", "ip": "network or device identifiers",
    "ssn": "numbers of papers of identity", "profile": "profiles elsewhere", "place": "places on the map",
    "phone": "phone numbers", "card": "numbers of payment cards", "local": "phone numbers",
}  # fmt: skip
_OF_ITEMS = ("email", "secret", "iban")
_BY_CHANCE = ("card", "local")
_FORM = re.compile("|".join(f"(?P<{name}>{form})" for name, form in _FORMS.items()))
_E_MAIL = re.compile(_EMAIL_FORM)


def personal_data(users: pa.Table, items: pa.Table) -> dict[Side, dict[str, str]]:
    """By side, the result of `personal_columns` for the attributes of its table."""
    sides: dict[Side, pa.Table] = {"user": users, "item": items}
    return {
        side: personal_columns(entities, side, attribute_columns(entities.schema, ENTITY_TABLES[side]))
        for side, entities in sides.items()
    }


def personal_columns(entities: pa.Table, side: Side, columns: list[str]) -> dict[str, str]:
    """The columns of users or items that look like personal data or secrets, each with a phrase that says why."""
    personal = {}
    for name in columns:
        column = entities[name]
        text = column.type.value_type if pt.is_list(column.type) else column.type
        column = column if pt.is_large_string(text) else plain_column(column)  # the plain type holds up to 2 GiB
        if not pt.is_boolean(column.type):
            values = _some_values(column)
            if looks_like := _by_name(name, side, column, values) or _by_values(name, side, values):
                personal[name] = looks_like
    return personal


def plain_name(name: str) -> str:
    """A column's name as the patterns expect it: words in lower case, without accents, joined by underscores."""
    text = unicodedata.normalize("NFKD", name.replace("ß", "ss"))
    text = "".join(character for character in text if not unicodedata.combining(character))
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", text)
    return re.sub(r"[\W_]+", "_", text).strip("_").lower()


def _by_name(name: str, side: Side, column: pa.ChunkedArray, values: list[str]) -> str | None:
    plain = plain_name(name)
    num_flags = sum(value.lower() in FLAGS for value in values)
    if re.fullmatch(_IS_FLAG, plain) or (values and num_flags >= MIN_FLAG_SHARE * len(values)):
        return None
    for kind in _KINDS:
        words, whole = (kind.words, kind.whole) if side == "user" else (kind.of_items or "(?!)", "(?!)")
        if re.fullmatch(rf"(.*_)?({words}){_BEHIND}|({_PERSON}_)*({whole}){_BEHIND}", plain):
            return f"{kind.what}, by its name" if kind.is_number or not _are_small_numbers(column) else None
    return None


def _are_small_numbers(column: pa.ChunkedArray) -> bool:
    if not (pt.is_integer(column.type) or pt.is_floating(column.type)):
        return False
    highest = pc.max(pc.abs(column.cast(pa.float64(), safe=False))).as_py()
    return highest is not None and highest < MIN_NUMBER


def _by_values(name: str, side: Side, values: list[str]) -> str | None:
    forms = [form for value in values if (form := form_of(value, name, side)) is not None]
    if not forms:
        return None
    num_precise = sum(form not in _BY_CHANCE for form in forms)
    if num_precise < MIN_SHARE * len(values) and len(forms) < MIN_DIGITS_SHARE * len(values):
        return None
    form = max(sorted(set(forms)), key=forms.count)
    return f"{_WHAT[form]}, by {len(forms) / len(values):.0%} of its values"


def form_of(value: str, name: str, side: Side) -> str | None:
    """The form of personal data that a value of a column has, a key of `_WHAT`; None if it has none.

    An e-mail address may be part of a text about a user; of an item it must be the whole value.
    """
    if "@" in value and (_E_MAIL.search(value) if side == "user" else _E_MAIL.fullmatch(value.removeprefix("mailto:"))):
        return "email"
    match = _FORM.fullmatch(value)
    if match is None:
        return None
    form = next(form for form in _FORMS if match[form] is not None)
    is_refused = (side == "item" and form not in _OF_ITEMS) or (form == "ip" and "version" in name.lower())
    is_valid = {"ip": _is_ip, "iban": _is_iban, "card": _is_card}.get(form, bool)
    return form if is_valid(value) and not is_refused else None


def _is_ip(value: str) -> bool:
    is_v4 = value.count(":") < 2
    with suppress(ValueError):
        return bool(ipaddress.ip_interface(value.partition(":")[0] if is_v4 else value))
    return False


def _is_iban(value: str) -> bool:
    """Whether the check digits are right (ISO 13616)."""
    code = value.replace(" ", "").upper()
    return int("".join(str(int(character, 36)) for character in code[4:] + code[:4])) % 97 == 1


def _is_card(value: str) -> bool:
    """Whether the last digit is the right check digit (Luhn), and there are at least two different digits."""
    digits = [int(character) for character in reversed(value) if character.isdigit()]
    doubled = sum(sum(divmod(2 * digit, 10)) for digit in digits[1::2])
    return len(set(digits)) > 1 and (sum(digits[::2]) + doubled) % 10 == 0


def _some_values(column: pa.ChunkedArray) -> list[str]:
    """At most `MAX_VALUES` values of a plain column as text, lists by their parts; none for times and other types."""
    column = pc.list_flatten(column) if pt.is_list(column.type) else column
    is_read = is_text(column.type) or pt.is_integer(column.type) or pt.is_floating(column.type)
    if not is_read and not isinstance(column.type, pa.UuidType | pa.JsonType):
        return []
    column = column.drop_null()
    if len(column) > MAX_VALUES:
        column = column.take(pa.array(np.linspace(0, len(column) - 1, MAX_VALUES).astype(np.int64)))
    texts = (
        str(int(value) if isinstance(value, float) and value.is_integer() else value) for value in column.to_pylist()
    )
    return [text.strip()[:MAX_CHARS] for text in texts if text.strip()]
