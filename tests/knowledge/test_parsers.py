import numpy as np
import pyarrow.parquet as pq
import pytest

from laserbatch.jobs.settings import Settings
from laserbatch.pipeline.errors import ConfigError, RowError
from laserbatch.pipeline.knowledge.answers import language_of, require_answer
from laserbatch.pipeline.knowledge.parsers import load_parser, parse_answer
from laserbatch.pipeline.knowledge.prompts import Shown
from laserbatch.pipeline.knowledge.templates import SHIPPED_TEMPLATES, KnowledgeSettings, PromptTemplate, load_template

USER, ITEM = map(Settings().effective_knowledge.template, ("user", "item"))
PROFILE, INTERESTS, FACTS = map(load_template, ("rlmrec_user", "once_user", "trawl_item"))


def test_an_answer_of_numbers_alone_is_no_answer():
    """A small model that must keep to a form may fill it with numbers."""
    for parser, text in (
        (USER, "1. Genre: 1\n2. Theme: 2 / 10"),
        (FACTS, f"{FACTS.factors[0]}: 7\n{FACTS.factors[1]}: -"),
    ):
        with pytest.raises(RowError, match="unparsable: no field has a letter"):
            parse_answer(parser, text)
    assert parse_answer(USER, "1. Genre: 1990\n2. Theme: Meer").fields == {"Genre": "1990", "Theme": "Meer"}
    assert parse_answer(USER, "1. Genre: 7\n2. Theme: 日本").fields["Theme"] == "日本"


def test_an_answer_that_says_the_same_of_everything_is_no_answer():
    """A small model that must keep to a form may write the same text for every aspect."""
    unknown = "\n".join(f"{name}: unknown" for name in FACTS.factors[:3])
    for template, text in ((USER, "1. Genre: The\n2. Theme: the.\n3. Style: The"), (FACTS, unknown)):
        with pytest.raises(RowError, match=r"loops: all 3 fields say"):
            parse_answer(template, text)
    for text in ("1. Genre: The", "1. Genre: Mystery\n2. Theme: Mystery"):
        assert set(parse_answer(USER, text).fields.values()) <= {"The", "Mystery"}
    assert len(parse_answer(USER, "1. Genre: The\n2. Theme: The\n3. Style: sea").fields) == 3


@pytest.mark.parametrize(
    "text",
    [
        "1. Genre: mostly Mystery.\n2. Theme: the sea; more.",
        "Sure, here it is:\n\n1. **Genre**: mostly Mystery.\n\n2. **Theme:** the sea; more.",
        "1) Genre - mostly Mystery.\n2) Theme – the sea; more.",
        "**1. Genre:** mostly Mystery.\n**2. Theme:** the sea;\nmore.",
        "### 1. Genre\nmostly Mystery.\n### 2. Theme\nthe sea; more.",
        "- (1) Genre: mostly Mystery.\n- (2) Theme: the sea; more.",
        "1. Genre: mostly Mystery. 2. Theme: the sea; more.",
        "1. mostly Mystery.\n2. the sea; more.",
    ],
)
def test_numbered_aspects_in_the_forms_that_models_write(text):
    fields = parse_answer(USER, text).fields
    assert {name: " ".join(value.split()) for name, value in fields.items()} == {
        "Genre": "mostly Mystery.",
        "Theme": "the sea; more.",
    }


def test_an_aspect_has_the_factors_spelling():
    """The encoding looks fields up by that spelling."""
    assert list(parse_answer(USER, "1. GENRE: Mystery.\n2. **theme**: the sea.").fields) == ["Genre", "Theme"]


def test_a_repeated_aspect_is_joined_and_an_unknown_number_named():
    assert parse_answer(USER, "1. Genre: a\n2. Genre: b").fields == {"Genre": "a b"}
    assert parse_answer(USER, "12. something").fields == {"aspect 12": "something"}


@pytest.mark.parametrize("text", ["", "  \n", "A person with taste.", "1.\n2. "])
def test_no_numbered_aspect_is_a_row_error(text):
    with pytest.raises(RowError, match=r"^unparsable: "):
        parse_answer(USER, text)


def test_free_texts_are_kept_whole():
    assert parse_answer(ITEM, " A tale.\n").fields == {"text": "A tale."}
    with pytest.raises(RowError, match="empty"):
        parse_answer(ITEM, "\n")


@pytest.mark.parametrize(
    ("text", "repairs"),
    [
        ('{"summary": "a b", "reasoning": "c"}', ()),
        ('Sure:\n```json\n{"summary": "a b",\n"reasoning": "c"}\n```', ("json-around",)),
        ('{"summary": "a b", "reasoning": "c', ("json-cut",)),
        ('{"summary": ["a b"], "reasoning": "c"}', ("json-shape",)),
    ],
)
def test_json_is_mended_by_rules_that_have_names(text, repairs):
    assert parse_answer(PROFILE, text, is_cut=True) == ({"summary": "a b", "reasoning": "c"}, repairs)


def test_json_with_bad_quotes_and_commas_is_mended():
    assert parse_answer(PROFILE, '{summary: \'a\', "reasoning": "b",}') == (
        {"summary": "a", "reasoning": "b"},
        ("json-syntax",),
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("A person with taste.", "unparsable"),
        ("{", "unparsable"),
        ('["a", "b"]', "unparsable"),
        ('{"reasoning": "x"}', "missing-field"),
        ('{"summary": ""}', "missing-field"),
        ('{"summary": " "}', "missing-field"),
        ('{"summary": {"a": 1}}', "wrong-type"),
        ('{"summary": true}', "wrong-type"),
        ('{"summary": "a", "reasoning": "b", "Summary ": "c"}', "duplicate-field"),
        ("{'summary': 'a', 'reasoning': 'b', 'summary': 'c',}", "duplicate-field"),
        ("[" * 100_000, "unparsable"),
    ],
)
def test_json_that_is_not_what_was_asked_for_is_refused_by_kind(text, reason):
    with pytest.raises(RowError, match=f"^{reason}: "):
        parse_answer(PROFILE, text)


def test_interests_are_lists_and_a_field_that_may_be_missing_is():
    assert parse_answer(INTERESTS, '{"interests": ["sea", "sea", "crime"], "regions": []}').fields == {
        "interests": "sea, crime"
    }
    assert parse_answer(INTERESTS, '{"interests": "sea, crime"}').repairs == ("json-shape",)


def test_a_list_that_mostly_repeats_itself_is_refused():
    with pytest.raises(RowError, match=r"^loops: only 2 of the 5 entries of 'interests' differ"):
        parse_answer(INTERESTS, '{"interests": ["The", "The", "sea", "The", "The"]}')
    assert (
        parse_answer(INTERESTS, '{"interests": ["sea", "sea", "crime", "crime"]}').fields["interests"] == "sea, crime"
    )
    assert parse_answer(INTERESTS, '{"interests": ["sea", "sea", "sea"]}').fields["interests"] == "sea"


def test_attributes_are_lines_of_the_names_asked_for_in_any_list():
    text = "Here:\n1. **Subject**: the sea\n- style - slow\n* Budget: large\nAppeal:\n"
    assert parse_answer(FACTS, text).fields == {"Subject": "the sea", "Style": "slow"}
    with pytest.raises(RowError, match=r"^unparsable: the answer has no line `Name: value` for Subject"):
        parse_answer(FACTS, "A story of the sea.")


def test_a_parser_of_ones_own_stands_beside_its_template(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nversion: 1\nframework: own\nside: item\nparser: mine.py\ninstruction: Tags, please.\n"
    )
    with pytest.raises(ConfigError, match=r"its parser .*mine\.py is not there"):
        load_template("mine", tmp_path)
    code = "def parse(text):\n    if '#' not in text:\n        raise ValueError('no tag')\n"
    (tmp_path / "mine.py").write_text(code + "    return {'tags': text.replace('#', '')}\n")
    template = load_template("mine", tmp_path)
    assert parse_answer(template, "#sea #crime").fields == {"tags": "sea crime"}
    with pytest.raises(RowError, match=r"^unparsable: no tag"):
        parse_answer(template, "sea")
    with pytest.raises(RowError, match=r"^missing-field: the answer has no text for tag or mood, which"):
        parse_answer(template.model_copy(update={"encode": ("tag", "mood")}), "#sea")
    with pytest.raises(RowError, match=r"^missing-field: the answer has no text for tags"):
        parse_answer(template.model_copy(update={"encode": ("tags",)}), "# ")
    with pytest.raises(RowError, match=r"^missing-field: the answer has no text for Budget"):
        parse_answer(FACTS.model_copy(update={"encode": ("Budget",)}), "Subject: the sea")
    (tmp_path / "mine.py").write_text(code + "    return text\n")
    load_parser.cache_clear()
    assert load_template("mine", tmp_path).parser_sha256 != template.parser_sha256
    with pytest.raises(RowError, match="returned str; expected names"):
        parse_answer(template, "#sea")


@pytest.mark.parametrize("parse", ["{}[text]", "text.lines()", "re.match('x', text).group()"])
def test_a_parser_that_fails_at_a_text_refuses_that_text(tmp_path, parse):
    (tmp_path / "mine.py").write_text(f"import re\ndef parse(text):\n    return {parse}\n")
    template = FACTS.model_copy(update={"parser": "mine.py", "parser_path": tmp_path / "mine.py"})
    with pytest.raises(RowError, match=r"^unparsable: mine\.py raised (KeyError|AttributeError): "):
        parse_answer(template, "The sea.")


@pytest.mark.parametrize("code", ["import sys\ndef parse(text): ...\nsys.exit(0)", "parse = 3", "def parse(text)", ""])
def test_a_parser_that_ends_the_program_or_is_none_is_refused(tmp_path, code):
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ConfigError, match=r"mine\.py cannot be used: .*expected `def parse\(text\)`"):
        load_parser(tmp_path / "mine.py")


@pytest.mark.parametrize("name", ["Mood: calm or wild", "Price – value", "Pay - benefits", "long " * 14 + "name"])
def test_a_factor_may_have_a_colon_or_dash_in_its_name(name):
    text = f"Subject: the sea\n{name}: high"
    for template, answer in ((FACTS, text), (USER, f"1. Subject: the sea\n2. {name}: high")):
        asked = template.model_copy(update={"factors": ("Subject", name)})
        assert parse_answer(asked, answer).fields == {"Subject": "the sea", name: "high"}


def test_an_answer_that_repeats_its_prompt_or_is_in_another_script_is_none():
    prompt, own = np.arange(200, dtype=np.int32), np.arange(1_000, 1_060, dtype=np.int32)
    require_answer(PROFILE, "A lover of the sea, \u6d77.", own, prompt)
    with pytest.raises(RowError, match=r"^repeats-prompt: 77% of"):
        require_answer(PROFILE, "x", np.concatenate([prompt[50:151], own[:30]]), prompt)
    with pytest.raises(RowError, match=r"^wrong-language: asked in Latin script, answered in Cjk"):
        require_answer(PROFILE, "\u559c\u6b22\u6d77\u6d0b\u6545\u4e8b" * 5, own, prompt)
    anywhere = PROFILE.model_copy(update={"any_language": True})
    require_answer(anywhere, "\u559c\u6b22\u6d77\u6d0b\u6545\u4e8b" * 5, own, prompt)


SAID = {
    "English": (
        "A reader who is drawn to the sea and to slow mysteries, and who would rather wait for the end of a "
        "story than be told of it by others."
    ),
    "French": (
        "Un lecteur qui est attiré par la mer et les mystères lents, et qui préfère attendre la fin d'une "
        "histoire que de se la faire raconter par les autres."
    ),
    "German": (
        "Ein Leser, der sich zum Meer und zu langsamen Geheimnissen hingezogen fühlt und lieber auf das Ende "
        "einer Geschichte wartet, als es von anderen zu hören."
    ),
    "Spanish": (
        "Un lector que se siente atraído por el mar y los misterios lentos, y que prefiere esperar el final "
        "de una historia a que se lo cuenten los demás."
    ),
    "Italian": (
        "Un lettore che è attratto dal mare e dai misteri lenti, e che preferisce aspettare la fine di una "
        "storia piuttosto che sentirla raccontare da altri nel corso della serata."
    ),
    "Portuguese": (
        "Um leitor que se sente atraído pelo mar e por mistérios lentos, e que prefere esperar pelo fim de "
        "uma história a que os outros lha contem, com as mãos no livro."
    ),
    "Dutch": (
        "Een lezer die van de zee en van trage raadsels houdt, en die liever op het einde van een verhaal "
        "wacht dan dat het door anderen wordt verteld."
    ),
    "Polish": (
        "Czytelnik, który lubi morze oraz powolne tajemnice i który woli czekać na koniec historii, niż "
        "słuchać jej od innych, bo nie jest to dla niego to samo."
    ),
    "Swedish": (
        "En läsare som dras till havet och till långsamma mysterier, och som hellre väntar på slutet av en "
        "berättelse än att få det berättat av andra, för det är inte som att läsa."
    ),
}


@pytest.mark.parametrize("language", SAID)
def test_another_language_of_the_same_script_is_refused_and_the_asked_one_kept(language):
    own, prompt = np.arange(60, dtype=np.int32), np.arange(1_000, 1_200, dtype=np.int32)
    assert language_of(SAID[language]) == language
    for requested in SAID:
        template = USER.model_copy(update={"instruction": SAID[requested]})
        if requested == language:
            require_answer(template, SAID[language], own, prompt)
            continue
        with pytest.raises(RowError, match=f"^wrong-language: asked in {requested}, answered in {language}"):
            require_answer(template, SAID[language], own, prompt)
        require_answer(template.model_copy(update={"any_language": True}), SAID[language], own, prompt)
        quoted = f"{SAID[requested]} {SAID[requested]} It is called “{SAID[language][:60]}”."
        require_answer(template, quoted, own, prompt)


FILMS = ["Le Fabuleux destin d'Amélie Poulain", "La Cité des enfants perdus", "Les Parapluies de Cherbourg"]


@pytest.mark.parametrize(
    ("titles", "text"),
    [
        (FILMS, f"1. Favourites: {', '.join(FILMS)}. 2. Genre: whimsical romance."),
        (["千と千尋の神隠し", "もののけ姫"], "1. Genre: anime; 千と千尋の神隠し (2001), もののけ姫 (1997)"),
        (["Щелкунчик и Крысиный король"], "Like «Щелкунчик и Крысиный король»: a ballet"),
    ],
)
def test_titles_that_a_text_quotes_may_be_in_any_language(titles, text):
    nobody, shown = np.arange(60, dtype=np.int32), Shown(None, [(title, None, "5") for title in titles], len(titles))
    with pytest.raises(RowError, match=r"^wrong-language: asked in "):
        require_answer(USER, text, nobody, nobody + 1_000)
    require_answer(USER, text, nobody, nobody + 1_000, shown=shown)
    require_answer(USER, text, nobody, nobody + 1_000, shown=Shown("title: " + "; ".join(titles), (), 0))
    for other in (SAID["French"], "喜欢海洋故事和日本动画电影的人，" * 2):
        with pytest.raises(RowError, match=r"^wrong-language: asked in "):
            require_answer(USER, f"{other} {titles[0]}.", nobody, nobody + 1_000, shown=shown)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            {"parser": "json", "fields": {"interests": "list", "regions": "list"}},
            '{"interests": ["映画", "読書"], "regions": ["日本"]}',
        ),
        ({"parser": "attributes", "factors": ["Subjects", "Style", "Era"]}, "Subjects: 映画\nStyle: 静か\nEra: 昭和"),
        (
            {"json_schema": {"enum": ["calm and quiet, nearly silent", "wild and loud"]}},
            '"calm and quiet, nearly silent"',
        ),
    ],
)
def test_names_of_an_answer_s_form_may_be_in_another_script(form, text):
    free = {
        "name": "own",
        "version": 1,
        "framework": "own",
        "side": "item",
        "parser": "free",
        "instruction": "説明して",
    }
    nobody, shown = np.arange(60, dtype=np.int32), Shown(None, (), 0)
    require_answer(PromptTemplate.model_validate(free | form), text, nobody, nobody + 1_000, shown=shown)
    with pytest.raises(RowError, match=r"^wrong-language: asked in Cjk script, answered in Latin"):
        require_answer(PromptTemplate.model_validate(free), text, nobody, nobody + 1_000, shown=shown)


def test_a_text_of_few_common_words_is_of_no_language():
    interests = '{"interests": ["mystery", "la mer", "die Brücke", "El Niño", "noir", "jazz", "the sea"]}'
    for text in ("Le Petit Prince", interests, ""):
        assert language_of(text) is None
        require_answer(USER, text, np.arange(60, dtype=np.int32), np.arange(1_000, 1_200, dtype=np.int32))


@pytest.mark.parametrize("name", [path.stem for path in sorted(SHIPPED_TEMPLATES.glob("*.yaml"))])
def test_what_ships_is_known_to_ask_in_english(name):
    template = KnowledgeSettings(**{f"{name[-4:]}_template": name}).template(name[-4:])
    with pytest.raises(RowError, match=r"^wrong-language: asked in English, answered in French"):
        require_answer(template, SAID["French"], np.arange(60, dtype=np.int32), np.arange(1_000, 1_200, dtype=np.int32))


@pytest.mark.parametrize("file", ["reki/knowledge", "goodreads/item_knowledge", "goodreads/user_knowledge"])
def test_no_english_answer_of_a_real_model_is_taken_for_another_language(shared_data, file):
    texts = pq.read_table(shared_data / f"{file}.parquet", columns=["text"])["text"].to_pylist()[::3]
    nobody, refused = np.arange(60, dtype=np.int32), []
    for text in texts:
        try:
            require_answer(PROFILE, text, nobody, nobody + 1_000)
        except RowError:
            refused.append(text)
    # Refused texts are descriptions in the language of the book's title, so none has an English article.
    assert sum(" the " in text for text in refused) == 0
    assert len(refused) <= 0.002 * len(texts)


def test_a_text_with_a_loop_in_it_is_no_answer():
    prompt, start = np.arange(50, dtype=np.int32), np.arange(100, 160, dtype=np.int32)
    for period in (1, 3, 24):
        loop = np.resize(start[:period], 96)
        for text in (loop, np.concatenate([start, loop]), np.concatenate([loop, start + 100])):  # a form may end one
            with pytest.raises(RowError, match=rf"^loops: the answer repeats the same {period} tokens"):
                require_answer(USER, "a a a", text, prompt)
    for whole in (np.concatenate([start, np.resize(start[:25], 96)]), start[:50], np.resize(start[:1], 95)):
        require_answer(USER, "a a a", whole, prompt)


@pytest.mark.parametrize("escape", [r"\ud83d", r"\u0000"])
def test_a_field_that_no_file_can_hold_quarantines_its_text(escape):
    """JSON may escape half of a character."""
    answer = f'{{"summary": "Sea {escape}", "reasoning": "x"}}'
    with pytest.raises(RowError, match=r"^undecodable: the answer has '.*', which is no character"):
        parse_answer(PROFILE, answer)


def test_answers_are_read_with_the_punctuation_of_east_asia():
    names = {"factors": ("体裁", "主题")}
    expected = {"体裁": "小说：侦探", "主题": "大海"}
    for text in ("1、体裁：小说：侦探\n2、主题：大海", "1．**体裁**：小说：侦探\n2．**主题**：大海"):
        assert parse_answer(USER.model_copy(update=names), text).fields == expected
    assert parse_answer(FACTS.model_copy(update=names), "体裁：小说：侦探\n主题：大海").fields == expected


def test_only_line_breaks_end_a_line_and_times_of_day_number_nothing():
    name, other = FACTS.factors[:2]
    assert parse_answer(FACTS, f"{name}: sea\u2028salt\r\n{other}: x").fields == {name: "sea\u2028salt", other: "x"}
    assert parse_answer(USER, "1. Genre: noir, at\n10:30 pm").fields == {"Genre": "noir, at\n10:30 pm"}
